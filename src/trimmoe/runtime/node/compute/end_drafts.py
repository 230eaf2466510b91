"""What a draft head takes to follow where full depth ends.

A server that runs the last layer of a sequence has full depth's states there, which the head goes
on from. Where the user's server asks for that, what the head offers goes to it with the token that
is known; it sets out behind it as guesses do, and passes all layers with it as one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from torch import Tensor

from trimmoe.core.specs import MOST_DRAFTED
from trimmoe.models.base import MoEView
from trimmoe.runtime.head_drafts import HeadDrafts, Wish
from trimmoe.runtime.node.records.rows import WANTED_IN
from trimmoe.runtime.node.records.tokens import Token
from trimmoe.runtime.node.records.units import Unit


@dataclass(kw_only=True, slots=True)
class EndDrafts:
    """Of one server."""

    view: MoEView
    wanted: Callable[[], bool]
    """Whether the policy has drafts read along at all."""
    _heads: HeadDrafts = field(init=False)
    _next: dict[int, Token] = field(default_factory=dict)
    """By slot of a sequence that ends here, the last token that full depth has predicted."""

    def __post_init__(self) -> None:
        self._heads = HeadDrafts(view=self.view)

    def copy(self, source: int, slot: int) -> None:
        """A sequence begins in a slot with what is in another one."""
        self._heads.begin(slot, source)

    def prompt(self, unit: Unit, states: Tensor, first: Token | None) -> Token | None:
        """A chunk of a prompt is through, with these states [n, d], and its first token predicted
        if that was the last chunk, which is given back with what follows it."""
        seat, tokens = unit.seat, _prompt_of(unit)
        if not (self.able and self.wanted() and tokens):
            return first
        if unit.start == 0:
            self._heads.begin(seat.slot, None)
        self._heads.read(seat.slot, unit.start, states, tokens)
        if first is None:
            return None
        self._next[seat.slot] = first
        return self._followed([unit], [first])[0]

    def generated(
        self, units: Sequence[Unit], states: Tensor, tokens: Sequence[Token]
    ) -> list[Token]:
        """Generated tokens are through, with these states [n, d] and predictions, which are given
        back, with what follows the last one of each sequence that rests on what was predicted
        before: what was guessed is passed over where it is something else."""
        right: dict[int, int] = {}
        for row, (unit, token) in enumerate(zip(units, tokens, strict=True)):
            slot, known = unit.seat.slot, self._next.get(unit.seat.slot)
            if known is None or unit.is_void:
                continue
            predicted = known.sequence, known.position, (known.token,)
            if predicted == (unit.seat.sequence, unit.start, unit.tokens):
                self._heads.read(slot, unit.start, states[row : row + 1], unit.tokens)
                self._next[slot], right[slot] = token, row
        found, rows = list(tokens), list(right.values())
        told = self._followed([units[row] for row in rows], [tokens[row] for row in rows])
        for row, token in zip(rows, told, strict=True):
            found[row] = token
        return found

    @property
    def able(self) -> bool:
        """Whether there is a head, and rows of one sequence may pass a layer together."""
        return self.view.chains and self.view.draft_head is not None

    def _followed(self, units: Sequence[Unit], known: Sequence[Token]) -> list[Token]:
        """The tokens that are known, predicted from these units, with what is taken to follow each,
        if its user's server wants that, as far as it is likely enough for it."""
        wishes = [_wish(*each) for each in zip(units, known, strict=True)]
        return [
            msgspec.structs.replace(token, follows=list(drafted)) if drafted else token
            for token, drafted in zip(known, self._heads.offer(wishes), strict=True)
        ]


def _wish(unit: Unit, known: Token) -> Wish:
    return Wish(
        slot=unit.seat.slot,
        position=known.position,
        token=known.token,
        most=MOST_DRAFTED if unit.wants else 0,
        likely=unit.wants / WANTED_IN,
    )


def _prompt_of(unit: Unit) -> tuple[int, ...]:
    """The tokens of a chunk; none where they are not told."""
    if unit.tokens or unit.seat.seen is None:
        return unit.tokens
    return tuple(unit.seat.seen.tokens[unit.start : unit.start + unit.count])
