"""The view over decoder-only families in single precision on a processor: compiled blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimmoe.core.precision import Precision
from trimmoe.core.specs import BoolArray, FloatArray, IntArray, ModelSpec
from trimmoe.core.stand_ins import number_of
from trimmoe.models.base import (
    DROPPED,
    BytesRead,
    ExpertNotLoaded,
    MoEView,
    Routing,
    Segment,
    TokenBatch,
    Widths,
)
from trimmoe.models.batching import describe
from trimmoe.models.cache import KVCache
from trimmoe.models.compiled import calls, columns, one_at_a_time
from trimmoe.models.compiled.caching import BlockCache
from trimmoe.models.compiled.delta import sizes_of
from trimmoe.models.compiled.lanes import LANES
from trimmoe.models.compiled.product import RECORD
from trimmoe.models.compiled.quantise import Packed, pack, pack_bits
from trimmoe.models.compiled.tables import ExpertParts, Tables, record

if TYPE_CHECKING:
    from trimmoe.models.compiled.parts import Parts

Floats = NDArray[np.float32]
_KEPT_LAYOUTS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Maps:
    """Linear maps of low rank as the compiled blocks read them."""

    table: IntArray
    """Records of what the maps of all experts of a block read, and of what they give,
    [B, 2 * RECORD]."""
    rank: int
    kept: list[Packed] = field(default_factory=list)
    """What the records point to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AtHand:
    """What a server guesses with: experts that it holds, and copies of others in few bits."""

    weights: IntArray
    """Where their matrices are, [B, E, EXPERT]."""
    here: BoolArray
    """Which ones there are, [B, E]."""
    is_whole: bool
    """Whether these are all that there are."""


