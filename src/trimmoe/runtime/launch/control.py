"""Questions to a process on the same machine, over a socket in its run folder.

The folder is this user's alone (`folder.py`), so whoever reaches the socket may ask. One question
and one answer per connection, as Python objects: both ends are the same installation.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from trimmoe.core.private import require_private

Answers = Mapping[str, Callable[..., Any]]
"""What to do about each question; they are called in threads of their own."""
_BACKLOG = 16


class Unreachable(Exception):
    """Nobody listens, or whoever did ended before it answered."""


class Control:
    """The end that is asked; listens from when it is made until `close`."""

    def __init__(self, path: Path, answers: Answers) -> None:
        """Raises `UserError` if anybody else could ask."""
        require_private(path.parent)
        self._answers = answers
        path.unlink(missing_ok=True)
        self._listener = Listener(str(path), "AF_UNIX", backlog=_BACKLOG)
        self._closed = False
        threading.Thread(target=self._listen, name=f"control {path.name}", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self._listener.close()

    def _listen(self) -> None:
        while not self._closed:
            try:
                asked = self._listener.accept()
            except OSError:
                continue  # Whoever asked is gone already, or this was closed.
            threading.Thread(target=self._answer, args=(asked,), daemon=True).start()

    def _answer(self, asked: Connection) -> None:
        # Who asked may have lost patience: that is no trouble of this process.
        with asked, contextlib.suppress(OSError, EOFError):
            question, arguments = asked.recv()
            asked.send(self._answers[question](*arguments))


class Question:
    """One that was put; its answer may be waited for again and again."""

    def __init__(self, path: Path, question: str, *arguments: Any) -> None:
        """Raises `Unreachable`, and `UserError` if anybody else could answer."""
        try:
            require_private(path.parent)
            self._connection: Any = Client(str(path), "AF_UNIX")
            self._connection.send((question, arguments))
        except (OSError, EOFError) as error:
            raise Unreachable(str(error)) from error

    def answered(self, patience_s: float) -> bool:
        """Whether the answer, or the end of the other process, has come."""
        return self._connection.poll(patience_s)

    def answer(self) -> Any:
        """Waits for it. Raises `Unreachable`."""
        try:
            return self._connection.recv()
        except (OSError, EOFError) as error:
            raise Unreachable("it ended before it answered") from error
        finally:
            self._connection.close()

    def close(self) -> None:
        """Do without the answer."""
        self._connection.close()
