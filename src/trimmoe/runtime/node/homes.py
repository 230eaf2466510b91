"""What a server makes of its users' sequences by itself, with the experts that it has.

The worker's part: a cache of its own, apart from that of the sequences that cross this server. It
holds what the home pass has read of each sequence; where tokens were withdrawn, what comes next is
written over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from trimmoe.core.profile import Profile
from trimmoe.models.base import MoEView
from trimmoe.models.cache import KVCache
from trimmoe.runtime.home import StandIns, held_here, stand_ins
from trimmoe.runtime.sampling import Sampling


@dataclass(eq=False, kw_only=True, slots=True)
class Reading:
    """Tokens of a sequence that are read to guess what follows them, and how far that has come."""

    sequence: int
    start: int
    """Position of the first."""
    tokens: tuple[int, ...]
    route: tuple[int, ...]
    sampling: Sampling
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
    wanted: bool
    """Whether it is probable enough for something to set out on it."""


@dataclass(kw_only=True, slots=True)
class Guessing:
    """How it went so far."""

    made: int = 0
    """Guesses on which something set out and of which word has come."""
    right: int = 0

    def checked(self, *, right: bool) -> None:
        """Word of one has come."""
        self.made += 1
        self.right += right


@dataclass(kw_only=True, slots=True)
class Homes:
    """Sequences that this server reads by itself."""

    view: MoEView
    slots: int
    held: Tensor
    """Experts at hand, bool [N, E]."""
    stands_in: StandIns | None
    """For the others."""
    _cache: KVCache | None = None
    _slot_of: dict[int, int] = field(default_factory=dict)

    @staticmethod
    def of(view: MoEView, slots: int, profile: Profile | None) -> Homes:
        """With room for so many sequences, and what the profile has for experts elsewhere."""
        others = None if profile is None else stand_ins(view, profile)
        return Homes(view=view, slots=slots, held=held_here(view), stands_in=others)

    @property
    def cache(self) -> KVCache:
        """Made when it is needed first."""
        if self._cache is None:
            self._cache = self.view.new_cache(slots=self.slots)
        return self._cache

    @property
    def free(self) -> int:
        """Places left."""
        return self.slots - len(self._slot_of)

    def seated(self, readings: Sequence[Reading]) -> list[Reading]:
        """Those of them that have a place, or get one now."""
        for one in readings:
            begins = one.start == one.layer == 0
            if begins and one.sequence not in self._slot_of and self.cache.free_slots:
                self._slot_of[one.sequence] = self.cache.alloc()
        return [one for one in readings if one.sequence in self._slot_of]

    def slots_of(self, readings: Sequence[Reading]) -> tuple[int, ...]:
        return tuple(self._slot_of[one.sequence] for one in readings)

    def close(self, sequence: int) -> None:
        """Give its place back if it has one."""
        if sequence in self._slot_of:
            self.cache.free(self._slot_of.pop(sequence))
