"""What a server can do, timed on its own device with the weights that it holds."""

from __future__ import annotations

import itertools
import json
import os
import platform
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trimmoe.core.machines import BATCHES, Work
from trimmoe.core.specs import USUAL_DRAFTED, BoolArray, FloatArray
from trimmoe.models.base import DROPPED, MoEView
from trimmoe.models.batch import TokenBatch
from trimmoe.models.draft_chains import expected_tokens
from trimmoe.models.encoder_decoder import EncoderDecoderView
from trimmoe.models.passed import Segment
from trimmoe.runtime.head_drafts import HeadDrafts, Wish
from trimmoe.runtime.home import Own, held_here, home_layers, home_states

FEWEST, MOST = 5, 40
"""Times that one kind of work is timed with one size of batch."""
WORK_S = 0.15
"""After which no more than `FEWEST` are wanted."""
_CONTEXT = 64
"""Positions of a sequence before the one that is timed."""
_QUANTILES = (0.1, 0.5, 0.9)
_SOFTWARE_TIMES, _SOFTWARE_ROWS = 15, 1000
_DRAWN = 1 << 40
"""Set in an address that every process draws for itself, where a machine has no network card."""
_SPREAD, _SPREAD_BYTES = 8, 32_000_000
"""Experts that are timed one after another, at least so many and with so many bytes together where
there are as many, so that none comes from the cache that the processor's core has to itself."""


def machine_name() -> str:
    """The same for all processes of a machine, and for no other's."""
    address = uuid.getnode()
    if address & _DRAWN and (boot := _boot()):
        return f"{platform.node()} {boot}"
    return f"{platform.node()} {address:012x}"


