"""Many windows through the model together: all of them through a layer before the next layer.

A view that streams its experts from disk reads each layer once a sweep. Between two layers a token
is its hidden state and nothing else, kept on disk; keys and values exist only for the windows that
are being run, in the layer they are run in. Besides the view, memory holds the rows of those few
windows, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor

from trimmoe.calibrate.mapped import States
from trimmoe.calibrate.windows import Windows, run_layer
from trimmoe.calibrate.workers import side_by_side, workers_for
from trimmoe.core.specs import IntArray
from trimmoe.models.base import MoEView
from trimmoe.models.batch import TokenBatch
from trimmoe.models.cache import KVCache
from trimmoe.models.encoder_decoder import EncoderDecoderView


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """Some windows, whole and run together, in one layer."""

    layer: int
    part: int
    """Which of the sweep's parts these windows are."""
    span: slice
    """Their tokens."""
    is_last: bool
    """Whether the layer is the last one."""
    batch: TokenBatch
    groups: Tensor
    """Window of each token, int64 [n]."""
    cache: KVCache
    """Holds their keys and values up to and with this layer's attention, of this layer alone."""
    before: Tensor
    """Their states before the layer, [n, d]."""
    attended: Tensor
    """Their states after its attention, [n, d]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What an earlier sweep says of some windows: they need not pass the same layers again."""

    hidden: Tensor
    """Every token's states after each layer, [N, T, d], as the view made them."""
    windows: IntArray
    """Which of its windows each of the sweep's is, [W]."""
    first: IntArray
    """The first layer that each window is to visit, [W]."""
    last: IntArray
    """The last layer that it enters in the recorded state, [W]."""


_ROWS = 1024
"""Tokens of one step, unless said otherwise."""
_Result = TypeVar("_Result")