class CompiledView(MoEView):
    """See `MoEView`; made by `DecoderFamily.open`."""

    shared_by_threads = True

    def __init__(
        self, parts: Parts, tables: Tables, spec: ModelSpec, bytes_read: BytesRead
    ) -> None:
        self.spec, self.bytes_read = spec, bytes_read
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self._parts, self._tables = parts, tables
        self.precision = parts.precision
        self._rotary = (np.empty((0, 0), dtype=np.float32),) * 2
        self._head_record = record(parts.head)
        self._restored: Tensor | None = None
        nothing = np.zeros((tables.blocks.shape[0], 2 * RECORD), dtype=np.int64)
        self._no_maps = Maps(table=nothing, rank=0)
        self._moe_blocks = np.array(tables.block_of)
        self._adds = not tables.blocks[:, columns.BOTH_POST].any()
        """Whether what experts give is added to the state, and no norm lies between."""
        self._states = {block: sizes_of(known) for block, known in tables.deltas.items()}
        self._layouts: dict[object, tuple[BoolArray, BoolArray]] = {}
        """Tables of experts by layer and by block, by where the former are in memory, which they
        keep."""
        calls.prepare_all()
        with one_at_a_time():
            self._warm_up()

    @property
    def loaded(self) -> tuple[frozenset[int], ...]:
        return self._parts.loaded

    @property
    def widths(self) -> Widths:
        usual = super().widths
        return usual if self._adds else replace(usual, moving=usual.attended + usual.part)

    @property
    def rewinds(self) -> bool:
        return not self._states

    @property
    def chains(self) -> bool:
        return True

    def let_go(self) -> None:
        """Nothing is streamed."""

    def use_threads(self, threads: int) -> None:
        self._tables.shape = self._tables.shape._replace(threads=threads)

    def new_cache(self, *, slots: int) -> KVCache:
        tables = self._tables
        heads = tables.blocks[:, columns.HEAD]
        return BlockCache(
            heads=tables.blocks[:, columns.KV_HEADS].tolist(),
            sizes=(heads + -heads % LANES).tolist(),
            states=self._states,
            slots=slots,
            values_are_keys=tables.shape.latent > 0,
            context_limit=self.spec.context_length,
            dtype=self.dtype,
            device=self.device,
        )

    def batch(
        self, cache: KVCache, slots: Sequence[int], positions: Sequence[Sequence[int]]
    ) -> TokenBatch:
        described = describe(slots, positions, device=self.device)
        cache.check(described.length)
        return described

    def embed(self, token_ids: Tensor, batch: TokenBatch) -> Tensor:
        rows = torch.from_numpy(self._parts.embeddings.rows(token_ids.reshape(-1).numpy()))
        if self._parts.embedding_scale != 1.0:
            rows = rows * self._parts.embedding_scale
        return rows.unflatten(0, tuple(token_ids.shape))

    def attend(self, layer: int, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> Tensor:
        rows = widened(batch.pack(hidden))
        first, at = self._blocks_of(layer)
        self._attended(range(first, at + 1), rows, self._places(batch), cache)
        return batch.unpack(self._narrowed(rows))

    def attend_whatif(
        self, layer: int, hidden: Tensor, positions: Tensor, slot: int, cache: KVCache
    ) -> Tensor:
        self._refuse_what_ifs()
        rows, (first, at) = widened(hidden), self._blocks_of(layer)
        self._attended(range(first, at + 1), rows, _beside(positions, slot), cache, aside=True)
        return self._narrowed(rows)

    def tail(self, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> Tensor:
        if not self._last_blocks:
            return hidden
        rows = widened(batch.pack(hidden))
        self._attended(self._last_blocks, rows, self._places(batch), cache)
        return batch.unpack(self._narrowed(rows))

    def tail_whatif(self, hidden: Tensor, positions: Tensor, slot: int, cache: KVCache) -> Tensor:
        self._refuse_what_ifs()
        rows = widened(hidden)
        self._attended(self._last_blocks, rows, _beside(positions, slot), cache, aside=True)
        return self._narrowed(rows)

    def route(self, layer: int, hidden: Tensor, *, groups: Tensor | None = None) -> Routing:
        rows = widened(hidden)
        block, shape = self._tables.blocks[self._tables.block_of[layer]], self._tables.shape
        found = _Found.of(shape, 0, rows.shape[0])
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

    def head(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if self._restored is None:
            self._restored = torch.from_numpy(self._parts.head.restored)
        return self._normed_last(hidden), self._restored

    def logits(self, hidden: Tensor) -> Tensor:
        rows = widened(self._normed_last(hidden))
        vocabulary = self.spec.vocab_size
        out = np.empty((rows.shape[0], calls.wide(vocabulary)), dtype=np.float32)
        calls.multiply(self._head_record, rows, rows.shape[0], out, self._tables.shape.threads)
        logits, cap = torch.from_numpy(out)[:, :vocabulary], self._parts.logit_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def propagate(self, layer: int, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> None:
        first, at = self._blocks_of(layer)
        self._propagated(range(first, at + 1), hidden, batch, cache)

    def propagate_tail(self, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> None:
        self._propagated(self._last_blocks, hidden, batch, cache)

    def run(
        self,
        first: int,
        last: int,
        hidden: Tensor,
        batch: TokenBatch,
        cache: KVCache,
        settled: BoolArray,
        kept_at: int | None = None,
    ) -> Segment:
        tables, count = self._tables, hidden.shape[0]
        begin, _ = self._blocks_of(first)
        wanted = kept_at if kept_at is not None and first <= kept_at < last else None
        wide = calls.wide(tables.shape.hidden)
        kept = np.empty((0 if wanted is None else count, wide), dtype=np.float32)
        end = tables.block_of[last - 1] + 1
        found = _Found.of(tables.shape, tables.blocks.shape[0], count)
        by_block = self._by_block(settled)
        rows, places = widened(hidden), self._places(batch)
        stopped = calls.segment(
            tables.shape,
            tables.blocks,
            (begin, end),
            tables.experts,
            by_block,
            rows,
            self._rotary_tables(batch.length),
            places,
            cache.addresses(range(begin, end), batch.length),
            (found.experts, found.logits, found.probabilities, found.gates, found.normed),
            -1 if wanted is None else self._blocks_of(wanted)[0],
            kept,
        )
        _check_states(cache)
        layer = last if stopped == end else int(tables.blocks[stopped, columns.LAYER])
        passed = self._moe_blocks[first:layer]
        return Segment(
            layer=layer,
            hidden=self._narrowed(rows),
            routing=None if layer == last else self._routing(found, found.experts[stopped]),
            experts=found.experts[passed].transpose(1, 0, 2),
            kept=None if wanted is None or wanted > layer else self._narrowed(kept),
        )

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Have everything compiled or read from where it is kept, which the first one who asks for
        a token should not wait for."""
        cache = self.new_cache(slots=1)
        batch = self.batch(cache, [cache.alloc()], [range(1)])
        hidden = self.embed(batch.pad([[0]]), batch)
        flat = batch.pack(self.attend(0, hidden, batch, cache))
        routing = self.route(0, flat)
        none = torch.full_like(routing.experts, DROPPED)
        self.experts(0, flat, none, routing.gates)
        self.give(0, flat, none.numpy(), routing.gates)
        self.gathered(0, flat, none.numpy(), routing.gates)
        self.shared(0, flat)
        self.propagate(0, hidden, batch, cache)
        nothing = np.zeros((self.spec.layer_count, self.spec.expert_count), dtype=bool)
        self.run(0, 1, flat, batch, cache, nothing)
        self.run_home(0, 1, flat, batch, cache, self.at_hand(nothing, None))
        self.logits(flat)

    def maps(self, read: Floats, give: Floats) -> Maps:
        """Maps of low rank in place of experts: read [N, d, E * r], give [N, E * r, d]."""
        tables = self._tables
        found = Maps(
            table=np.zeros((tables.blocks.shape[0], 2 * RECORD), dtype=np.int64),
            rank=read.shape[2] // self.spec.expert_count,
        )
        for layer, block in enumerate(tables.block_of):
            both = [pack(part[layer].T, Precision.NONE) for part in (read, give)]
            found.table[block] = np.concatenate([record(part) for part in both])
            found.kept.extend(both)
        return found

    def add_copy(self, layer: int, expert: int, bits: int, parts: ExpertParts) -> None:
        """Keep a copy in so many bits of an expert that is not loaded."""
        halves = [half.float().numpy() for half in (parts.gate, parts.up)]
        packed = pack_bits(halves, bits), pack_bits([parts.down.float().numpy()], bits)
        biases = self._tables.keep_biases(parts)
        self._tables.copy(self._tables.block_of[layer], expert, bits, *packed, biases)

    def at_hand(self, held: BoolArray, bits: IntArray | None) -> AtHand:
        """The experts `held` [N, E], all of which are loaded, and copies in so many `bits` [N, E]
        of others; those of loaded ones are made here."""
        tables = self._tables
        weights, here = tables.experts[:, : held.shape[1]].copy(), self._by_block(held).copy()
        copies = np.zeros(held.shape, dtype=np.int64) if bits is None else bits * ~held
        if copies.any():
            self.have_copies(copies)
        for layer, expert in np.argwhere(copies).tolist():
            block, few = tables.block_of[layer], int(copies[layer, expert])
            number = number_of(expert, few, held.shape[1])
            weights[block, expert] = tables.experts[block, number]
            here[block, expert] = True
        is_whole = bool(here[self._moe_blocks].all())
        return AtHand(weights=weights, here=here, is_whole=is_whole)

    def have_copies(self, bits: IntArray) -> bool:
        tables = self._tables
        for layer, expert in np.argwhere(bits).tolist():
            block, few = tables.block_of[layer], int(bits[layer, expert])
            number = number_of(expert, few, tables.shape.experts)
            if tables.experts[block, number, 0]:
                continue
            if (block, expert) not in tables.matrices:
                return False
            self._copy_loaded(block, expert, few)
        return True

    def _copy_loaded(self, block: int, expert: int, bits: int) -> None:
        up, down = (matrix.restored for matrix in self._tables.matrices[block, expert])
        size = self._tables.shape.routed
        # Each half has its own panels, which may be padded.
        halves = [up[:size], up[up.shape[0] // 2 :][:size]]
        packed = pack_bits(halves, bits), pack_bits([down[: self.spec.hidden_size]], bits)
        self._tables.copy(block, expert, bits, *packed, self._tables.biases(block, expert))

    def run_home(
        self,
        first: int,
        last: int,
        hidden: Tensor,
        batch: TokenBatch,
        cache: KVCache,
        at_hand: AtHand,
        maps: Maps | None = None,
    ) -> Tensor:
        """Rows [n, d] through the layers [first, last) with the experts `at_hand`, and `maps` in
        place of the others; without those they add nothing."""
        tables, rows = self._tables, widened(hidden)
        maps = maps or self._no_maps
        begin, end = self._blocks_of(first)[0], tables.block_of[last - 1] + 1
        calls.home_segment(
            tables.shape,
            tables.blocks,
            (begin, end),
            at_hand.weights,
            at_hand.here,
            maps.table,
            maps.rank,
            rows,
            self._rotary_tables(batch.length),
            self._places(batch),
            cache.addresses(range(begin, end), batch.length),
        )
        _check_states(cache)
        return self._narrowed(rows)

    def _refuse_what_ifs(self) -> None:
        if self._states:
            raise NotImplementedError("a recurrent state answers no what-if")

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

    @property
    def _last_blocks(self) -> range:
        """Dense ones after the last MoE layer."""
        return range(self._tables.block_of[-1] + 1, self._tables.blocks.shape[0])

    def _blocks_of(self, layer: int) -> tuple[int, int]:
        """The first block of a layer's, and the one with its experts."""
        blocks = self._tables.block_of
        return (blocks[layer - 1] + 1 if layer else 0), blocks[layer]

    def _attended(
        self,
        blocks: range,
        rows: Floats,
        places: tuple[IntArray, IntArray],
        cache: KVCache,
        *,
        aside: bool = False,
    ) -> None:
        """Dense blocks whole, of the one with routed experts the attention; changes `rows`."""
        tables, length = self._tables, int(places[1].max()) + 1
        slabs, rotary = cache.addresses(blocks, length), self._rotary_tables(length)
        for at in blocks:
            is_dense = tables.blocks[at, columns.LAYER] < 0
            run = calls.dense_block if is_dense else calls.attend
            run(tables.shape, tables.blocks[at], rows, rotary, places, slabs[at], aside)
        _check_states(cache)

    def _propagated(self, blocks: range, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> None:
        tables, rows = self._tables, widened(batch.pack(hidden))
        slabs = cache.addresses(blocks, batch.length)
        rotary, places = self._rotary_tables(batch.length), self._places(batch)
        for at in blocks:
            calls.leave(tables.shape, tables.blocks[at], rows, rotary, places, slabs[at])
        _check_states(cache)

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

    def _normed_last(self, hidden: Tensor) -> Tensor:
        rows = widened(hidden)
        out = np.zeros_like(rows)
        shape, norm = self._tables.shape, self._parts.last_norm
        calls.norm(rows, norm.ctypes.data, shape.hidden, shape.epsilon, out)
        return self._narrowed(out)

    def _routing(self, found: _Found, experts: IntArray) -> Routing:
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

    def _places(self, batch: TokenBatch) -> tuple[IntArray, IntArray]:
        return (
            np.ascontiguousarray(batch.write_slots.numpy()),
            np.ascontiguousarray(batch.write_positions.numpy()),
        )

    def _rotary_tables(self, length: int) -> tuple[Floats, Floats]:
        """Cosine and sine of every position so far, [P, rotary]."""
        cosine, sine = self._rotary
        if cosine.shape[0] < length:
            size = min(max(2 * length, 256), max(self.spec.context_length, length))
            whole = self._parts.rotary(torch.arange(size)[None])
            cosine, sine = (np.ascontiguousarray(part[0].float().numpy()) for part in whole)
            # Both at once, as another thread may be reading.
            self._rotary = cosine, sine
        return cosine, sine


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """Room for what routers say; shapes as `calls.segment` has them."""

    experts: IntArray
    logits: Floats
    probabilities: Floats
    gates: Floats
    normed: Floats

    @staticmethod
    def of(shape: calls.Shape, blocks: int, count: int) -> _Found:
        wide = calls.wide(shape.experts)
        return _Found(
            experts=np.empty((blocks, count, shape.top_k), dtype=np.int64),
            logits=np.empty((count, wide), dtype=np.float32),
            probabilities=np.empty((count, wide), dtype=np.float32),
            gates=np.empty((count, shape.top_k), dtype=np.float32),
            normed=np.zeros((count, calls.wide(shape.hidden)), dtype=np.float32),
        )


def _check_states(cache: KVCache) -> None:
    assert isinstance(cache, BlockCache), "a cache of another view"
    cache.check_states()


def _beside(positions: Tensor, slot: int) -> tuple[IntArray, IntArray]:
    """Places of what-if queries [S] into one slot."""
    where = np.ascontiguousarray(positions.numpy(), dtype=np.int64)
    return np.full_like(where, slot), where


def widened(rows: Tensor) -> Floats:
    """A copy of [n, d] as wide rows."""
    # Compiled products read by address, whatever is there.
    assert rows.dtype is torch.float32, f"states of {rows.dtype} in compiled blocks"
    given = rows.numpy()
    count, size = given.shape
    if calls.wide(size) == size:
        return given.copy()
    whole = np.zeros((count, calls.wide(size)), dtype=np.float32)
    whole[:, :size] = given
    return whole
