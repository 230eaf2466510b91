"""What servers call the rows of tokens that they send each other.

A *unit* is what is gathered as one: the row of a generated token, or the rows of a prompt's chunk.
It is named by its sequence, the position of its first row, and how often tokens of the sequence had
been withdrawn before, since then there may be several at one position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from trimmoe.runtime.seen import UNKNOWN

WANTED_IN = 1000
"""What chances of drafts are told in."""


class UnitName(NamedTuple):
    """What tells a unit from all others."""

    sequence: int
    start: int
    epoch: int


def wanted(likely: float) -> int:
    """A chance that drafts have to have, as it is told: more than none."""
    return max(math.ceil(likely * WANTED_IN), 1)


class Rows(msgspec.Struct, frozen=True, array_like=True):
    """Which rows the tensors beside a message hold, unit by unit."""

    sequences: list[int]
    starts: list[int]
    """Position of each unit's first row."""
    counts: list[int]
    """Rows of each unit in this message."""
    offsets: list[int]
    """Offset of every row in its unit; empty if the units are complete."""
    epochs: list[int] = []
    """How often tokens of each unit's sequence had been withdrawn when it set out; empty if never.
    """
    tokens: list[int] = []
    """The token of each unit, `UNKNOWN` where nobody asks for it; empty if nobody asks at all."""
    wants: list[int] = []
    """How likely, in so many of `WANTED_IN` cases, drafts of what follows each unit have to be all
    right for its user's server to read them along, 0 where it wants none; empty if none at all."""
    cuts: list[int] = []
    """From which position on tokens of each unit's sequence had been withdrawn the last time when
    it set out; empty if never. The first row that comes to a server need not be the one there."""

    @property
    def total(self) -> int:
        return sum(self.counts)

    def chosen(self, units: list[int], counts: list[int], offsets: list[int]) -> Rows:
        """Rows of some of the units, so many of each."""
        return Rows(
            [self.sequences[unit] for unit in units],
            [self.starts[unit] for unit in units],
            counts,
            offsets,
            [self.epochs[unit] for unit in units] if self.epochs else [],
        )

    def split(self) -> Iterator[tuple[UnitName, slice]]:
        """The name of each unit and where its rows are."""
        at, epochs = 0, self.epochs or [0] * len(self.sequences)
        for *name, count in zip(self.sequences, self.starts, epochs, self.counts, strict=True):
            yield UnitName(*name), slice(at, at + count)
            at += count

    def token(self, unit: int) -> int:
        """Of one of the units."""
        return self.tokens[unit] if self.tokens else UNKNOWN

    def wanted(self, unit: int) -> int:
        """What drafts are wanted behind one of the units."""
        return self.wants[unit] if self.wants else 0

    def cut(self, unit: int) -> int:
        """From where on what set out before one of the units was withdrawn."""
        return self.cuts[unit] if self.cuts else self.starts[unit]

    def well_formed(self) -> bool:
        units = len(self.sequences)
        return (
            len(self.starts) == len(self.counts) == units > 0
            and min(self.counts) > 0
            and min(self.starts) >= 0
            and (not self.offsets or len(self.offsets) == self.total)
            and (not self.epochs or (len(self.epochs) == units and min(self.epochs) >= 0))
            and (not self.tokens or (len(self.tokens) == units and min(self.tokens) >= UNKNOWN))
            and (not self.wants or (len(self.wants) == units and min(self.wants) >= 0))
            and (not self.cuts or (len(self.cuts) == units and min(self.cuts) >= 0))
            and all(cut <= start for cut, start in zip(self.cuts, self.starts, strict=False))
        )
