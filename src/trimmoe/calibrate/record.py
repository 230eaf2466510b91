"""The recording pass: full depth, everything kept that later phases need (Algorithm 1, line 1)."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trimmoe.calibrate.head import Referee, most_likely
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.models.base import EncoderDecoderView, MoEView, Routing, TokenBatch
from trimmoe.models.cache import KVCache

_ROWS = 1024
"""Tokens of one step; windows are batched up to this."""
_PROBE_TOKENS = 1024
"""Tokens on which every layer meets the output head; later ones only where that pays."""

Advance = Callable[[int], None]
"""Told how many tokens, what-ifs or layers have just been done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """Independent sequences of equal length; token t is ids[t // length, t % length]."""

    ids: IntArray
    """Token ids that the (decoder's) layers see, [W, length]."""
    sources: IntArray | None = None
    """The encoder's inputs where there is an encoder, [W, source length]."""

    @property
    def count(self) -> int:
        return self.ids.shape[0]

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    @property
    def tokens(self) -> int:
        return self.ids.size

    def part(self, first: int, last: int) -> Windows:
        """Windows first to last, the last one excluded."""
        return self.take(np.arange(self.count)[first:last])

    def take(self, index: IntArray) -> Windows:
        """The windows of these indices."""
        sources = None if self.sources is None else self.sources[index]
        return Windows(ids=self.ids[index], sources=sources)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """What one full-depth pass over T tokens showed. N layers, k activated, d hidden, E experts."""

    windows: Windows
    hidden: Tensor
    """State after each layer, bfloat16 [N, T, d], mapped from disk."""
    attended: Tensor | None
    """State that each layer's router reads, the same shape and place; None if not kept."""
    activated: IntArray
    """Activated sets, most probable expert first, [N, T, k]."""
    masses: np.ndarray
    """Softmax mass of each activated expert, float32 [N, T, k]."""
    importance: np.ndarray
    """I of (4) as the settings read it, float32 [N, T]."""
    predictions: IntArray
    """o*: argmax of the full-depth logits, [T]."""
    log_probability: np.ndarray
    """Of o* at full depth, float32 [T]."""
    agrees: np.ndarray
    """b of (22): the output head on the layer's state predicts o*, bool [N, T]; all true in the
    last row, because leaving after the last layer is full depth. Layers that rarely agree are
    only looked at on the first windows and count as disagreeing on the rest, which never flatters
    an exit."""
    agreement: FloatArray
    """Share of the tokens looked at that agree, [N]."""
    may_exit: BoolArray
    """Layers looked at on all tokens, [N]."""
    logit_gram: np.ndarray
    """Z^T Z of the router logits Z centred per token, float64 [N, E, E]."""

    maps: tuple[mmap.mmap, ...] = ()
    """What the states are mapped by."""

    def release(self) -> None:
        """Give back the memory that states take; they stay on disk and come back when read."""
        for mapped in self.maps:
            if hasattr(mmap, "MADV_DONTNEED"):
                mapped.madvise(mmap.MADV_DONTNEED)

    @property
    def token_count(self) -> int:
        return self.windows.tokens

    @property
    def layer_count(self) -> int:
        return self.activated.shape[0]


