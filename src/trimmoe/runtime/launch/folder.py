"""The run folder: where a machine's servers and whoever supervises them find each other.

A supervisor holds the lock of the folder, a server that of a file in it, each for as long as its
process lives: the system gives locks back however a process ends. So anybody can tell what runs,
also after everybody who knew has been killed, and two supervisors cannot watch the same servers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import trimmoe
from trimmoe.core.errors import UserError
from trimmoe.core.private import (
    make_private,
    read_private,
    require_private,
    write_private,
)
from trimmoe.runtime.launch.note import Note

if TYPE_CHECKING:
    # A server's process listens before it imports what takes seconds.
    from trimmoe.runtime.launch.job import Job

_JOB = "job"
_LONGEST_SOCKET = 100
"""Bytes of a path; systems take 104 or 108."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """That of the servers whose first HTTP port is the folder's name, and of those that take their
    place while they still serve."""

    path: Path

    @staticmethod
    def at(port: int, turn: int = 0) -> RunFolder:
        """The folder of the servers from `port` on, of one of two `turn`s. Raises `UserError` if it
        is not safe to use."""
        folder = RunFolder.named(port, turn)
        if len(os.fsencode(folder.supervisor_socket)) > _LONGEST_SOCKET:
            raise UserError(
                f"{folder.path} is too long a path for sockets; name a shorter one in TRIMMOE_RUN."
            )
        make_private(folder.path.parent)
        make_private(folder.path)
        return folder

    @staticmethod
    def named(port: int, turn: int = 0) -> RunFolder:
        """The same, whether there is one or not."""
        return RunFolder(root_folder() / (f"{port}-{turn}" if turn else str(port)))

    @staticmethod
    def all() -> list[RunFolder]:
        """Those that there are on this machine, of this user. Raises `UserError` if where they are
        is not safe to look at."""
        root = root_folder()
        if not root.is_dir():
            return []
        require_private(root)
        found = [RunFolder(path) for path in sorted(root.iterdir()) if (path / _JOB).is_file()]
        for each in found:
            require_private(each.path)
        return found

    @property
    def port(self) -> str:
        return self.path.name.partition("-")[0]

    def socket(self, index: int) -> Path:
        """Where a process is asked."""
        return self.path / f"{index}.sock"

    @property
    def supervisor_socket(self) -> Path:
        return self.path / "supervisor.sock"

    def write(self, job: Job) -> None:
        """Keep what the servers are to be; whole or not at all."""
        content = pickle.dumps((asdict(job.note()), pickle.dumps(job)))
        write_private(self.path / _JOB, content)

    def read(self) -> Job | None:
        """What they are; None if nobody has said, or another version of this software did.

        Raises `UserError` if anybody else could have said it: a pickle can do what it likes.
        """
        found = self._read()
        if found is None or found[0].version != trimmoe.__version__:
            return None
        return pickle.loads(found[1])

    def note(self) -> Note | None:
        """What is known of them whichever version said it; None if nothing is. Raises as `read`."""
        found = self._read()
        return None if found is None else found[0]

    def _read(self) -> tuple[Note, bytes] | None:
        try:
            said, job = pickle.loads(self._job())
            return Note(**{each.name: said[each.name] for each in fields(Note)}), job
        except (OSError, EOFError, ValueError, TypeError, KeyError, pickle.UnpicklingError):
            return None

    def _job(self) -> bytes:
        require_private(self.path)
        return read_private(self.path / _JOB)

    def claim(self) -> int | None:
        """The folder's lock, as a descriptor to keep open; None if a supervisor has it."""
        while True:
            make_private(self.path)
            with contextlib.suppress(FileNotFoundError):
                descriptor = _locked(self.path, os.O_RDONLY | os.O_DIRECTORY)
                if descriptor is None or _is_still(self.path, descriptor):
                    return descriptor
                # Whoever had it has removed the folder.
                os.close(descriptor)

    def claim_process(self, index: int) -> int | None:
        """Likewise of one process; None if it lives."""
        return _locked(self._lock(index), os.O_RDWR | os.O_CREAT)

    def is_alive(self, index: int) -> bool:
        """Whether the process lives."""
        if not self._lock(index).exists():
            return False
        descriptor = self.claim_process(index)
        if descriptor is None:
            return True
        os.close(descriptor)
        return False

    def alive(self) -> list[int]:
        """The servers that live."""
        locks = [path.stem for path in self.path.glob("*.lock")]
        indices = sorted(int(each) for each in locks if each.isdigit())
        return [index for index in indices if self.is_alive(index)]

    def pid(self, index: int) -> int | None:
        """The number of a process that lives, once it has said so."""
        with contextlib.suppress(OSError, ValueError):
            return int(self._lock(index).read_text())
        return None

    def clear(self) -> None:
        """Forget all; for who holds the lock, once no server lives."""
        for path in self.path.iterdir():
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def _lock(self, index: int) -> Path:
        return self.path / f"{index}.lock"


def say_pid(lock: int) -> None:
    """Whoever finds the lock taken reads the number of this process in it, which has it."""
    os.set_inheritable(lock, False)
    said = f"{os.getpid()}\n".encode()
    os.pwrite(lock, said, 0)
    os.ftruncate(lock, len(said))


def root_folder() -> Path:
    """Short, because socket paths must be; under a name that no other user has."""
    return Path(os.environ.get("TRIMMOE_RUN") or f"/tmp/trimmoe-{os.getuid()}")


def _locked(path: Path, flags: int) -> int | None:
    descriptor = os.open(path, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether what was opened is what is there."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False
