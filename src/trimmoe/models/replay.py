"""Decode steps through whole layers, recorded once and replayed.

On an accelerator a layer is some forty launches, each of which takes the interpreter longer than
the accelerator. A recording does them all at once, over memory that stays where it is: what goes in
is copied there, rows are filled up to a power of two with the first one, and attention reads as
many keys as the next power of two, those masked that are not there.
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

from trimmoe.models.base import Segment
from trimmoe.models.batch import TokenBatch
from trimmoe.models.cache import KVCache

LEAST_LENGTH = 64
MOST_RECORDINGS = 64
"""Kept for a cache; the oldest goes when there is another."""

Record = Callable[[Callable[[], "Passed"]], tuple["Passed", Callable[[], None]]]
"""Runs a step and records it: what it gives, and what makes it anew."""

Key = tuple["Span", int, int]
"""Layers, rows and keys."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The layers [first, last), and the one before which states are to be kept."""

    first: int
    last: int
    kept_at: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """What rows are behind a span."""

    hidden: Tensor
    """[n, d]"""
    experts: Tensor
    """Activated in its layers, [n, L, k]."""
    kept: Tensor | None
    """What entered the layer of which states are kept, [n, d]."""


class Passes(Protocol):
    """A view whose layers can be recorded."""

    def pass_span(self, span: Span, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> Passed:
        """Take rows [n, d] through layers all of whose experts run here, without asking the device
        for anything. The batch is one of `decoding`, without masks."""
        ...

    def reserve(self, span: Span, cache: KVCache, length: int) -> bytes:
        """Have the cache hold so many positions in the blocks of the span; where it does."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Recording:
    hidden: Tensor
    slots: Tensor
    positions: Tensor
    passed: Passed
    again: Callable[[], None]
    where: bytes
    """What it reads and writes of the cache."""

    def __call__(self, hidden: Tensor, batch: TokenBatch) -> Passed:
        _fill(self.hidden, hidden)
        _fill(self.slots, batch.slot_ids)
        _fill(self.positions, batch.position_ids[:, 0])
        self.again()
        return self.passed


class Replays:
    """The recordings of one view."""

    def __init__(self, passes: Passes, record: Record) -> None:
        self._passes, self._record = passes, record
        self._caches: WeakKeyDictionary[KVCache, dict[Key, _Recording]] = WeakKeyDictionary()
        self._works = True

    def run(self, span: Span, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> Segment | None:
        """Take rows [n, d], one token of each sequence, through whole layers; None if that cannot
        be recorded here."""
        if not self._works:
            return None
        recording = self._recording(span, hidden, batch, cache)
        if recording is None:
            return None
        passed, count = recording(hidden, batch), len(hidden)
        return Segment(
            layer=span.last,
            hidden=passed.hidden[:count].clone(),
            routing=None,
            experts=passed.experts[:count].cpu().numpy(),
            kept=None if passed.kept is None else passed.kept[:count].clone(),
        )

    def _recording(
        self, span: Span, hidden: Tensor, batch: TokenBatch, cache: KVCache
    ) -> _Recording | None:
        rows = _power(len(hidden), 1)
        length = min(_power(batch.length, LEAST_LENGTH), cache.context_limit)
        where = self._passes.reserve(span, cache, length)
        made = self._caches.setdefault(cache, {})
        key = (span, rows, length)
        if key in made and made[key].where == where:
            return made[key]
        made.pop(key, None)
        if len(made) >= MOST_RECORDINGS:
            del made[next(iter(made))]
        recording = self._made(key, where, hidden, batch, cache)
        if recording is not None:
            made[key] = recording
        return recording

    def _made(
        self, key: Key, where: bytes, hidden: Tensor, batch: TokenBatch, cache: KVCache
    ) -> _Recording | None:
        span, rows, length = key
        # Outside inference mode, because what is made inside it could not be written outside it.
        with torch.inference_mode(False):
            states = hidden.new_empty((rows, hidden.shape[1]))
            slots = batch.slot_ids.new_empty(rows)
            positions = slots.new_empty(rows)
        _fill(states, hidden)
        _fill(slots, batch.slot_ids)
        _fill(positions, batch.position_ids[:, 0])
        steps = decoding(slots, positions, length)
        try:
            passed, again = self._record(lambda: self._passes.pass_span(span, states, steps, cache))
        except RuntimeError as error:
            _log.warning("Layers run launch by launch, since they cannot be recorded: %s", error)
            self._works = False
            return None
        return _Recording(
            hidden=states,
            slots=slots,
            positions=positions,
            passed=passed,
            again=again,
            where=where,
        )


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


def _power(count: int, least: int) -> int:
    """The power of two that is not below a count."""
    return max(least, 1 << (count - 1).bit_length())
