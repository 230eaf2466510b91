"""The half of a compiled view that runs a layer's router and experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from trimmoe.core.specs import BoolArray, FloatArray, IntArray, ModelSpec
from trimmoe.models.base import DROPPED, ExpertNotLoaded, MoEView
from trimmoe.models.compiled import calls, columns
from trimmoe.models.compiled.rows import Floats, Found, widened
from trimmoe.models.compiled.tables import Tables
from trimmoe.models.passed import BytesRead, Routing, Widths

if TYPE_CHECKING:
    from trimmoe.models.compiled.parts import Parts

_KEPT_LAYOUTS = 64


class CompiledExperts(MoEView):
    """Routers and experts of compiled blocks; attention and whole segments are `CompiledView`'s."""

    def __init__(
        self, parts: Parts, tables: Tables, spec: ModelSpec, bytes_read: BytesRead
    ) -> None:
        self.spec, self.bytes_read = spec, bytes_read
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self._parts, self._tables = parts, tables
        self.precision = parts.precision
        self._moe_blocks = np.array(tables.block_of)
        self._adds = not tables.blocks[:, columns.BOTH_POST].any()
        """Whether what experts give is added to the state, and no norm lies between."""
        self._layouts: dict[object, tuple[BoolArray, BoolArray]] = {}
        """Tables of experts by layer and by block, by where the former are in memory, which they
        keep."""

    @property
    def widths(self) -> Widths:
        usual = super().widths
        return usual if self._adds else replace(usual, moving=usual.attended + usual.part)

    def route(self, layer: int, hidden: Tensor, *, groups: Tensor | None = None) -> Routing:
        rows = widened(hidden)
        block, shape = self._tables.blocks[self._tables.block_of[layer]], self._tables.shape
        found = Found.of(shape, 0, rows.shape[0])
        calls.read(shape, block, rows, found.normed)
        reads = calls.asked(shape, block, rows, found.normed)
        experts = np.empty((rows.shape[0], shape.top_k), dtype=np.int64)
        calls.route(shape, block, reads, found.logits, found.probabilities, experts, found.gates)
        return self._routing(found, experts)

    def shared(self, layer: int, hidden: Tensor, *, normed: Tensor | None = None) -> Tensor | None:
        if not self._parts.has_shared:
            return None
        block, shape = self._tables.blocks[self._tables.block_of[layer]], self._tables.shape
        rows = self._read(layer, hidden, normed)
        given = np.zeros_like(rows)
        calls.dense(shape, block, rows, given)
        return self._narrowed(given)

    def experts(
        self,
        layer: int,
        hidden: Tensor,
        experts: Tensor,
        gates: Tensor,
        *,
        normed: Tensor | None = None,
    ) -> Tensor:
        rows = self._read(layer, hidden, normed)
        given = np.zeros(rows.shape, dtype=np.float64)
        chosen, weights = self._slots(layer, experts.numpy(), gates)
        shape, _, here = self._stack(layer)
        calls.routed(shape, here, rows, chosen, weights, given)
        return self._narrowed(given)

    def give(
        self,
        layer: int,
        hidden: Tensor,
        experts: IntArray,
        gates: Tensor,
        *,
        normed: Tensor | None = None,
    ) -> Tensor:
        rows, read = widened(hidden), self._read(layer, hidden, normed)
        chosen, weights = self._slots(layer, experts, gates)
        calls.finish(*self._stack(layer), rows, read, chosen, weights)
        return self._narrowed(rows)

    def gathered(
        self,
        layer: int,
        hidden: Tensor,
        experts: IntArray,
        gates: Tensor,
        *,
        normed: Tensor | None = None,
    ) -> Tensor:
        rows, read = widened(hidden), self._read(layer, hidden, normed)
        chosen, weights = self._slots(layer, experts, gates)
        total = np.empty(rows.shape, dtype=np.float64)
        calls.gathered(*self._stack(layer), rows, read, chosen, weights, total)
        return self._narrowed(total)

    def gathered_part(
        self,
        layer: int,
        hidden: Tensor,
        experts: IntArray,
        gates: Tensor,
        *,
        normed: Tensor | None = None,
    ) -> Tensor:
        if self._adds:
            return self.gathered(layer, hidden, experts, gates, normed=normed)
        chosen = torch.from_numpy(np.ascontiguousarray(experts))
        given = self.experts(layer, hidden, chosen, gates, normed=normed)
        return torch.cat([hidden.to(given.dtype), given], 1)

    def whole(self, layer: int, moved: Tensor) -> Tensor:
        if self._adds:
            return moved
        hidden, given = moved.split([self.widths.attended, self.widths.part], 1)
        return self._behind(layer, hidden.float(), given).float()

    def finish(
        self, layer: int, hidden: Tensor, shared: Tensor | None, routed: Tensor | None
    ) -> Tensor:
        if self._adds:
            return super().finish(layer, hidden, shared, routed)
        given = torch.zeros_like(hidden) if routed is None else routed
        return self._behind(layer, hidden, given).float()

    def _behind(self, layer: int, hidden: Tensor, given: Tensor) -> Tensor:
        """A layer's output, [n, d] in double precision, where norms follow its experts."""
        rows = widened(hidden)
        wide, total = np.zeros(rows.shape), np.empty(rows.shape)
        wide[:, : self._tables.shape.hidden] = given.numpy()
        shape, block, _ = self._stack(layer)
        calls.behind(shape, block, rows, wide, total)
        return self._narrowed(total)

    def _by_block(self, experts: BoolArray) -> BoolArray:
        """Which of these experts [N, E] are here, by block, [B, E]; whoever asks does not change
        the table afterwards."""
        where = experts.ctypes.data, experts.shape, experts.strides
        kept = self._layouts.get(where)
        if kept is None:
            if len(self._layouts) >= _KEPT_LAYOUTS:
                self._layouts.clear()
            here: BoolArray = self._tables.experts[:, : experts.shape[1], 0] != 0
            by_block = np.zeros_like(here)
            by_block[self._moe_blocks] = experts & here[self._moe_blocks]
            kept = self._layouts[where] = experts, by_block
        return kept[1]

    def _read(self, layer: int, hidden: Tensor, normed: Tensor | None) -> Floats:
        """What the experts of a layer read, wide."""
        if normed is not None:
            return widened(normed)
        block = self._tables.blocks[self._tables.block_of[layer]]
        rows = widened(hidden)
        out = np.zeros_like(rows)
        calls.read(self._tables.shape, block, rows, out)
        return out

    def _stack(self, layer: int) -> tuple[calls.Shape, IntArray, IntArray]:
        """The block with a layer's experts, and where each of them is."""
        tables, at = self._tables, self._tables.block_of[layer]
        return tables.shape, tables.blocks[at], tables.experts[at]

    def _slots(self, layer: int, experts: IntArray, gates: Tensor) -> tuple[IntArray, Floats]:
        """Experts [n, k] and gates as the compiled blocks read them; raises `ExpertNotLoaded`."""
        chosen = np.ascontiguousarray(experts, dtype=np.int64)
        here = self._tables.experts[self._tables.block_of[layer], :, 0] != 0
        absent = (chosen != DROPPED) & ~here[chosen]
        if absent.any():
            expert = int(chosen[absent][0])
            raise ExpertNotLoaded(f"expert {expert} of layer {layer} is not loaded here")
        return chosen, np.ascontiguousarray(gates.numpy(), dtype=np.float32)

    def _routing(self, found: Found, experts: IntArray) -> Routing:
        count = self._tables.shape.experts
        return Routing(
            probabilities=torch.from_numpy(found.probabilities[:, :count]),
            logits=torch.from_numpy(found.logits[:, :count]),
            experts=torch.from_numpy(experts),
            gates=torch.from_numpy(found.gates),
            normed=self._narrowed(found.normed),
        )

    def _narrowed(self, rows: Floats | FloatArray) -> Tensor:
        return torch.from_numpy(rows[:, : self._tables.shape.hidden])
