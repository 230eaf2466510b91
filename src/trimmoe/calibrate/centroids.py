"""The token-similarity reference set (eq. 36): directions of hidden states and where their tokens
exit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.cluster import KMeans
from torch import Tensor

from trimmoe.core.specs import FloatArray, IntArray
from trimmoe.models.exit_head import nearest_centroid, rms_direction

_FIT_TOKENS = 4096
_ASSIGN_ROWS = 4096


def fit_centroids(
    hidden: Tensor, exit_layer: IntArray, count: int, layers: int, seed: int
) -> tuple[np.ndarray, FloatArray, IntArray]:
    """One layer's centroids, unit rows float32 [C, d], average exit layers [C], and the centroid
    nearest to each token [T].

    `hidden` [T, d] after the layer, `exit_layer` [T] in 1..N. A centroid that no token is nearest
    to predicts full depth, as do repeated rows that fill up where there are few tokens.
    """
    tokens = hidden.shape[0]
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.choice(tokens, size=min(tokens, _FIT_TOKENS), replace=False))
    directions = _unit(hidden[torch.from_numpy(chosen)]).numpy()
    # scikit-learn's annotations of both of these are wrong.
    # Careful starts take most of the time and gain nothing: directions are not in clear clusters.
    options: Any = {"n_init": 1, "init": "random", "max_iter": 10}
    fitted: Any = KMeans(n_clusters=min(count, chosen.size), random_state=seed, **options).fit(
        directions
    )
    centroids = torch.from_numpy(fitted.cluster_centers_.astype(np.float32))
    # A row of zeros has no direction; tokens that cancel out exactly do not occur in practice.
    centroids = torch.nn.functional.normalize(centroids, dim=1)
    centroids = torch.cat([centroids, centroids[:1].expand(count - len(centroids), -1)])
    nearest = torch.cat(
        [nearest_centroid(block, centroids) for block in hidden.split(_ASSIGN_ROWS)]
    ).numpy()
    members = np.bincount(nearest, minlength=count)
    total = np.bincount(nearest, weights=exit_layer, minlength=count)
    mean = np.where(members > 0, total / np.maximum(members, 1), float(layers))
    return centroids.numpy(), mean, nearest


def _unit(hidden: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rms_direction(hidden), dim=1)
