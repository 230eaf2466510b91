"""What the engine is told of a layer that ran: routers, steadiness, exit heads."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trimmoe.core.events import Executed, Routed
from trimmoe.core.profile import Profile
from trimmoe.core.specs import FloatArray, IntArray
from trimmoe.models.exit_head import (
    HeadInput,
    confidence,
    nearest_centroid,
    steadiness,
    steadiness_class,
)
from trimmoe.models.passed import Routing


class Observer:
    """The profile's heads on one device."""

    def __init__(self, profile: Profile, device: torch.device) -> None:
        self._exit_weight = torch.from_numpy(profile.exit_weight).to(device)
        self._exit_bias = torch.from_numpy(profile.exit_bias).to(device)
        self._steady_weight = torch.from_numpy(profile.steady_weight).to(device)
        self._steady_bias = torch.from_numpy(profile.steady_bias).to(device)
        self._steady_edges = torch.from_numpy(profile.steady_edges).to(device)
        self._centroids = torch.from_numpy(profile.centroids).to(device)
        self._centroid_exit = np.rint(profile.centroid_exit_layer).astype(np.int64)
        self._reads: HeadInput = profile.header.settings.get("exit_heads", "direction")
        self._importance = profile.header.settings.get("importance", "softmax_mass")

    def routed(self, wave: int, layer: int, attended: Tensor, routing: Routing) -> Routed:
        """After attention (`attended` [n, d]) and router."""
        masses = routing.probabilities.gather(1, routing.experts)
        weights = routing.gates if self._importance == "gates" else masses
        return Routed(
            wave=wave,
            experts=routing.experts.cpu().numpy(),
            masses=_doubles(masses),
            importance=np.minimum(_doubles(weights).sum(1), 1.0),
            steadiness=self.steadiness(layer, attended),
            probabilities=_doubles(routing.probabilities),
        )

    def steadiness(self, layer: int, attended: Tensor) -> IntArray:
        """Steadiness class of each state that the router read, [n]."""
        scores = steadiness(attended, self._steady_weight[layer], self._steady_bias[layer])
        return steadiness_class(scores, self._steady_edges[layer]).cpu().numpy()

    def executed(self, wave: int, layer: int, output: Tensor) -> Executed:
        """After the experts gave the layer's `output` [n, d]."""
        head = self._exit_weight[layer], self._exit_bias[layer]
        scores = confidence(output, *head, self._reads)
        nearest = nearest_centroid(output, self._centroids[layer])
        return Executed(
            wave=wave,
            confidence=_doubles(scores),
            exit_at=self._centroid_exit[layer][nearest.cpu().numpy()],
        )


def _doubles(tensor: Tensor) -> FloatArray:
    return tensor.double().cpu().numpy()
