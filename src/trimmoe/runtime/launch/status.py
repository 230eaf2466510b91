"""What a server process says about itself; plain values that cross process boundaries."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from trimmoe.runtime.machine_report import LinkReport


class Phase(StrEnum):
    """How far a server process is."""

    STARTING = "starting"
    SERVING = "serving"
    FAILED = "failed"
    DRAINED = "drained"
    """It takes no requests any more and has answered all it had; others may still need it."""
    STOPPED = "stopped"
    LOST = "lost"
    """Its process has ended, and is being started again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerStatus:
    """One look at a server process."""

    phase: Phase
    pid: int
    error: str = ""
    """One sentence, if it failed."""
    healthy: bool = False
    """Whether it takes requests."""
    reason: str = ""
    """Why not."""
    peers_up: tuple[str, ...] = ()
    running: int = 0
    """Requests being answered."""
    waiting: int = 0
    dense_bytes: int = 0
    """Bytes of the checkpoint read for what every server holds."""
    expert_bytes: int = 0
    """Bytes of the checkpoint read for this server's experts."""
    warning: str = ""
    """What the operator should know, though it serves."""
    version: str = ""
    """Of its TrimMoE."""
    links: tuple[LinkReport, ...] = ()
    """What its messages have shown of its links."""

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """By name: a server of another version may know more or less."""
        for each in fields(self):
            object.__setattr__(self, each.name, state.get(each.name, each.default))

    @property
    def ready(self) -> bool:
        return self.phase is Phase.SERVING and self.healthy
