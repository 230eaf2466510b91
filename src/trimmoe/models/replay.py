"""Decode steps through layers, recorded once and replayed.

On an accelerator a layer is some forty launches, each of which takes the interpreter longer than
the accelerator. A recording does them all at once, over memory that stays where it is: what goes in
is copied there, rows are filled up to a power of two with the first one, and attention reads as
many keys as the next power of two, those masked that are not there. Whole layers are one recording.
Where some of a layer's experts are elsewhere, one ends behind its router, and its experts are
another, for the rows whose experts are all here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from trimmoe.models.batch import TokenBatch
from trimmoe.models.cache import KVCache
from trimmoe.models.passed import Routing

LEAST_LENGTH = 64
MOST_LAYERS = 4096
"""In all recordings that are kept for a cache; the oldest go when there is another."""

Record = Callable[[Callable[[], "Passed"]], tuple["Passed", Callable[[], None]]]
"""Runs a step and records it: what it gives, and what makes it anew."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The layers [first, last), and the one before which states are to be kept."""

    first: int
    last: int
    kept_at: int | None
    routes: bool = False
    """Whether rows go on through attention and router of the layer `last`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The experts of one layer, of rows behind its router."""

    layer: int


Key = tuple[Span | Experts, int, int]
"""Layers, rows and keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """What rows are behind a span."""

    hidden: Tensor
    """[n, d]; behind attention if there is a `routing`."""
    experts: Tensor
    """Activated in its whole layers, [n, L, k]."""
    kept: Tensor | None = None
    """What entered the layer of which states are kept, [n, d]."""
    routing: Routing | None = None
    """Of the layer behind those."""

    def rows(self, count: int) -> Passed:
        """A copy of the first rows."""
        routing, kept = self.routing, self.kept
        return Passed(
            hidden=_first(self.hidden, count),
            experts=_first(self.experts, count),
            kept=None if kept is None else _first(kept, count),
            routing=None if routing is None else routing.map(lambda each: _first(each, count)),
        )


class Passes(Protocol):
    """A view whose layers can be recorded."""

    def pass_span(self, span: Span, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> Passed:
        """Take rows [n, d] through layers all of whose experts run here, without asking the device
        for anything. The batch is one of `decoding`, without masks."""
        ...

    def pass_experts(
        self, layer: int, attended: Tensor, normed: Tensor, experts: Tensor, gates: Tensor
    ) -> Tensor:
        """A layer's output of rows [n, d] behind its router, all of whose experts [n, k] run here,
        likewise."""
        ...

    def reserve(self, span: Span, cache: KVCache, length: int) -> bytes:
        """Have the cache hold so many positions in the blocks of the span; where it does."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Recording:
    inputs: tuple[Tensor, ...]
    passed: Passed
    again: Callable[[], None]
    where: bytes
    """What it reads and writes of the cache."""
    layers: int

    def __call__(self, *given: Tensor) -> Passed:
        for target, source in zip(self.inputs, given, strict=True):
            _fill(target, source)
        self.again()
        return self.passed.rows(len(given[0]))


