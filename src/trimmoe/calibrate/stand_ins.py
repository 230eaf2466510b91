"""What stands in for an expert on a server that guesses without it: a linear map of low rank.

What an expert gives for what it reads is anything but linear, but a good part of it can be had from
a map of a few directions, and that much less is at hand on every server. The maps are fitted on the
recorded states of full depth, each on the tokens that activate its expert, weighted by their gates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trimmoe.calibrate.inputs import routed
from trimmoe.calibrate.products import gram
from trimmoe.calibrate.record import Advance, Recording
from trimmoe.calibrate.settings import CalibrationSettings
from trimmoe.calibrate.workers import side_by_side
from trimmoe.models.base import MoEView
from trimmoe.models.passed import Routing

_RIDGE = 1e-3
"""Penalty, as a share of the mean variance of what is read."""
_HELD_OUT_EVERY = 4
"""Every fourth window is not fitted on: it says how much of a map to trust."""
_COLUMNS = 256
"""Most directions of a layer's experts together."""
_SPARE, _TURNS = 8, 6
"""Directions followed beside those wanted, and how often, until the strongest stand out."""
_ROWS = 4096
"""Tokens that an expert runs at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StandIns:
    """The fields of a Profile of the same names."""

    stand_in_read: np.ndarray
    """float16 [N, d, E, r]."""
    stand_in_give: np.ndarray
    """float16 [N, E, r, d]."""


def rank_of(view: MoEView, settings: CalibrationSettings) -> int:
    """Directions of each stand-in; 0 for none, as where experts read something narrower than
    states."""
    if view.widths.part != view.spec.hidden_size:
        return 0
    most = max(1, _COLUMNS // view.spec.expert_count)
    return min(settings.stand_in_rank, most, view.spec.hidden_size)


@torch.inference_mode()
def fit_stand_ins(
    view: MoEView, recording: Recording, settings: CalibrationSettings, advance: Advance
) -> StandIns:
    """A map for every expert of every layer; `advance` is told of each layer."""
    spec, rank = view.spec, rank_of(view, settings)
    shape = (spec.layer_count, spec.expert_count, rank, spec.hidden_size)
    read, give = np.zeros(shape, dtype=np.float16), np.zeros(shape, dtype=np.float16)

    def fitted(layer: int) -> None:
        attended, routing = routed(view, recording, layer)
        for expert in range(spec.expert_count):
            found = _of_expert(view, recording, (layer, expert), attended, routing, rank)
            read[layer, expert], give[layer, expert] = (part.cpu().numpy() for part in found)

    for _ in side_by_side(view, fitted, range(spec.layer_count)):
        recording.release()
        advance(1)
    view.let_go()
    return StandIns(
        stand_in_read=read.transpose(0, 3, 1, 2).copy(),
        stand_in_give=give,
    )


def _of_expert(
    view: MoEView,
    recording: Recording,
    which: tuple[int, int],
    attended: Tensor,
    routing: Routing,
    rank: int,
) -> tuple[Tensor, Tensor]:
    """One expert's map, [r, d] each; zeros where no token says anything."""
    rows, slots = torch.nonzero(routing.experts == which[1], as_tuple=True)
    gates = routing.gates[rows, slots].float().unsqueeze(1)
    read, given = routing.normed[rows].float(), torch.zeros(attended[rows].shape).to(gates)
    for some in torch.arange(len(rows), device=view.device).split(_ROWS):
        if len(some):
            given[some] = _alone(view, which, attended[rows[some]], routing.normed[rows[some]])
    unseen = rows // recording.windows.length % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1
    return linear_map(gates * read, gates * given, unseen, rank)


def _alone(view: MoEView, which: tuple[int, int], attended: Tensor, normed: Tensor) -> Tensor:
    """What one expert gives for some tokens, float32 [n, d]."""
    layer, expert = which
    slot = torch.full((len(attended), 1), expert, device=view.device)
    whole = torch.ones(slot.shape, device=view.device)
    return view.experts(layer, attended, slot, whole, normed=normed).float()


def linear_map(read: Tensor, output: Tensor, unseen: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """How n outputs [n, d] follow from what was read [n, d]: `read @ first.T @ second` comes near
    them, both [r, d].

    It is fitted on what is not `unseen`, bool [n], and made as much smaller as fits those best, so
    that a map of tokens too few to tell gives next to nothing.
    """
    a, b = read[~unseen], output[~unseen]
    nothing = read.new_zeros(rank, read.shape[1])
    if not len(a) or not unseen.any():
        return nothing, nothing
    products = gram(a)
    penalty = _RIDGE * float(products.diagonal().mean()) + torch.finfo(products.dtype).tiny
    ridge = penalty * torch.eye(len(products), device=products.device)
    factor = torch.linalg.cholesky_ex(products + ridge)
    if factor.info:
        return nothing, nothing
    whole = torch.cholesky_solve(a.T @ b, factor.L)
    # Of as many directions as there are rows; products of what is fitted are those of its rows.
    second = _main_directions(whole.T @ products @ whole, min(rank, len(a)))
    second = torch.cat([second, second.new_zeros(rank - len(second), second.shape[1])])
    first = whole @ second.T
    guessed = read[unseen] @ first @ second
    square = float(guessed.square().sum())
    share = float((guessed * output[unseen]).sum()) / square if square else 0.0
    return _balanced(first.T * min(max(share, 0.0), 1.0), second)


def _main_directions(products: Tensor, rank: int) -> Tensor:
    """Orthonormal directions [r, d] that most of some rows lies in, whose inner `products` are
    [d, d]."""
    width = products.shape[1]
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(width, min(rank + _SPARE, width), generator=generator)
    basis = torch.linalg.qr(start.to(products)).Q
    for _ in range(_TURNS):
        basis = torch.linalg.qr(products @ basis).Q
    within = torch.linalg.eigh(basis.T @ products @ basis).eigenvectors
    return within.flip(1)[:, :rank].T @ basis.T


def _balanced(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The same product of parts of one size, which half precision holds best."""
    size = float(first.norm() / second.norm()) if second.any() else 0.0
    if size == 0.0:
        return torch.zeros_like(first), torch.zeros_like(second)
    return first / size**0.5, second * size**0.5
