"""Which of the token sequences that are kept begin as another one does.

What is kept for a sequence says nothing of how it came about: whoever keeps one here vouches that
its states are those of every token read exactly, so that they are a matter of its tokens alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from trimmoe.core.ledger import STOOD_IN, SUBSTITUTED, Kind, Ledger
from trimmoe.core.specs import IntArray

BLOCK = 16
"""Tokens that are hashed together; what less begins with is not looked for."""
_CHANGED = [*SUBSTITUTED, *STOOD_IN, Kind.SKIPPED]


class Found(NamedTuple):
    """A sequence that begins as another one does."""

    key: int
    length: int
    """How many tokens they have in common."""
    whole: bool
    """Whether those are, but for less than a block, all that is kept of it."""


class Prefixes:
    """Token sequences by the hashes of how they begin.

    A block of tokens is hashed together with all blocks before it, so that a look-up takes as long
    as it takes to read a prompt once, however many sequences are kept. What hashes find is compared
    token by token: one that comes twice costs time, never an answer.
    """

    def __init__(self) -> None:
        self._tokens: dict[int, IntArray] = {}
        self._hashes: dict[int, list[int]] = {}
        self._begun: dict[int, dict[int, None]] = {}
        """Who begins so, by hash; latest last."""

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, key: int) -> bool:
        return key in self._tokens

    def keep(self, key: int, realm: Hashable, tokens: Sequence[int]) -> None:
        """Tokens of a sequence; only those of the same `realm` are alike. What was kept under the
        key before is forgotten."""
        self.drop(key)
        kept = np.array(tokens, dtype=np.int64)
        self._tokens[key], self._hashes[key] = kept, list(_hashes(realm, kept))
        for each in self._hashes[key]:
            self._begun.setdefault(each, {})[key] = None

    def drop(self, key: int) -> None:
        """Forget a sequence, if it is known."""
        self._tokens.pop(key, None)
        for each in self._hashes.pop(key, ()):
            those = self._begun[each]
            del those[key]
            if not those:
                del self._begun[each]

    def find(self, realm: Hashable, tokens: Sequence[int]) -> Found | None:
        """The sequence that begins like these tokens for longest, at least a block; of several one
        of which nothing else is kept, else the latest."""
        asked, found = np.array(tokens, dtype=np.int64), None
        for each in _hashes(realm, asked):
            if each not in self._begun:
                break
            found = self._begun[each]
        if found is None:
            return None
        alike = [self._compared(key, asked) for key in reversed(found)]
        best = max(alike, key=lambda one: (one.length, one.whole))
        return best if best.length >= BLOCK else None

    def _compared(self, key: int, asked: IntArray) -> Found:
        kept = self._tokens[key]
        most = min(kept.size, asked.size)
        differ = np.flatnonzero(kept[:most] != asked[:most])
        length = int(differ[0]) if differ.size else most
        return Found(key, length, kept.size - length < BLOCK)


def is_exact(ledger: Ledger, *, exits: bool) -> bool:
    """Whether a token's states are those of every layer and expert run; `exits` says whether those
    of a token that exited are, since it went on whole until full depth had confirmed it."""
    by_kind = ledger.kinds.sum(0)
    changed = by_kind[_CHANGED].any() or (by_kind[Kind.EXITED] and not exits)
    return not changed and ledger.slots_dropped == 0


def _hashes(realm: Hashable, tokens: IntArray) -> Iterator[int]:
    """Of every whole block with all before it."""
    so_far = hash(realm)
    for start in range(0, tokens.size - BLOCK + 1, BLOCK):
        so_far = hash((so_far, tokens[start : start + BLOCK].tobytes()))
        yield so_far