class Replays:
    """The recordings of one view."""

    def __init__(self, passes: Passes, record: Record) -> None:
        self._passes, self._record = passes, record
        self._caches: WeakKeyDictionary[KVCache, dict[Key, _Recording]] = WeakKeyDictionary()
        self._works = True

    def run(self, span: Span, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> Passed | None:
        """Take rows [n, d], one token of each sequence, through a span; None if that cannot be
        recorded here."""
        if not self._works:
            return None
        length = min(_power(batch.length, LEAST_LENGTH), cache.context_limit)
        given = hidden, batch.slot_ids, batch.position_ids[:, 0]

        def step(states: Tensor, slots: Tensor, positions: Tensor) -> Passed:
            steps = decoding(slots, positions, length)
            return self._passes.pass_span(span, states, steps, cache)

        layers = span.last - span.first + span.routes
        where = self._passes.reserve(span, cache, length)
        return self._replayed(cache, span, length, given, step, where, layers)

    def experts(
        self, layer: int, attended: Tensor, routing: Routing, cache: KVCache
    ) -> Tensor | None:
        """The layer's output of rows [n, d] behind its router, all of whose experts run here;
        else as `run`."""
        if not self._works:
            return None
        given = attended, routing.normed, routing.experts, routing.gates

        def step(states: Tensor, normed: Tensor, experts: Tensor, gates: Tensor) -> Passed:
            output = self._passes.pass_experts(layer, states, normed, experts, gates)
            # Of no whole layer, so that there is nothing to copy.
            return Passed(hidden=output, experts=experts[:, None][:, :0])

        passed = self._replayed(cache, Experts(layer=layer), 0, given, step, b"", 1)
        return None if passed is None else passed.hidden

    def _replayed(
        self,
        cache: KVCache,
        what: Span | Experts,
        length: int,
        given: tuple[Tensor, ...],
        step: Callable[..., Passed],
        where: bytes,
        layers: int,
    ) -> Passed | None:
        """What a step makes of what is `given`, by its recording, which is made if there is none;
        `where` and `layers` as of a `_Recording`."""
        made = self._caches.setdefault(cache, {})
        key = (what, _power(len(given[0]), 1), length)
        recording = made.get(key)
        if recording is None or recording.where != where:
            made.pop(key, None)
            while made and sum(one.layers for one in made.values()) + layers > MOST_LAYERS:
                del made[next(iter(made))]
            recording = self._made(key, given, step, where, layers)
            if recording is None:
                return None
            made[key] = recording
        return recording(*given)

    def _made(
        self,
        key: Key,
        given: tuple[Tensor, ...],
        step: Callable[..., Passed],
        where: bytes,
        layers: int,
    ) -> _Recording | None:
        # Outside inference mode, because what is made inside it could not be written outside it.
        with torch.inference_mode(False):
            inputs = tuple(one.new_empty((key[1], *one.shape[1:])) for one in given)
        for target, source in zip(inputs, given, strict=True):
            _fill(target, source)
        try:
            passed, again = self._record(lambda: step(*inputs))
        except RuntimeError as error:
            _log.warning("Layers run launch by launch, since they cannot be recorded: %s", error)
            self._works = False
            return None
        return _Recording(inputs=inputs, passed=passed, again=again, where=where, layers=layers)


def decoding(slots: Tensor, positions: Tensor, length: int) -> TokenBatch:
    """One token of each sequence, wherever these tensors [n] say that they are when it runs."""
    return TokenBatch(
        slots=(),
        positions=(),
        position_ids=positions[:, None],
        valid=torch.ones((len(slots), 1), dtype=torch.bool, device=slots.device),
        length=length,
        packed=None,
        slot_ids=slots,
        first_slot=None,
        span=None,
        write_slots=slots,
        write_positions=positions,
    )


def record_for(device: torch.device) -> Record | None:
    """How steps are recorded on a device; None if they are not."""
    return _CudaGraphs() if device.type == "cuda" else None


_ONE_AT_A_TIME = threading.Lock()
"""Graphs enter and leave a list of torch's that is nobody's but one thread's."""
_over: list[Any] = []
"""Graphs that nobody replays any more, until there is a moment to let them go."""


class _Graph:
    """A CUDA graph and what it gives; let go at the next recording, whoever drops it when."""

    def __init__(self, step: Callable[[], Passed], pool: Any) -> None:
        with _ONE_AT_A_TIME:
            _over.clear()
            self._graph = torch.cuda.CUDAGraph()
            # Other threads may go on using the device meanwhile.
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                self.passed = step()

    def replay(self) -> None:
        self._graph.replay()

    def __del__(self, over: list[Any] = _over) -> None:
        # Bound at once: when the interpreter ends, the module's own name may be gone.
        over.append(self._graph)


class _CudaGraphs:
    """Records CUDA graphs, which take turns in the same memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._first: _Graph | None = None
        """Memory that no graph uses any more would be gone for those to come; so this one does."""

    def __call__(self, step: Callable[[], Passed]) -> tuple[Passed, Callable[[], None]]:
        # Libraries set themselves up in a first run, which cannot be recorded.
        aside, here = torch.cuda.Stream(), torch.cuda.current_stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            step()
        here.wait_stream(aside)
        if self._first is None:
            self._first = _Graph(step, self._pool)
        made = _Graph(step, self._pool)
        return made.passed, made.replay


def _fill(target: Tensor, source: Tensor) -> None:
    """Rows of a target from those there are, the first one again where there are no more."""
    target[: len(source)] = source
    if len(source) < len(target):
        target[len(source) :] = source[:1]


def _first(tensor: Tensor, count: int) -> Tensor:
    """A copy of the first rows, since the next recording uses the same memory."""
    return tensor[:count].clone()


def _power(count: int, least: int) -> int:
    """The power of two that is not below a count."""
    return max(least, 1 << (count - 1).bit_length())
