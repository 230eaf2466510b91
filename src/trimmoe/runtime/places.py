"""Slots of the sequences of one process, and of those that are over and may begin others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trimmoe.models.cache import KVCache
from trimmoe.runtime.prefixes import BLOCK, Found, Prefixes


@dataclass(eq=False, kw_only=True, slots=True)
class Place:
    """Of one sequence."""

    slot: int
    realm: int
    """States of sequences of different realms are not alike."""
    start: int = 0
    """Tokens whose states were there when it was opened."""
    tokens: list[int] = field(default_factory=list)
    """That were fed to it."""
    exact: int = 0
    """Up to where its states are those of tokens that were read whole."""
    source: int | None = None
    """The slot that it began with the states of, its own among them."""


class Places:
    """Which sequence has which slot of some caches, all of which have them in common.

    A sequence that is over keeps its slot until somebody needs it, if places `retain` any: the one
    that was used longest ago goes first. A sequence that begins with the same tokens takes the slot
    over where next to nothing else is in it, or copies what they have in common.
    """

    def __init__(self, *caches: KVCache, retain: bool) -> None:
        self._caches, self._retain = caches, retain
        self._prefixes = Prefixes()
        self._open: dict[int, Place] = {}
        self._retained: dict[int, Place] = {}
        """Used longest ago first."""

    def __getitem__(self, sequence: int) -> Place:
        return self._open[sequence]

    def open(self, sequence: int, tokens: Sequence[int], *, realm: int = 0) -> Place:
        """Begin a sequence with tokens, all of which are about to be fed to it but for those whose
        states are there; at least one is left."""
        found = self._prefixes.find(realm, tokens) if self._retain else None
        place = Place(slot=self._slot(found), realm=realm, tokens=list(tokens), exact=len(tokens))
        if found is not None:
            place.start = min(found.length, len(tokens) - 1)
            self._begin(place, found)
        self._open[sequence] = place
        return place

    def has_read(self, sequence: int) -> None:
        """Its first tokens were fed: it may begin others."""
        if self._retain:
            place = self._open[sequence]
            self._prefixes.keep(sequence, place.realm, place.tokens)

    def fed(self, sequence: int, token: int, *, exact: bool) -> None:
        """A token was fed to a sequence, and read whole or not."""
        place = self._open[sequence]
        place.exact += exact and place.exact == len(place.tokens)
        place.tokens.append(token)

    def close(self, sequence: int) -> None:
        """A sequence is over."""
        place = self._open.pop(sequence)
        if not self._retain or sequence not in self._prefixes or place.exact < BLOCK:
            self._prefixes.drop(sequence)
            self._caches[0].free(place.slot)
            return
        self._prefixes.keep(sequence, place.realm, place.tokens[: place.exact])
        self._retained[sequence] = place

    def _slot(self, found: Found | None) -> int:
        """A slot for somebody who begins like that."""
        if found is not None and found.whole and found.key in self._retained:
            self._prefixes.drop(found.key)
            return self._retained[found.key].slot
        if self._caches[0].free_slots:
            return self._caches[0].alloc()
        spared = None if found is None else found.key
        oldest = next((key for key in self._retained if key != spared), spared)
        assert oldest is not None, "no free slot: open no more sequences than there are slots"
        self._prefixes.drop(oldest)
        return self._retained[oldest].slot if oldest == spared else self._retained.pop(oldest).slot

    def _begin(self, place: Place, found: Found) -> None:
        """A place begins with what it has in common with what was found."""
        source = self._open.get(found.key) or self._retained.pop(found.key)
        place.source = source.slot
        if source.slot == place.slot:
            return
        for cache in self._caches:
            cache.copy(source.slot, place.slot, place.start)
        if found.key not in self._open:
            self._retained[found.key] = source
