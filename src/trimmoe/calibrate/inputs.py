"""What experts read in the recorded text: copies in few bits are fitted to it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimmoe.calibrate.record import Advance, Recording
from trimmoe.calibrate.workers import side_by_side
from trimmoe.models.base import MoEView
from trimmoe.models.passed import Routing

_TINY = 1e-30


def measures_inputs(view: MoEView, recording: Recording) -> bool:
    """Whether it is known what they read, and that is as wide as states."""
    return recording.attended is not None and view.widths.part == view.spec.hidden_size


@torch.inference_mode()
def input_squares(view: MoEView, recording: Recording, advance: Advance) -> NDArray[np.float32]:
    """Mean squares of what the experts of each layer read, [N, d]; a token counts by the squares of
    its gates, as its experts' errors do. `advance` is told of each layer."""
    spec = view.spec
    found = np.zeros((spec.layer_count, spec.hidden_size), dtype=np.float32)

    def of_layer(layer: int) -> None:
        routing = routed(view, recording, layer)[1]
        weight = routing.gates.float().square().sum(1)
        squares = weight @ routing.normed.float().square()
        found[layer] = (squares / weight.sum().clamp(min=_TINY)).cpu().numpy()

    for _ in side_by_side(view, of_layer, range(spec.layer_count)):
        recording.release()
        advance(1)
    return found


def routed(view: MoEView, recording: Recording, layer: int) -> tuple[Tensor, Routing]:
    """What the layer's router reads of each token, [T, d], and makes of it."""
    assert recording.attended is not None
    attended = recording.attended[layer].to(device=view.device, dtype=view.dtype)
    groups = torch.arange(len(attended), device=view.device) // recording.windows.length
    return attended, view.route(layer, attended, groups=groups)
