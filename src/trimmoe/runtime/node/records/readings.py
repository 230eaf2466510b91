"""Tokens that a server reads by itself to guess what follows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimmoe.core.specs import IntArray
from trimmoe.engine.lead import DRAFT_MODEL, OWN
from trimmoe.runtime.sampling import Sampling
from trimmoe.runtime.seen import Seen

if TYPE_CHECKING:
    from torch import Tensor

    from trimmoe.runtime.node.records.sequences import Seat


@dataclass(eq=False, kw_only=True, slots=True)
class Reading:
    """Tokens of a sequence that are read to guess what follows them, and how far that has come."""

    sequence: int
    start: int
    """Position of the first."""
    tokens: tuple[int, ...]
    route: tuple[int, ...]
    sampling: Sampling
    source: int = OWN
    """What reads them, as `engine.lead` numbers it."""
    seen: Seen | None = None
    """The sequence's tokens up to what is guessed, where draws look back."""
    layer: int = 0
    """That they enter next."""
    offered: tuple[int, ...] = ()
    """What a draft head takes to follow, which passes the layers with them, to be verified."""
    offers: tuple[Foreseen, ...] = ()
    """What the sequence's first layers here make of that, if it begins behind such layers."""
    hidden: Tensor | None = None
    """Their states, [n, d], and those of what is offered; None before the first layer."""
    more: int = 0
    """How many of what is guessed may be read as well, one after another."""
    prepares: bool = False
    """Whether what a draft head takes to follow the last guess is made ready for the next reading,
    since full depth is far and nobody waits for what is guessed."""
    made: tuple[int, ...] = ()
    """What is guessed so far, each upon the one before."""
    confidence: tuple[float, ...] = ()
    """The probability of each."""
    made_s: float = 0.0
    """When the first was made."""
    seat: Seat | None = None
    """The sequence's place, where this server has any of the route's layers."""
    void: bool = False
    """Whether they were withdrawn."""
    failed: bool = False
    """Whether its source cannot read them."""

    @property
    def sequences(self) -> tuple[int, ...]:
        return (self.sequence,)

    @property
    def positions(self) -> range:
        return range(self.start, self.position)

    @property
    def rows(self) -> range:
        """Positions of what passes the layers together: what follows what was guessed last, or else
        these tokens, and what is offered."""
        if self.made:
            first = self.position + len(self.made) - 1
            return range(first, first + 1 + len(self.offered))
        return range(self.start, self.position + len(self.offered))

    @property
    def passing(self) -> tuple[int, ...]:
        """The tokens at these positions."""
        return (*(self.made[-1:] or self.tokens), *self.offered)

    @property
    def by_draft_model(self) -> bool:
        return self.source == DRAFT_MODEL

    @property
    def is_next(self) -> bool:
        """Whether nothing has come to the place of what is guessed first."""
        seat = self.seat
        if seat is None or not seat.open or 0 not in seat.written:
            return False
        return seat.written[0].due == self.position

    def reaches(self, position: int) -> bool:
        """Whether any of what is read is at a position or behind it."""
        return self.position > position

    @property
    def position(self) -> int:
        """Of what is guessed."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreseen:
    """What the first layers make of tokens that were guessed, before they have set out."""

    token: int
    """The first."""
    hidden: Tensor
    """As they enter the next layer, [n, d]."""
    experts: IntArray
    """Activated in those layers, [n, L, k]."""

    @property
    def layers(self) -> int:
        return self.experts.shape[1]
