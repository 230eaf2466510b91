"""One batch of work, and the steps that there are."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class Step(IntEnum):
    """Kinds of work."""

    ARRIVE = 0
    """Tokens of this server's users set out."""
    ATTEND = 1
    FINISH = 2
    """A layer gathered; the engine decides whether tokens exit."""
    SLOTS = 3
    """Experts for other servers' rows, or for raw ones."""
    PROPAGATE = 4
    """Exited tokens' states, standing still, in all layers at once."""
    TRAIL = 5
    """Exited tokens' states pass a layer without routed experts."""
    CHUNK = 6
    """A prompt's chunk passes a layer."""
    CHUNK_SLOTS = 7
    CHUNK_END = 8
    """After the last layer: the prediction that follows the prompt."""
    GUESS = 9
    """What this server makes of its users' sequences by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One batch."""

    step: Step
    layer: int
    items: list[Any]
    alone: bool = False
    """Whether nothing else was ready, so that nobody waits if it goes on."""
