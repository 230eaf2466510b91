"""What a draft head takes to follow in the sequences of one process, whose own layers verify it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from trimmoe.models.base import MoEView
from trimmoe.models.draft_head import MOST, HeadMemory
from trimmoe.runtime.places import Place

ROWS = 8
"""Drafts are read as long as no more rows than these are: what more would take is not made up for
by what of them is right."""


@dataclass(kw_only=True, slots=True)
class HeadDrafts:
    """Nothing is drafted by a view without a head."""

    view: MoEView
    _memories: dict[int, HeadMemory] = field(default_factory=dict)
    """By slot, as the states of what is over remain for what begins like it."""
    _last: dict[int, int] = field(default_factory=dict)
    """By slot, the position of the last token that its answer may have."""

    def open(self, place: Place, last: int) -> None:
        """A sequence begins, of which that is the last position."""
        if (head := self.view.draft_head) is None:
            return
        self._last[place.slot] = last
        known = None if place.source is None else self._memories.get(place.source)
        if known is None:
            known = head.begin()
        elif place.source != place.slot:
            known = known.copy()
        self._memories[place.slot] = known

    def read(self, place: Place, start: int, states: Tensor, tokens: Sequence[int]) -> None:
        """A sequence has these tokens from a position on, which made these of them, [n, d]: states
        as `logits` takes them."""
        if (head := self.view.draft_head) is not None:
            normed = self.view.normed_last(states).numpy()
            head.read(self._memories[place.slot], start, normed, tokens)

    def offer(self, place: Place, token: int, streams: int) -> tuple[int, ...]:
        """What is taken to follow a token that is fed to a sequence, one of so many at once."""
        head, position = self.view.draft_head, len(place.tokens)
        if head is None:
            return ()
        # The answer's last token is not fed.
        most = min(ROWS // streams - 1, MOST, self._last[place.slot] - 1 - position)
        return head.draft(self._memories[place.slot], position, token, most)
