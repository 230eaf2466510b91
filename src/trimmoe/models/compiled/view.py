"""The view over decoder-only families in single precision on a processor: compiled blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimmoe.core.specs import BoolArray, IntArray, ModelSpec
from trimmoe.models.base import DROPPED
from trimmoe.models.batch import TokenBatch
from trimmoe.models.batching import describe
from trimmoe.models.cache import KVCache
from trimmoe.models.compiled import calls, columns, one_at_a_time
from trimmoe.models.compiled.caching import BlockCache
from trimmoe.models.compiled.copies import (
    AtHand,
    Maps,
    add_copy,
    at_hand,
    have_copies,
    low_rank_maps,
    no_maps,
)
from trimmoe.models.compiled.delta import sizes_of
from trimmoe.models.compiled.experts import CompiledExperts
from trimmoe.models.compiled.lanes import LANES
from trimmoe.models.compiled.rows import Floats, Found, beside, widened
from trimmoe.models.compiled.tables import ExpertParts, Tables, record
from trimmoe.models.memory import give_back
from trimmoe.models.passed import BytesRead, Segment

if TYPE_CHECKING:
    from trimmoe.models.compiled.parts import Parts


class CompiledView(CompiledExperts):
    """See `MoEView`; made by `DecoderFamily.open`."""

    shared_by_threads = True

    def __init__(
        self, parts: Parts, tables: Tables, spec: ModelSpec, bytes_read: BytesRead
    ) -> None:
        super().__init__(parts, tables, spec, bytes_read)
        self._rotary = (np.empty((0, 0), dtype=np.float32),) * 2
        self._head_record = record(parts.head)
        self._restored: Tensor | None = None
        self._no_maps = no_maps(tables)
        self._states = {block: sizes_of(known) for block, known in tables.deltas.items()}
        calls.prepare_all()
        with one_at_a_time():
            self._warm_up()

    @property
    def loaded(self) -> tuple[frozenset[int], ...]:
        return self._parts.loaded

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
        rows = torch.from_numpy(self.token_rows(token_ids.reshape(-1).numpy()))
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
        self._attended(range(first, at + 1), rows, beside(positions, slot), cache, aside=True)
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
        self._attended(self._last_blocks, rows, beside(positions, slot), cache, aside=True)
        return self._narrowed(rows)

    def head(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if self._restored is None:
            self._restored = torch.from_numpy(self._parts.head.restored)
        return self.normed_last(hidden), self._restored

    def head_rows(self, tokens: IntArray) -> Floats:
        """The head's rows for some tokens [n], [n, d]."""
        return self._parts.head.rows(tokens)

    def token_rows(self, tokens: Sequence[int] | IntArray) -> Floats:
        """Embeddings [n, d]."""
        rows = self._parts.embeddings.rows(np.asarray(tokens, dtype=np.int64))
        scale = self._parts.embedding_scale
        return rows if scale == 1.0 else rows * np.float32(scale)

    def normed_last(self, hidden: Tensor) -> Tensor:
        rows = widened(hidden)
        out = np.zeros_like(rows)
        shape, norm = self._tables.shape, self._parts.last_norm
        calls.norm(rows, norm.ctypes.data, shape.hidden, shape.epsilon, out)
        return self._narrowed(out)

    def logits(self, hidden: Tensor) -> Tensor:
        rows = widened(self.normed_last(hidden))
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
        found = Found.of(tables.shape, tables.blocks.shape[0], count)
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
        return low_rank_maps(self._tables, read, give)

    def add_copy(self, layer: int, expert: int, bits: int, parts: ExpertParts) -> None:
        """Keep a copy in so many bits of an expert that is not loaded."""
        add_copy(self._tables, self._tables.block_of[layer], expert, bits, parts)

    def at_hand(self, held: BoolArray, bits: IntArray | None) -> AtHand:
        """The experts `held` [N, E], all of which are loaded, and copies in so many `bits` [N, E]
        of others; those of loaded ones are made here."""
        copies = np.zeros(held.shape, dtype=np.int64) if bits is None else bits * ~held
        return at_hand(self._tables, self._by_block(held), copies)

    def fit_copies(self, squares: NDArray[np.float32] | None) -> None:
        self._tables.fit_copies(squares)

    def have_copies(self, bits: IntArray) -> bool:
        return have_copies(self._tables, bits)

    def drop_copies(self) -> None:
        self._tables.drop_copies()
        give_back()

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


def _check_states(cache: KVCache) -> None:
    assert isinstance(cache, BlockCache), "a cache of another view"
    cache.check_states()