class Sweep:
    """Windows on their way through the layers; what happens to their tokens there is up to whoever
    goes through the visits and says how they leave each."""

    def __init__(
        self,
        view: MoEView,
        windows: Windows,
        *,
        at_once: int | None = None,
        folder: Path | None = None,
        known: Known | None = None,
    ) -> None:
        """`at_once` windows make a part (None: as many as a thousand tokens allow); `folder` takes
        the states (None: temporary files). Of what is `known` nothing is computed again; a part
        goes on from where its first window does."""
        if at_once is None:
            at_once = max(1, _ROWS // windows.length)
        self._view = view
        self._windows = windows
        self._at_once = min(at_once, windows.count)
        self._states = States(windows.tokens, view, folder)
        self._sources = None if windows.sources is None else self._encoded(windows, folder)
        self._known = known
        self._slots = list(range(self._at_once))
        self._caches = [self._new_cache() for _ in range(workers_for(view))]
        self._batches: dict[int, TokenBatch] = {}

    def _new_cache(self) -> KVCache:
        cache = self._view.new_cache(slots=self._at_once)
        assert [cache.alloc() for _ in self._slots] == self._slots
        return cache

    def visits(self) -> Iterator[Visit]:
        """Every part in the first layer, then every part in the second, and so on.

        Between two visits `leave` must be told what became of the tokens.
        """
        for layer in range(self._view.spec.layer_count):
            for part in self._parts(layer):
                yield self._visit(layer, part, self._caches[0])
            self._passed()
        # What follows a sweep, such as fitting heads, has the memory of a layer's experts.
        self._view.let_go()

    def results(self, work: Callable[[Visit], _Result]) -> Iterator[_Result]:
        """What `work` makes of each visit, in the same order; several of a layer at once where
        threads may share the view. `work` tells `leave` itself."""
        free: SimpleQueue[KVCache] = SimpleQueue()
        for cache in self._caches:
            free.put(cache)

        def visited(layer: int, part: int) -> _Result:
            cache = free.get()
            try:
                return work(self._visit(layer, part, cache))
            finally:
                free.put(cache)

        for layer in range(self._view.spec.layer_count):
            yield from side_by_side(self._view, partial(visited, layer), self._parts(layer))
            self._passed()
        self._view.let_go()

    def _parts(self, layer: int) -> list[int]:
        """The parts that visit a layer."""
        firsts = range(0, self._windows.count, self._at_once)
        if self._known is None:
            return list(range(len(firsts)))
        starts = [self._known.first[at : at + self._at_once].min() for at in firsts]
        return [part for part, start in enumerate(starts) if start <= layer]

    def _passed(self) -> None:
        for cache in self._caches:
            cache.forget()
        self._states.release()

    def leave(self, visit: Visit, after: Tensor) -> None:
        """The states [n, d] with which the tokens of a visit go on to the next layer."""
        if not visit.is_last:
            self._states[visit.span] = after

    def tail(self, visit: Visit, after: Tensor) -> Tensor:
        """From states [n, d] after the last layer to what `logits` takes, [n, d]."""
        assert visit.is_last
        hidden = visit.batch.unpack(after)
        return visit.batch.pack(self._view.tail(hidden, visit.batch, visit.cache))

    def _visit(self, layer: int, part: int, cache: KVCache) -> Visit:
        first = part * self._at_once
        windows = self._windows.part(first, first + self._at_once)
        start = first * windows.length
        span = slice(start, start + windows.tokens)
        if self._sources is not None:
            self._attach(layer, first, windows.count, cache)
        batch = self._batch(windows.count)
        if layer == 0:
            ids = torch.from_numpy(windows.ids).to(self._view.device)
            hidden = self._view.embed(ids, batch)
        else:
            hidden = batch.unpack(self._before(layer, first, span))
        attended = self._view.attend(layer, hidden, batch, cache)
        return Visit(
            layer=layer,
            part=part,
            span=span,
            is_last=layer == self._view.spec.layer_count - 1,
            batch=batch,
            groups=batch.groups,
            cache=cache,
            before=batch.pack(hidden),
            attended=batch.pack(attended),
        )

    def _before(self, layer: int, first: int, span: slice) -> Tensor:
        """States with which the tokens of a part enter a layer, [n, d]."""
        if self._known is None:
            return self._states[span]
        states, length = self._states[span], self._windows.length
        for at in range(first, first + (span.stop - span.start) // length):
            if layer <= self._known.last[at]:
                start = int(self._known.windows[at]) * length
                own = slice((at - first) * length, (at - first + 1) * length)
                states[own] = self._known.hidden[layer - 1, start : start + length]
        return states

    def _batch(self, count: int) -> TokenBatch:
        """Whole windows from position 0: the same for all parts of as many windows."""
        if count not in self._batches:
            rows = [range(self._windows.length)] * count
            self._batches[count] = self._view.batch(self._caches[0], self._slots[:count], rows)
        return self._batches[count]

    def _encoded(self, windows: Windows, folder: Path | None) -> States:
        """The encoder's states of the windows' sources, by a sweep of their own."""
        assert isinstance(self._view, EncoderDecoderView)
        assert windows.sources is not None
        encoder, found = self._view.encoder, States(windows.sources.size, self._view, folder)
        sources = Windows(ids=windows.sources)
        sweep = Sweep(encoder, sources, at_once=self._at_once, folder=folder)
        for visit in sweep.visits():
            routing = encoder.route(visit.layer, visit.attended, groups=visit.groups)
            after = run_layer(encoder, visit.layer, visit.attended, routing, routing.experts)
            sweep.leave(visit, after)
            if visit.is_last:
                found[visit.span] = self._view.states(sweep.tail(visit, after))
        return found

    def _attach(self, layer: int, first: int, count: int, cache: KVCache) -> None:
        assert isinstance(self._view, EncoderDecoderView)
        assert self._sources is not None
        assert self._windows.sources is not None
        length = self._windows.sources.shape[1]
        for slot, window in zip(self._slots, range(first, first + count), strict=False):
            states = self._sources[slice(window * length, (window + 1) * length)]
            self._view.attach(cache, slot, states, layers={layer})
