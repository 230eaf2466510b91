"""What a draft head takes to follow in sequences all of whose layers are here, so that full depth
verifies it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trimmoe.cost.guessing import rows_along
from trimmoe.models.base import MoEView
from trimmoe.models.draft_head import MOST, Memory

MOST_UNREAD = 2048
"""Tokens of a sequence that the head reads later on; of more it never reads the first ones."""


@dataclass(kw_only=True, slots=True)
class _Unread:
    """Consecutive tokens that a sequence has."""

    start: int
    states: list[Tensor]
    """[n, d] each."""
    tokens: list[int]


@dataclass(kw_only=True, slots=True)
class HeadDrafts:
    """Nothing is drafted by a view without a head. That reads what a sequence has when it is asked
    what follows, all at once: while there are too many streams to draft for, it costs nothing."""

    view: MoEView
    _memories: dict[int, Memory] = field(default_factory=dict)
    """By slot, as the states of what is over remain for what begins like it."""
    _unread: dict[int, list[_Unread]] = field(default_factory=dict)
    """By slot, in the order in which it came."""

    def begin(self, slot: int, source: int | None) -> None:
        """A sequence begins in a slot, with the states of another one or none."""
        if source is not None:
            self._catch_up(source)
        known = None if source is None else self._memories.get(source)
        if known is None:
            self._memories.pop(slot, None)
        elif source != slot:
            self._memories[slot] = known.copy()
        self._unread.pop(slot, None)

    def read(self, slot: int, start: int, states: Tensor, tokens: Sequence[int]) -> None:
        """A sequence has these tokens from a position on, which made these of them, [n, d]: states
        as `logits` takes them."""
        if self.view.draft_head is None:
            return
        pieces = self._unread.setdefault(slot, [])
        if pieces and start == pieces[-1].start + len(pieces[-1].tokens):
            pieces[-1].states.append(states)
            pieces[-1].tokens += tokens
        else:
            pieces.append(_Unread(start=start, states=[states], tokens=list(tokens)))
        while sum(len(piece.tokens) for piece in pieces) > MOST_UNREAD:
            first = pieces[0].states.pop(0).shape[0]
            pieces[0].start += first
            del pieces[0].tokens[:first]
            if not pieces[0].tokens:
                del pieces[0]

    def offer(
        self, slot: int, position: int, token: int, *, streams: int, most: int = MOST
    ) -> tuple[int, ...]:
        """What is taken to follow a token at a position, `most` tokens at most, where so many
        streams are read at once."""
        head, most = self.view.draft_head, min(rows_along(streams), most)
        if head is None or most <= 0:
            return ()
        self._catch_up(slot)
        memory = self._memories.get(slot)
        return () if memory is None else head.draft(memory, position, token, most)

    def _catch_up(self, slot: int) -> None:
        """Have the head read what it has not."""
        head = self.view.draft_head
        if head is None:
            return
        for piece in self._unread.pop(slot, ()):
            memory = self._memories.setdefault(slot, head.begin())
            states = self.view.normed_last(torch.cat(piece.states)).numpy()
            head.read(memory, piece.start, states, piece.tokens)
