"""Slots that run on a server other than the one their rows are on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimmoe.runtime.node.records.messages import NOBODY
from trimmoe.runtime.node.records.rows import Rows

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """Slots of some rows that run here."""

    rows: Rows
    destinations: tuple[int, ...]
    """Where each unit gathers."""
    hidden: Tensor
    """Before the experts, [n, d]."""
    experts: Tensor
    """int32 [n, k], -1 where a slot runs elsewhere."""
    gates: Tensor
    """float32 [n, k]."""
    raw: bool
    """Whether the rows came raw: the shared expert is run too."""
    decoding: bool
    checks: int = NOBODY
    """As of the dispatch."""

    @property
    def sequences(self) -> Sequence[int]:
        return self.rows.sequences
