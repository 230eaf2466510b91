"""What a draft head takes to follow in sequences all of whose layers are here, so that full depth
verifies it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from trimmoe.cost.guessing import rows_along
from trimmoe.models.base import MoEView
from trimmoe.models.draft_head import MOST, Memory


@dataclass(kw_only=True, slots=True)
class HeadDrafts:
    """Nothing is drafted by a view without a head."""

    view: MoEView
    _memories: dict[int, Memory] = field(default_factory=dict)
    """By slot, as the states of what is over remain for what begins like it."""

    def begin(self, slot: int, source: int | None) -> None:
        """A sequence begins in a slot, with the states of another one or none."""
        known = None if source is None else self._memories.get(source)
        if known is None:
            self._memories.pop(slot, None)
        elif source != slot:
            self._memories[slot] = known.copy()

    def read(self, slot: int, start: int, states: Tensor, tokens: Sequence[int]) -> None:
        """A sequence has these tokens from a position on, which made these of them, [n, d]: states
        as `logits` takes them."""
        if (head := self.view.draft_head) is not None:
            memory = self._memories.setdefault(slot, head.begin())
            head.read(memory, start, self.view.normed_last(states).numpy(), tokens)

    def offer(
        self, slot: int, position: int, token: int, *, streams: int, most: int = MOST
    ) -> tuple[int, ...]:
        """What is taken to follow a token at a position, `most` tokens at most, where so many
        streams are read at once."""
        head, memory = self.view.draft_head, self._memories.get(slot)
        if head is None or memory is None:
            return ()
        return head.draft(memory, position, token, min(rows_along(streams), most))
