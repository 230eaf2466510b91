"""The recording pass: full depth, everything kept that later phases need (Algorithm 1, line 1)."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trimmoe.calibrate.head import Referee, most_likely
from trimmoe.calibrate.mapped import map_file, release
from trimmoe.calibrate.sweep import Sweep, Visit
from trimmoe.calibrate.windows import Windows, run_layer
from trimmoe.calibrate.workers import side_by_side
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.models.base import MoEView
from trimmoe.models.passed import Routing

_PROBE_TOKENS = 1024
"""Tokens on which every layer meets the output head; later ones only where that pays."""

Advance = Callable[[int], None]
"""Told how many steps of a phase have just been done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """What one full-depth pass over T tokens showed. N layers, k activated, d hidden, E experts."""

    windows: Windows
    hidden: Tensor
    """State after each layer, as the view makes it, [N, T, d], mapped from disk."""
    attended: Tensor | None
    """State that each layer's router reads, bfloat16, the same shape and place; None if not
    kept."""
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

    folder: Path | None = None
    """Where the states lie, and those of later sweeps may."""
    maps: tuple[mmap.mmap, ...] = ()
    """What the states are mapped by."""

    def release(self) -> None:
        """Give back the memory that states take; they stay on disk and come back when read."""
        for mapped in self.maps:
            release(mapped)

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
    """Run every window at full depth in one sweep; the hidden states are written to `folder`.

    `importance` is read as in the settings; layers whose states agree with full depth less often
    than `least_agreement` on the first windows are not looked at further. `advance` is told of
    `recording_steps` steps.
    """
    recording = _blank(view, windows, folder, keep_attended)
    sweep = Sweep(view, windows, folder=folder)
    parts = []
    for visit, gram in sweep.results(partial(_record_visit, view, recording, sweep, importance)):
        # In the order of the text, as sums of floats depend on it.
        recording.logit_gram[visit.layer] += gram
        if visit.is_last:
            parts.append(visit.span)
        recording.release()
        advance(visit.span.stop - visit.span.start)
    _compare_all(view, recording, parts, least_agreement, advance)
    return recording


def recording_steps(view: MoEView, windows: Windows) -> int:
    """Of how many steps `record` tells."""
    return 2 * view.spec.layer_count * windows.tokens


def _blank(view: MoEView, windows: Windows, folder: Path, keep_attended: bool) -> Recording:
    spec, tokens = view.spec, windows.tokens
    layers = spec.layer_count
    shape = (layers, tokens, spec.hidden_size)
    kinds = {"hidden": view.dtype} | ({"attended": torch.bfloat16} if keep_attended else {})
    sizes = [kind.itemsize * int(np.prod(shape)) for kind in kinds.values()]
    maps = tuple(_new_file(folder / name, size) for name, size in zip(kinds, sizes, strict=True))
    states = [
        torch.frombuffer(mapped, dtype=kind).view(shape)
        for mapped, kind in zip(maps, kinds.values(), strict=True)
    ]
    return Recording(
        windows=windows,
        hidden=states[0],
        attended=states[1] if keep_attended else None,
        folder=folder,
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


def _new_file(path: Path, size_bytes: int) -> mmap.mmap:
    with path.open("wb+") as opened:
        return map_file(opened, size_bytes)


def _record_visit(
    view: MoEView, recording: Recording, sweep: Sweep, importance: str, visit: Visit
) -> tuple[Visit, np.ndarray]:
    """Fill the recording for some windows in one layer, but for the products of router logits,
    which are returned, [E, E]."""
    layer, span, attended = visit.layer, visit.span, visit.attended
    routing = view.route(layer, attended, groups=visit.groups)
    if recording.attended is not None:
        recording.attended[layer, span] = attended.to(device="cpu", dtype=torch.bfloat16)
    after = run_layer(view, layer, attended, routing, routing.experts)
    recording.hidden[layer, span] = after.to("cpu")
    gram = _keep_routing(recording, layer, span, routing, importance)
    sweep.leave(visit, after)
    if visit.is_last:
        found = most_likely(view, sweep.tail(visit, after))
        recording.predictions[span], recording.log_probability[span] = found
    return visit, gram


def _compare_all(
    view: MoEView,
    recording: Recording,
    parts: Sequence[slice],
    least_agreement: float,
    advance: Advance,
) -> None:
    """Fill in b of (22) and how often it holds; all layers are looked at on the first tokens, and
    those that agree too seldom there no longer on the rest."""
    compared = partial(_compare, view, Referee(view), recording)
    recording.agrees[-1] = True
    seen = np.zeros((2, view.spec.layer_count), dtype=np.int64)
    probes = sum(span.start < _PROBE_TOKENS for span in parts)
    for some in (parts[:probes], parts[probes:]):
        for span, counts in zip(some, side_by_side(view, compared, some), strict=True):
            seen += counts
            recording.release()
            advance(view.spec.layer_count * (span.stop - span.start))
        if some and some[-1].stop >= _PROBE_TOKENS:
            recording.may_exit[:-1] &= seen[0, :-1] >= least_agreement * seen[1, :-1]
    recording.agreement[:] = seen[0] / seen[1]


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


def _keep_routing(
    recording: Recording, layer: int, span: slice, routing: Routing, importance: str
) -> np.ndarray:
    """Fill in what the router said of some tokens; the products of its centred logits, [E, E]."""
    masses = routing.probabilities.gather(1, routing.experts)
    mass = routing.gates if importance == "gates" else masses
    centred = routing.logits - routing.logits.mean(dim=1, keepdim=True)
    recording.activated[layer, span] = routing.experts.cpu().numpy()
    recording.masses[layer, span] = masses.cpu().numpy()
    recording.importance[layer, span] = mass.sum(dim=1).clamp(0.0, 1.0).cpu().numpy()
    return (centred.T @ centred).double().cpu().numpy()