@torch.inference_mode()
def record(
    view: MoEView,
    windows: Windows,
    *,
    importance: str,
    least_agreement: float,
    keep_attended: bool,
    folder: Path,
    advance: Advance,
) -> Recording:
    """Run every window at full depth; the hidden states are written to `folder` as they come.

    `importance` is read as in the settings; layers whose states agree with full depth less often
    than `least_agreement` on the first windows are not looked at further.
    """
    recording = _blank(view, windows, folder, keep_attended)
    referee = Referee(view)
    rows = max(1, _ROWS // windows.length)
    seen = np.zeros((2, view.spec.layer_count), dtype=np.int64)
    for first in range(0, windows.count, rows):
        part = windows.part(first, first + rows)
        span = slice(first * windows.length, first * windows.length + part.tokens)
        _record_batch(view, recording, span, part, importance)
        seen += _compare(view, referee, recording, span)
        if span.start < _PROBE_TOKENS <= span.stop:
            recording.may_exit[:-1] &= seen[0, :-1] >= least_agreement * seen[1, :-1]
        recording.release()
        advance(part.tokens)
    recording.agreement[:] = seen[0] / seen[1]
    return recording


def _blank(view: MoEView, windows: Windows, folder: Path, keep_attended: bool) -> Recording:
    spec, tokens = view.spec, windows.tokens
    layers = spec.layer_count
    shape = (layers, tokens, spec.hidden_size)
    names = ("hidden.bf16", "attended.bf16") if keep_attended else ("hidden.bf16",)
    maps = tuple(_mapped(folder / name, 2 * int(np.prod(shape))) for name in names)
    states = [torch.frombuffer(mapped, dtype=torch.bfloat16).view(shape) for mapped in maps]
    return Recording(
        windows=windows,
        hidden=states[0],
        attended=states[1] if keep_attended else None,
        maps=maps,
        activated=np.zeros((layers, tokens, spec.top_k), dtype=np.int64),
        masses=np.zeros((layers, tokens, spec.top_k), dtype=np.float32),
        importance=np.zeros((layers, tokens), dtype=np.float32),
        predictions=np.zeros(tokens, dtype=np.int64),
        log_probability=np.zeros(tokens, dtype=np.float32),
        agrees=np.zeros((layers, tokens), dtype=bool),
        agreement=np.zeros(layers),
        may_exit=np.ones(layers, dtype=bool),
        logit_gram=np.zeros((layers, spec.expert_count, spec.expert_count)),
    )


def _mapped(path: Path, size_bytes: int) -> mmap.mmap:
    with path.open("wb+") as opened:
        opened.truncate(size_bytes)
        return mmap.mmap(opened.fileno(), size_bytes)


def open_windows(view: MoEView, windows: Windows) -> tuple[KVCache, TokenBatch, Tensor]:
    """A fresh cache, a batch of whole windows from position 0, and their embeddings."""
    cache = view.new_cache(slots=windows.count)
    slots = [cache.alloc() for _ in range(windows.count)]
    if windows.sources is not None:
        assert isinstance(view, EncoderDecoderView)
        for slot, states in zip(slots, view.encode(windows.sources.tolist()), strict=True):
            view.attach(cache, slot, states)
    batch = view.batch(cache, slots, [range(windows.length)] * windows.count)
    return cache, batch, view.embed(torch.from_numpy(windows.ids).to(view.device), batch)


def _record_batch(
    view: MoEView, recording: Recording, span: slice, windows: Windows, importance: str
) -> None:
    """Fill the recording for one batch of windows, whose tokens are `span`."""
    cache, batch, hidden = open_windows(view, windows)
    groups = batch.groups
    for layer in range(view.spec.layer_count):
        flat = batch.pack(view.attend(layer, hidden, batch, cache))
        routing = view.route(layer, flat, groups=groups)
        if recording.attended is not None:
            recording.attended[layer, span] = flat.to(device="cpu", dtype=torch.bfloat16)
        flat = run_layer(view, layer, flat, routing, routing.experts)
        recording.hidden[layer, span] = flat.to(device="cpu", dtype=torch.bfloat16)
        _keep_routing(recording, layer, span, routing, importance)
        hidden = batch.unpack(flat)
    last = batch.pack(view.tail(hidden, batch, cache))
    recording.predictions[span], recording.log_probability[span] = most_likely(view, last)
    recording.agrees[-1, span] = True


def _compare(view: MoEView, referee: Referee, recording: Recording, span: slice) -> IntArray:
    """Fill in b of (22); returns how many tokens agreed and were looked at, [2, N]."""
    counts = np.zeros((2, view.spec.layer_count), dtype=np.int64)
    counts[:, -1] = span.stop - span.start
    # What one layer predicts is a good guess of what the next one does.
    rivals = recording.predictions[span].copy()
    for layer in np.flatnonzero(recording.may_exit[:-1]):
        state = recording.hidden[layer, span].to(device=view.device, dtype=view.dtype)
        agrees = referee.agrees(state, recording.predictions[span], rivals)
        recording.agrees[layer, span] = agrees
        counts[:, layer] = agrees.sum(), agrees.size
    return counts


def run_layer(
    view: MoEView, layer: int, attended: Tensor, routing: Routing, experts: Tensor
) -> Tensor:
    """Shared and routed experts of one layer, [n, d] to [n, d].

    `experts` [n, k] may differ from the routing's own; the gates stay the routing's.
    """
    shared = view.shared(layer, attended, normed=routing.normed)
    routed = view.experts(layer, attended, experts, routing.gates, normed=routing.normed)
    return view.finish(layer, attended, shared, routed)


def _keep_routing(
    recording: Recording, layer: int, span: slice, routing: Routing, importance: str
) -> None:
    masses = routing.probabilities.gather(1, routing.experts)
    mass = routing.gates if importance == "gates" else masses
    centred = routing.logits - routing.logits.mean(dim=1, keepdim=True)
    recording.activated[layer, span] = routing.experts.cpu().numpy()
    recording.masses[layer, span] = masses.cpu().numpy()
    recording.importance[layer, span] = mass.sum(dim=1).clamp(0.0, 1.0).cpu().numpy()
    recording.logit_gram[layer] += (centred.T @ centred).double().cpu().numpy()
