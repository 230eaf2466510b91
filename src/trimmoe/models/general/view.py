"""The view over any decoder-only model: transformers' own layers, cut in two, and our experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trimmoe.core.specs import IntArray, ModelSpec
from trimmoe.models.base import MoEView
from trimmoe.models.batch import TokenBatch
from trimmoe.models.batching import describe
from trimmoe.models.cache import SNAPSHOTS, KVCache
from trimmoe.models.experts import ExpertStacks
from trimmoe.models.general.attention import Positions
from trimmoe.models.general.caching import GeneralCache
from trimmoe.models.general.ending import Ending
from trimmoe.models.general.halves import Halves
from trimmoe.models.general.passing import Beside, Passing
from trimmoe.models.general.running import Call, Running
from trimmoe.models.passed import BytesRead, Routing, Widths
from trimmoe.models.sums import sums_in


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """A model that was taken apart."""

    running: Running
    ending: Ending
    layers: Sequence[Any]
    halves: Sequence[Halves]
    """Of each MoE layer."""
    moe_blocks: tuple[int, ...]
    recurrent: bool
    """Whether any layer keeps a state that cannot be cut back."""
    continues: bool
    """Whether all of them go on from one with several tokens at once."""


class GeneralView(MoEView):
    """See `MoEView`; made by `GeneralFamily.open`."""

    def __init__(
        self,
        parts: Parts,
        stacks: ExpertStacks,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        bytes_read: BytesRead,
    ) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        self.bytes_read = bytes_read
        self._parts, self._stacks = parts, stacks
        self._running, self._halves = parts.running, parts.halves
        starts = (-1, *parts.moe_blocks)
        ends = (*parts.moe_blocks, len(parts.layers))
        before = [range(a + 1, b) for a, b in zip(starts, ends, strict=True)]
        self._dense, self._trailing = before[:-1], before[-1]
        self._adds = all(half.layout.factor is not None for half in parts.halves)
        self._widths = _widths(spec.hidden_size, parts.halves, adds=self._adds)

    @property
    def loaded(self) -> tuple[frozenset[int], ...]:
        return self._stacks.loaded

    @property
    def widths(self) -> Widths:
        return self._widths

    @property
    def rewinds(self) -> bool:
        return not self._parts.recurrent

    def let_go(self) -> None:
        self._stacks.let_go()

    def new_cache(self, *, slots: int) -> KVCache:
        return GeneralCache(
            slots=slots,
            context_limit=self.spec.context_length,
            dtype=self.dtype,
            device=self.device,
        )

    def batch(
        self, cache: KVCache, slots: Sequence[int], positions: Sequence[Sequence[int]]
    ) -> TokenBatch:
        described = describe(slots, positions, device=self.device)
        cache.check(described.length)
        through = Passing(_general(cache), described)
        calls = self._running.calls(through, _positions(described))
        return replace(described, calls=calls)

    def embed(self, token_ids: Tensor, batch: TokenBatch) -> Tensor:
        through = Passing(_NO_CACHE, batch)
        return self._running.embedded(token_ids, through, _positions(batch))

    def attend(self, layer: int, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> Tensor:
        if self._goes_by_row(batch):
            return self._by_row(hidden, batch, cache, lambda h, b: self.attend(layer, h, b, cache))
        through = Passing(_general(cache), batch)
        hidden = self._run(self._dense[layer], hidden, batch.calls, through)
        attended = self._attend(layer, hidden, batch.calls, through)
        through.commit()
        return attended

    def tail(self, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> Tensor:
        if self._trailing and self._goes_by_row(batch):
            return self._by_row(hidden, batch, cache, lambda h, b: self.tail(h, b, cache))
        through = Passing(_general(cache), batch)
        hidden = self._run(self._trailing, hidden, batch.calls, through)
        through.commit()
        return hidden

    def attend_whatif(
        self, layer: int, hidden: Tensor, positions: Tensor, slot: int, cache: KVCache
    ) -> Tensor:
        calls, through = self._whatif(positions, slot, cache)
        row = self._run(self._dense[layer], hidden.unsqueeze(0), calls, through)
        return self._attend(layer, row, calls, through)[0]

    def tail_whatif(self, hidden: Tensor, positions: Tensor, slot: int, cache: KVCache) -> Tensor:
        if not self._trailing:
            return hidden
        calls, through = self._whatif(positions, slot, cache)
        return self._run(self._trailing, hidden.unsqueeze(0), calls, through)[0]

    def propagate(self, layer: int, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> None:
        for block in self._dense[layer]:
            self._only(range(block, block + 1), hidden, batch, cache)
        through = Passing(_general(cache), batch)
        self._attend(layer, hidden, batch.calls, through)
        through.commit()

    def propagate_tail(self, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> None:
        for block in self._trailing:
            self._only(range(block, block + 1), hidden, batch, cache)

    def route(self, layer: int, hidden: Tensor, *, groups: Tensor | None = None) -> Routing:
        halves = self._halves[layer]
        chosen = halves.chosen(hidden)
        probabilities = halves.probabilities(chosen.logits)
        experts, gates = chosen.experts, chosen.gates.float()
        if halves.layout.factor is not None and halves.layout.factor != 1.0:
            gates = gates * halves.layout.factor
        if experts.shape[1] > 1:
            order = probabilities.gather(1, experts).argsort(dim=1, descending=True, stable=True)
            experts, gates = experts.gather(1, order), gates.gather(1, order)
        return Routing(
            probabilities=probabilities,
            logits=chosen.logits.float(),
            experts=experts,
            gates=gates,
            normed=chosen.read,
        )

    def shared(self, layer: int, hidden: Tensor, *, normed: Tensor | None = None) -> Tensor | None:
        halves = self._halves[layer]
        if halves.layout.factor is None:
            return None
        own = normed if halves.layout.reads == "norm" else None
        return halves.shared(hidden, own)

    def experts(
        self,
        layer: int,
        hidden: Tensor,
        experts: Tensor,
        gates: Tensor,
        *,
        normed: Tensor | None = None,
    ) -> Tensor:
        rows = self._halves[layer].read(hidden) if normed is None else normed
        return self._stacks[layer](rows, experts, gates)

    def finish(
        self, layer: int, hidden: Tensor, shared: Tensor | None, routed: Tensor | None
    ) -> Tensor:
        if self._halves[layer].layout.factor is not None:
            return super().finish(layer, hidden, shared, routed)
        rounded = None if routed is None else routed.to(self.dtype)
        return self._halves[layer].rest(hidden, rounded)

    def gathered(
        self,
        layer: int,
        hidden: Tensor,
        experts: IntArray,
        gates: Tensor,
        *,
        normed: Tensor | None = None,
    ) -> Tensor:
        if self._adds:
            return super().gathered(layer, hidden, experts, gates, normed=normed)
        given = self._summed(layer, hidden, experts, gates, normed)
        rounded = None if given is None else given.to(self.dtype)
        return self._behind(layer, hidden, rounded).to(sums_in(self.dtype, self.device))

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
        given = self._summed(layer, hidden, experts, gates, normed)
        state = hidden.to(sums_in(self.dtype, self.device))
        if given is None:
            given = state.new_zeros(len(state), self._widths.part)
        return torch.cat([state, given.to(state.dtype)], 1)

    def _summed(
        self,
        layer: int,
        hidden: Tensor,
        experts: IntArray,
        gates: Tensor,
        normed: Tensor | None,
    ) -> Tensor | None:
        """What these experts give together, not rounded yet; None if there are none."""
        if not (experts >= 0).any():
            return None
        chosen = torch.from_numpy(experts).to(hidden.device)
        return self.experts(layer, hidden, chosen, gates, normed=normed)

    def whole(self, layer: int, moved: Tensor) -> Tensor:
        if self._adds:
            return moved
        hidden, given = moved.split([self._widths.attended, self._widths.part], 1)
        return self._behind(layer, hidden, given)

    def _behind(self, layer: int, hidden: Tensor, given: Tensor | None) -> Tensor:
        """The layer's output of what its experts gave together, rounded already."""
        halves = self._halves[layer]
        if halves.layout.factor is None:
            return halves.rest(hidden, given)
        return self.finish(layer, hidden, self.shared(layer, hidden), given)

    def head(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self._parts.ending.multiplied(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._parts.ending.logits(hidden)

    def _attend(
        self, layer: int, hidden: Tensor, calls: Sequence[Call], through: Passing
    ) -> Tensor:
        args, kwargs = calls[self._parts.moe_blocks[layer]]
        return self._halves[layer].attend(hidden, args, self._with(kwargs, through))

    def _run(
        self, blocks: range, hidden: Tensor, calls: Sequence[Call], through: Passing
    ) -> Tensor:
        """Whole dense blocks, as transformers runs them."""
        for block in blocks:
            args, kwargs = calls[block]
            made = self._parts.layers[block](hidden, *args, **self._with(kwargs, through))
            hidden = made[0] if isinstance(made, tuple) else made
        return hidden

    def _only(self, blocks: range, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> None:
        through = Passing(_general(cache), batch)
        self._run(blocks, hidden, batch.calls, through)
        through.commit()

    def _with(self, kwargs: dict[str, Any], through: Passing) -> dict[str, Any]:
        return kwargs | {self._running.layer_argument: through}

    def _whatif(self, positions: Tensor, slot: int, cache: KVCache) -> tuple[list[Call], Passing]:
        if self._parts.recurrent:
            raise NotImplementedError("a recurrent state answers no what-if")
        length = int(positions.max())
        queries = positions.unsqueeze(0)
        batch = describe([slot], [range(len(positions))], device=self.device)
        through = Beside(_general(cache), batch, slot, length)
        beside = Positions(queries=queries, length=length, beside=True)
        return self._running.calls(through, beside), through

    def _goes_by_row(self, batch: TokenBatch) -> bool:
        """Whether a recurrent state cannot take in these rows together."""
        if not self._parts.recurrent or batch.shape[1] == 1:
            return False
        return batch.shape[0] > 1 or self._goes_singly(batch.positions[0])

    def _goes_singly(self, positions: Sequence[int]) -> bool:
        """Whether each token passes alone: some of so few may be withdrawn, and what a layer keeps
        is the state after the last token of a call."""
        if positions[0] == 0 or len(positions) == 1:
            return False
        return len(positions) < SNAPSHOTS or not self._parts.continues

    def _by_row(self, hidden: Tensor, batch: TokenBatch, cache: KVCache, run: Any) -> Tensor:
        """The same for one row after the other, without padding; token by token where needed."""
        made = torch.zeros_like(hidden)
        for row, (slot, positions) in enumerate(zip(batch.slots, batch.positions, strict=True)):
            count = len(positions)
            step = 1 if self._goes_singly(positions) else count
            for start in range(0, count, step):
                part = positions[start : start + step]
                at = (slice(row, row + 1), slice(start, start + len(part)))
                made[at] = run(hidden[at], self.batch(cache, [slot], [part]))
        return made


def _widths(size: int, halves: Sequence[Halves], *, adds: bool) -> Widths:
    part = max(half.layout.experts_read for half in halves)
    return Widths(attended=size, part=part, moving=size if adds else size + part)


_NO_CACHE: Any = None


def _general(cache: KVCache) -> GeneralCache:
    assert isinstance(cache, GeneralCache), "a cache of another view"
    return cache


def _positions(batch: TokenBatch) -> Positions:
    return Positions(queries=batch.position_ids, length=batch.length)
