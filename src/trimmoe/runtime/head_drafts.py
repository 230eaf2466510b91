"""What a draft head takes to follow in sequences whose last layer is here, so that it goes on from
full depth's states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trimmoe.core.specs import MOST_DRAFTED
from trimmoe.models.base import MoEView
from trimmoe.models.draft_chains import LIKELY, Chain, Memory, Piece

MOST_UNREAD = 2048
"""Tokens of a sequence that the head reads later on; of more it never reads the first ones."""


@dataclass(kw_only=True, slots=True)
class _Unread:
    """Consecutive tokens that a sequence has."""

    start: int
    states: list[Tensor]
    """[n, d] each."""
    tokens: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """For what is taken to follow a token of the sequence in a slot."""

    slot: int
    position: int
    token: int
    most: int
    """Tokens at most."""
    likely: float = LIKELY
    """What chance all of them have to have of being right."""


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
            self._catch_up([source])
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

    def offer(self, wishes: Sequence[Wish]) -> list[tuple[int, ...]]:
        """What is taken to follow tokens of some sequences, for each wish."""
        head, chains = self.view.draft_head, dict[int, Chain[Any]]()
        if head is None:
            return [()] * len(wishes)
        self._catch_up([wish.slot for wish in wishes if wish.most > 0])
        for at, wish in enumerate(wishes):
            if wish.most <= 0:
                continue
            if (memory := self._memories.get(wish.slot)) is not None:
                chains[at] = Chain(
                    memory=memory,
                    position=wish.position,
                    token=wish.token,
                    most=min(wish.most, MOST_DRAFTED),
                    likely=wish.likely,
                )
        head.draft_all(list(chains.values()))
        return [tuple(chains[at].drafted) if at in chains else () for at in range(len(wishes))]

    def _catch_up(self, slots: Sequence[int]) -> None:
        """Have the head read what it has not, of sequences in different slots."""
        head, unread = self.view.draft_head, list[tuple[int, _Unread]]()
        if head is None:
            return
        for slot in slots:
            unread += ((slot, piece) for piece in self._unread.pop(slot, ()))
        if not unread:
            return
        read = torch.cat([states for _, piece in unread for states in piece.states])
        pieces, first = list[tuple[Piece[Any], Sequence[int]]](), 0
        normed = self.view.normed_last(read).numpy()
        for slot, piece in unread:
            memory = self._memories.get(slot)
            if memory is None:
                memory = self._memories[slot] = head.begin()
            states = normed[first : first + len(piece.tokens)]
            pieces.append((Piece(memory=memory, first=piece.start, states=states), piece.tokens))
            first += len(piece.tokens)
        head.read_all(pieces)
