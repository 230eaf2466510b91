"""The part of a router's softmax that a trace without it leaves open."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trimmoe.core.specs import IntArray

_JUST_BELOW = 0.999


def complete_probabilities(
    rng: np.random.Generator,
    experts: IntArray,
    masses: NDArray[np.float32],
    expert_count: int,
) -> NDArray[np.float16]:
    """A softmax over all experts that agrees with the activated set and its masses, [T, N, E].

    `experts`, `masses` [T, N, k]. What the activated set leaves is spread over the others by a
    uniform Dirichlet draw, but none becomes as probable as the least of the set: where there is
    more to spread than that allows, the sum stays below one.
    """
    tokens, layers, _ = experts.shape
    spread = rng.standard_exponential((tokens, layers, expert_count))
    np.put_along_axis(spread, experts, 0.0, axis=2)
    spread /= np.maximum(spread.sum(2, keepdims=True), 1e-12)
    left = np.clip(1.0 - masses.sum(2, keepdims=True), 0.0, 1.0)
    # Rounded first, so that the order survives the rounding.
    least = masses.astype(np.float16).min(2, keepdims=True)
    whole = np.minimum(spread * left, least * _JUST_BELOW).astype(np.float16)
    whole = np.minimum(whole, np.nextafter(least, np.float16(0)))
    np.put_along_axis(whole, experts, masses.astype(np.float16), axis=2)
    return whole
