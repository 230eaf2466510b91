"""The seam between supervision and whatever starts processes."""

from __future__ import annotations

from typing import Protocol

from trimmoe.runtime.launch.status import ServerStatus


class ServerGone(Exception):
    """The process has ended, or cannot be reached; it may come back."""


class ServerHandle(Protocol):
    """One server process as its supervisor sees it."""

    @property
    def name(self) -> str: ...

    def status(self, patience_s: float) -> ServerStatus | None:
        """How it is; None if it did not answer in time. Raises `ServerGone`."""
        ...

    def restart(self) -> None:
        """End the process at once; another one takes its place."""
        ...

    def drain(self) -> None:
        """Begin to have it answer what it is at and take nothing more. Harmless if it is gone."""
        ...

    def stop(self, patience_s: float) -> None:
        """Begin to end it in good order; returns at once. Harmless if it is gone."""
        ...

    def kill(self, patience_s: float) -> None:
        """End it for good, after at most `patience_s` for a `stop` that was begun."""
        ...