def _boot() -> str:
    """What the system calls the time since it started; empty if it does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def free_bytes(device: torch.device) -> int:
    """Memory that can be had: what nobody has taken, and what the system only keeps files in."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        told = Path("/proc/meminfo").read_text(encoding="ascii").split()
        return int(told[told.index("MemAvailable:") + 1]) * 1024
    except (OSError, ValueError, IndexError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def used_bytes(device: torch.device) -> int:
    """Memory that this process takes: of an accelerator, else of the machine; 0 where the system
    does not say."""
    if device.type == "cuda":
        return int(torch.cuda.memory_reserved(device))
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def time_software() -> float:
    """Median time of a fixed piece of what servers do between kernels, seconds."""
    taken = []
    for _ in range(_SOFTWARE_TIMES):
        began_s = time.perf_counter()
        rows = [{"row": at, "values": [at, at + 1]} for at in range(_SOFTWARE_ROWS)]
        sum(row["row"] for row in json.loads(json.dumps(rows)))
        taken.append(time.perf_counter() - began_s)
    return float(np.median(taken))


@torch.inference_mode()
def time_work(view: MoEView, own: Own | None = None) -> FloatArray:
    """Quantiles of what every kind of work takes, by rows, [3, W, B] seconds; guesses are made
    with what a server has of its `own`, by default the experts it was opened with.

    Layers run as they do in decoding, several in one call, rows of as many sequences.
    """
    own = own or Own.of(view, held_here(view))
    by_rows = [_work_at(_Bench(view, rows), own) for rows in BATCHES]
    return np.stack(by_rows, axis=2)


@torch.inference_mode()
def time_naming(view: MoEView) -> float:
    """Median time in which a draft head names one token behind one that has come, and reads what
    that was predicted from, seconds; nothing where there is no head. Layers pass before each, as in
    decoding, so that the head does not come from a cache either."""
    if view.draft_head is None:
        return 0.0
    bench, drafts, own = _Bench(view, 1), HeadDrafts(view=view), Own.of(view, held_here(view))
    state, token = bench.states[:1], 0
    drafts.read(0, 0, state.expand(_CONTEXT, -1), [token] * _CONTEXT)
    positions = itertools.count(_CONTEXT)

    def named() -> None:
        position = next(positions)
        drafts.offer([Wish(slot=0, position=position, token=token, most=1, likely=0.0)])
        drafts.read(0, position, state, [token])

    return float(np.median(bench.timed(named, behind=lambda: bench.home(own))))


def _work_at(bench: _Bench, own: Own) -> FloatArray:
    """Of one size of batch, [3, W]."""
    view = bench.view
    dense = bench.dense()
    taken = {
        Work.DENSE: dense,
        Work.EXPERT: bench.expert(float(np.median(dense))),
        Work.HEAD: bench.timed(lambda: view.logits(bench.states).argmax(-1)),
        Work.DRAFT: bench.guess(own),
    }
    return np.stack([np.quantile(taken[kind], _QUANTILES) for kind in Work], axis=1)


class _Bench:
    """A batch of so many rows to time work with."""

    def __init__(self, view: MoEView, rows: int) -> None:
        self.view, self.rows = view, rows
        self._cache = view.new_cache(slots=rows)
        slots = [self._cache.alloc() for _ in range(rows)]
        if isinstance(view, EncoderDecoderView):
            # A prompt of a usual length to attend to.
            source = torch.zeros(_CONTEXT, view.spec.hidden_size, dtype=view.dtype)
            for slot in slots:
                view.attach(self._cache, slot, source.to(view.device))
        # A recurrent state costs the same at every position, and there is none but at the first.
        position = min(_CONTEXT, view.spec.context_length - 1) if view.rewinds else 0
        self._batch = view.batch(self._cache, slots, [range(position, position + 1)] * rows)
        draws = torch.Generator().manual_seed(0)
        ids = torch.randint(view.spec.vocab_size, (rows, 1), generator=draws)
        self._tokens = ids.tolist()
        self._hidden = view.embed(ids.to(view.device), self._batch)
        self.states = self._batch.pack(self._hidden)

    def home(self, own: Own) -> Tensor:
        """All layers, with these experts."""
        view, layers = self.view, self.view.spec.layer_count
        return home_layers(view, 0, layers, self._hidden, self._batch, self._cache, own)

    def guess(self, own: Own) -> FloatArray:
        """A guess of what follows each row; seconds, [n]. What a draft head offers behind a single
        one is guessed in the same pass, as much of it as is usually right."""
        head = self.view.draft_head
        if head is None or self.rows > 1:
            return self.timed(lambda: self._passed(own, self._tokens, self._batch))
        memory, position = head.begin(), self._batch.positions[0][0] - USUAL_DRAFTED
        states = self.view.normed_last(self.states).expand(position, -1).numpy()
        head.read(memory, 0, states, [0] * position)
        slots, positions = self._batch.slots, [range(position, position + 1 + USUAL_DRAFTED)]
        batch = self.view.batch(self._cache, slots, positions)

        def offered() -> None:
            drafted = head.draft(memory, position, 0, USUAL_DRAFTED, likely=0.0)
            self._passed(own, [[0, *drafted]], batch)

        return self.timed(offered) / expected_tokens(head.right, USUAL_DRAFTED)

    def _passed(self, own: Own, tokens: Sequence[Sequence[int]], batch: TokenBatch) -> Tensor:
        """All layers with these experts, and the head."""
        return self.view.logits(home_states(self.view, tokens, batch, self._cache, own)).argmax(-1)

    def dense(self) -> FloatArray:
        """A layer without its experts; seconds, [n]."""
        spec = self.view.spec
        if self._accelerated:
            settled = np.zeros((spec.layer_count, spec.expert_count), dtype=bool)
            return self.timed(lambda: self._routed(settled)) / spec.layer_count
        nothing = Own.of(self.view, torch.zeros_like(held_here(self.view)))
        return self.timed(lambda: self.home(nothing)) / spec.layer_count

    def _routed(self, settled: BoolArray) -> None:
        """All layers up to their routers, and what each adds to every token, as decoding has it
        where a layer's experts are to be decided on."""
        view = self.view
        for layer in range(view.spec.layer_count):
            states, batch = self.states, self._batch
            ran = view.run(layer, layer + 1, states, batch, self._cache, settled)
            assert ran.routing is not None
            view.shared(layer, ran.hidden, normed=ran.routing.normed)

    def expert(self, dense_s: float) -> FloatArray:
        """One expert that is held here, with all rows, less what a call takes; seconds, [n]. A
        layer without experts takes `dense_s`."""
        if self._accelerated and (whole := self._whole_layers()):
            return self._share_of_expert(whole, dense_s)
        places = [
            (layer, expert)
            for layer, experts in enumerate(self.view.loaded)
            for expert in sorted(experts)
        ]
        if not places:
            # Whoever holds none is asked for none.
            return np.array([np.nan])
        each_bytes = float(self.view.spec.expert_bytes.mean())
        wanted = max(_SPREAD, int(_SPREAD_BYTES / each_bytes))
        chosen = places[:: max(1, len(places) // wanted)]
        width = self.view.spec.top_k
        gates = torch.full((self.rows, width), 1.0, device=self.view.device)
        with_it, without = (
            self.timed(lambda which=which: self._experts(chosen, which, gates, width))
            for which in (1, 0)
        )
        worked = (with_it - np.median(without)) / len(chosen)
        return np.maximum(worked, np.median(with_it) * 1e-3 / len(chosen))

    @property
    def _accelerated(self) -> bool:
        """Whether experts run together, so that one by itself says nothing of many."""
        return self.view.device.type != "cpu"

    def _whole_layers(self) -> range:
        """The longest run of layers all of whose experts are here."""
        count, longest, first = self.view.spec.expert_count, range(0), 0
        for layer, experts in enumerate((*self.view.loaded, frozenset[int]())):
            if len(experts) < count:
                longest = max(longest, range(first, layer), key=len)
                first = layer + 1
        return longest

    def _share_of_expert(self, whole: range, dense_s: float) -> FloatArray:
        """What whole layers take beyond their dense part, by expert that runs in them; seconds,
        [n]."""
        view, settled = self.view, held_here(self.view).cpu().numpy()

        def through() -> Segment:
            first, last = whole.start, whole.stop
            return view.run(first, last, self.states, self._batch, self._cache, settled)

        ran = through().experts
        run = sum(np.unique(ran[:, at]).size for at in range(ran.shape[1]))
        taken = self.timed(through)
        return np.maximum(taken - dense_s * len(whole), taken * 1e-3) / run

    def _experts(
        self, chosen: Sequence[tuple[int, int]], used: int, gates: Tensor, width: int
    ) -> None:
        for layer, expert in chosen:
            slots = torch.full((self.rows, width), DROPPED, dtype=torch.int64)
            slots[:, :used] = expert
            self.view.experts(layer, self.states, slots.to(self.view.device), gates)

    def timed(
        self, work: Callable[[], object], *, behind: Callable[[], object] | None = None
    ) -> FloatArray:
        """Seconds of each of some repetitions, the first of which does not count, each `behind`
        something that is not timed, [n]."""
        work()
        taken: list[float] = []
        while len(taken) < FEWEST or (len(taken) < MOST and sum(taken) < WORK_S):
            if behind is not None:
                behind()
            self._settle()
            began_s = time.perf_counter()
            work()
            self._settle()
            taken.append(time.perf_counter() - began_s)
        return np.array(taken)

    def _settle(self) -> None:
        """Wait for what an accelerator still does."""
        if self.view.device.type == "cuda":
            torch.cuda.synchronize(self.view.device)
