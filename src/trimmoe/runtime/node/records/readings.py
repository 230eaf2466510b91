"""Tokens that a server reads by itself to guess what follows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimmoe.runtime.sampling import Sampling
from trimmoe.runtime.seen import Seen

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(eq=False, kw_only=True, slots=True)
class Reading:
    """Tokens of a sequence that are read to guess what follows them, and how far that has come."""

    sequence: int
    start: int
    """Position of the first."""
    tokens: tuple[int, ...]
    route: tuple[int, ...]
    sampling: Sampling
    seen: Seen | None = None
    """The sequence's tokens up to what is guessed, where draws look back."""
    layer: int = 0
    """That they enter next."""
    hidden: Tensor | None = None
    """Their states, [n, d]; None before the first layer."""
    void: bool = False
    """Whether they were withdrawn."""

    @property
    def sequences(self) -> tuple[int, ...]:
        return (self.sequence,)

    @property
    def positions(self) -> range:
        return range(self.start, self.position)

    @property
    def position(self) -> int:
        """Of what is guessed."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Guessed:
    """What came of it."""

    reading: Reading
    token: int
    confidence: float
    """Its probability."""
