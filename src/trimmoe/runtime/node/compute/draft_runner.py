"""What a server makes of its users' sequences by itself, with the experts that it has.

The worker's part: a cache of its own, apart from that of the sequences that cross this server. It
holds what the home pass has read of each sequence; where tokens were withdrawn, what comes next is
written over them. What was read of a sequence that is over is retained with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from trimmoe.core.profile import Profile
from trimmoe.cost.guessing import first_layer
from trimmoe.models.base import MoEView
from trimmoe.models.cache import KVCache
from trimmoe.models.draft_chains import Memory
from trimmoe.runtime.home import Own, held_here, stand_ins
from trimmoe.runtime.node.records.readings import Foreseen, Reading
from trimmoe.runtime.node.records.units import Unit


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What a draft head takes to follow the token at a position, which has passed the first layers
    behind that."""

    position: int
    token: int
    offered: tuple[int, ...]
    offers: tuple[Foreseen, ...]


@dataclass(kw_only=True, slots=True)
class DraftRunner:
    """Sequences that this server reads by itself."""

    view: MoEView
    slots: int
    own: Own
    """Experts at hand, and what stands in for others."""
    states: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    """By sequence and position, what entered the layer that readings begin with, [d]."""
    waiting: dict[int, Reading] = field(default_factory=dict)
    """Readings whose states are still to come, by sequence."""
    foreseen: dict[int, dict[int, Foreseen]] = field(default_factory=dict)
    """By sequence and position, of tokens that passed the first layers before they have set out:
    what the cache of these layers has there, and nothing that it has no longer."""
    prepared: dict[int, Prepared] = field(default_factory=dict)
    """What the next reading of a sequence may take along, until anything passes the first layers in
    its place or in that of what it follows."""
    memories: dict[int, Memory] = field(default_factory=dict)
    """What the view's draft head has read, by sequence."""
    _cache: KVCache | None = None
    _slot_of: dict[int, int] = field(default_factory=dict)
    _retained: dict[int, None] = field(default_factory=dict)
    """Sequences that are over; longest ago first."""

    @staticmethod
    def of(view: MoEView, slots: int, profile: Profile | None) -> DraftRunner:
        """With room for so many sequences, and what the profile has for experts elsewhere."""
        own = Own.of(view, held_here(view), bits=view.stand_in_bits)
        if profile is not None and not own.is_whole:
            own = replace(own, stands_in=stand_ins(view, profile))
        return DraftRunner(view=view, slots=slots, own=own)

    @property
    def cache(self) -> KVCache:
        """Made when it is needed first."""
        if self._cache is None:
            self._cache = self.view.new_cache(slots=self.slots)
        return self._cache

    @property
    def free(self) -> int:
        """Places left, with those that are only retained."""
        return self.slots - len(self._slot_of.keys() - self._retained.keys())

    def seated(self, readings: Sequence[Reading]) -> list[Reading]:
        """Those of them that have a place, or get one now."""
        for one in readings:
            begins = one.start == 0
            if begins and one.sequence not in self._slot_of:
                self._seat(one.sequence)
        return [one for one in readings if one.sequence in self._slot_of]

    def slots_of(self, readings: Sequence[Reading]) -> tuple[int, ...]:
        return tuple(self._slot_of[one.sequence] for one in readings)

    def first_layer(self, route: tuple[int, ...], server: int) -> int:
        """The layer that readings begin with, see `cost.guessing.first_layer`."""
        return first_layer(np.array(route), server, self.own.held.cpu().numpy())

    def keep(self, sequence: int, start: int, rows: Tensor) -> Reading | None:
        """States [n, d] of a sequence came; the reading that waited for them, if it may begin."""
        store = self.states.setdefault(sequence, {})
        store.update(enumerate(rows, start))
        reading = self.waiting.get(sequence)
        if reading is None or not self.found(reading):
            return None
        del self.waiting[sequence]
        return reading

    def found(self, reading: Reading) -> bool:
        """Give a reading its states if all of them are there."""
        store = self.states.get(reading.sequence, {})
        if not all(position in store for position in reading.positions):
            return False
        reading.hidden = torch.stack([store[position] for position in reading.positions])
        # It may be begun anew; what is before it has been read for good.
        self.states[reading.sequence] = {
            at: state for at, state in store.items() if at >= reading.start
        }
        return True

    def known(self, units: Sequence[Unit]) -> Foreseen | None:
        """What was foreseen of units that are about to enter the first layer, if all of them were;
        it is not kept any longer, nor is what was foreseen behind other tokens than these."""
        found = [self._taken(unit) for unit in units]
        for unit, one in zip(units, found, strict=True):
            if one is None:
                self.prepared.pop(unit.seat.sequence, None)
        ones = [one for one in found if one is not None]
        if len(ones) < len(units) or len({one.layers for one in ones}) > 1:
            return None
        return Foreseen(
            token=ones[0].token,
            hidden=torch.cat([one.hidden for one in ones]),
            experts=np.concatenate([one.experts for one in ones]),
        )

    def _taken(self, unit: Unit) -> Foreseen | None:
        early = self.foreseen.get(unit.seat.sequence)
        if not early:
            return None
        one = early.pop(unit.start, None)
        if one is not None and (one.token,) == unit.tokens:
            return one
        self.foreseen[unit.seat.sequence] = {at: it for at, it in early.items() if at < unit.start}
        return None

    def foresees(self, sequence: int, position: int, ones: Sequence[Foreseen]) -> None:
        """Tokens from a position on have passed the first layers, before they have set out; the
        keys and values of whatever had done so there before are theirs now."""
        early = self.foreseen.get(sequence, {})
        before = {at: one for at, one in early.items() if at < position}
        self.foreseen[sequence] = before | dict(enumerate(ones, position))

    def forget_foreseen(self) -> None:
        """Of any sequence: tokens may pass the first layers from now on without a look at it."""
        self.foreseen.clear()
        self.prepared.clear()

    def take_prepared(self, sequence: int, position: int, token: int) -> Prepared | None:
        """What was made ready to follow the token at a position; it is not kept any longer."""
        one = self.prepared.pop(sequence, None)
        fits = one is not None and (one.position, one.token) == (position, token)
        return one if fits else None

    def offer(self, sequence: int, position: int, token: int, most: int) -> tuple[int, ...]:
        """What the draft head takes to follow a token at a position, so many at most."""
        head, memory = self.view.draft_head, self.memories.get(sequence)
        if head is None or memory is None:
            return ()
        return head.draft(memory, position, token, most)

    def has_read(self, sequence: int, start: int, states: Tensor, tokens: Sequence[int]) -> None:
        """The own pass has read these tokens, from a position on, and made these of them, [n, d]:
        states as `logits` takes them."""
        head = self.view.draft_head
        if head is not None and sequence in self._slot_of:
            memory = self.memories.setdefault(sequence, head.begin())
            head.read(memory, start, self.view.normed_last(states).numpy(), tokens)

    def forget(self, sequence: int, start: int = 0) -> None:
        """Tokens from a position on were withdrawn."""
        self.prepared.pop(sequence, None)
        early = self.foreseen.get(sequence, {})
        self.foreseen[sequence] = {at: one for at, one in early.items() if at < start}
        store = self.states.get(sequence, {})
        self.states[sequence] = {at: state for at, state in store.items() if at < start}
        if sequence in self.waiting and self.waiting[sequence].reaches(start):
            del self.waiting[sequence]

    def retain(self, sequence: int, read: int, length: int) -> None:
        """A sequence of so many tokens is over, of which so many were read here."""
        self.waiting.pop(sequence, None)
        self.foreseen.pop(sequence, None)
        self.prepared.pop(sequence, None)
        self.states[sequence] = self._states(sequence, read, length)
        self._retained[sequence] = None

    def adopt(self, sequence: int, source: int, read: int, length: int, *, moves: bool) -> None:
        """A sequence begins with `length` tokens of another one, `read` of which were read here; if
        it `moves`, that is over and leaves everything to it."""
        read = min(read, length)
        self.states[sequence] = self._states(source, read, length)
        if source in self.memories:
            memory = self.memories[source]
            self.memories[sequence] = memory if moves else memory.copy()
        if moves and source in self._slot_of:
            self._slot_of[sequence] = self._slot_of.pop(source)
        elif read and source in self._slot_of and self._seat(sequence, spared=source):
            self.cache.copy(self._slot_of[source], self._slot_of[sequence], read)
        if moves:
            self.close(source)

    def _seat(self, sequence: int, spared: int | None = None) -> bool:
        """Take a place if there is one, or else that of a sequence that is over, but for one."""
        if not self.cache.free_slots:
            others = (each for each in self._retained if each in self._slot_of and each != spared)
            if (oldest := next(others, None)) is not None:
                self.close(oldest)
        if self.cache.free_slots:
            self._slot_of[sequence] = self.cache.alloc()
        return sequence in self._slot_of

    def _states(self, sequence: int, first: int, last: int) -> dict[int, Tensor]:
        """Those of the positions [first, last)."""
        store = self.states.get(sequence, {})
        return {at: state for at, state in store.items() if first <= at < last}

    def close(self, sequence: int) -> None:
        """Give its place back if it has one."""
        self.states.pop(sequence, None)
        self.foreseen.pop(sequence, None)
        self.prepared.pop(sequence, None)
        self.waiting.pop(sequence, None)
        self._retained.pop(sequence, None)
        self.memories.pop(sequence, None)
        if sequence in self._slot_of:
            self.cache.free(self._slot_of.pop(sequence))
