"""Sequences of this server's users all of whose layers run here: what a draft head takes to follow.

Full depth is through with them here, so its states are what the head goes on from. What that offers
sets out together with the token that is known, as guesses do, and passes the layers with it as one
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from trimmoe.models.base import MoEView
from trimmoe.runtime.head_drafts import HeadDrafts
from trimmoe.runtime.node.records.messages import Token
from trimmoe.runtime.node.records.output import Offer
from trimmoe.runtime.node.records.sequences import Seat
from trimmoe.runtime.node.records.units import Unit


@dataclass(kw_only=True, slots=True)
class HomeDrafts:
    """Of one server."""

    view: MoEView
    is_home: Callable[[tuple[int, ...]], bool]
    """Whether all that this server's users' tokens need on a route is here."""
    streams: Callable[[], int]
    """Answers under way; none where nobody follows what is offered."""
    _heads: HeadDrafts = field(init=False)
    _next: dict[int, Token] = field(default_factory=dict)
    """By slot of such a sequence, the last token that full depth has predicted."""

    def __post_init__(self) -> None:
        self._heads = HeadDrafts(view=self.view)

    def copy(self, source: int, slot: int) -> None:
        """A sequence begins in a slot with what is in another one."""
        self._heads.begin(slot, source)

    def prompt(self, unit: Unit, states: Tensor, first: Token | None) -> list[Offer]:
        """A chunk of a prompt is through, with these states [n, d], and its first token predicted
        if that was the last chunk."""
        if not self._reads(unit.seat):
            return []
        if unit.start == 0:
            self._heads.begin(unit.seat.slot, None)
        self._heads.read(unit.seat.slot, unit.start, states, unit.tokens)
        if first is None:
            return []
        self._next[unit.seat.slot] = first
        return self._offers(unit.seat, first)

    def generated(
        self, units: Sequence[Unit], states: Tensor, tokens: Sequence[Token]
    ) -> list[Offer]:
        """Generated tokens are through, with these states [n, d] and predictions; those that were
        guessed are passed over unless they are what was predicted."""
        right: dict[int, tuple[Seat, Token]] = {}
        for row, (unit, token) in enumerate(zip(units, tokens, strict=True)):
            seat, known = unit.seat, self._next.get(unit.seat.slot)
            if known is None:
                continue
            predicted = known.sequence, known.position, (known.token,)
            if predicted == (seat.sequence, unit.start, unit.tokens):
                self._heads.read(seat.slot, unit.start, states[row : row + 1], unit.tokens)
                self._next[seat.slot] = token
                right[seat.slot] = seat, token
        return [offer for one in right.values() for offer in self._offers(*one)]

    def _reads(self, seat: Seat) -> bool:
        """Whether it is of a user of this server, and all of its layers run here."""
        able = self.view.chains and self.view.draft_head is not None and self.streams() > 0
        return able and self.is_home(seat.route) and seat.access == seat.route[0]

    def _offers(self, seat: Seat, known: Token) -> list[Offer]:
        """What is taken to follow the token that is known."""
        streams = self.streams()
        drafted = self._heads.offer(seat.slot, known.position, known.token, streams=streams)
        offer = Offer(sequence=seat.sequence, position=known.position + 1, tokens=drafted)
        return [offer] if drafted else []
