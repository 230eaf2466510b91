"""Which experts a router chooses, with which gates.

Shapes: n rows, E experts of which k are activated. Buffers are `wide`.
"""

from __future__ import annotations

import numpy as np

from trimmoe.models.compiled.apart import apart
from trimmoe.models.compiled.attending import biased, times
from trimmoe.models.compiled.attention import (
    F2,
    I1,
    I2,
    SHAPE,
    address,
    floats,
    jit,
    norm,
    weigh,
)
from trimmoe.models.compiled.columns import CORRECTION, ROUTER, ROUTER_BIAS, ROUTER_NORM, SCALES
from trimmoe.models.compiled.kinds import SCORES_SIGMOID
from trimmoe.models.compiled.lane_functions import exp_lanes
from trimmoe.models.compiled.lanes import LANES


@jit
def asked(shape, block, hidden, normed):
    """What a router reads: a norm of its own of hidden [n, wide(d)], or what experts read."""
    if block[ROUTER_NORM] == 0:
        return normed
    own = np.zeros_like(normed)
    norm(hidden, block[ROUTER_NORM], shape.hidden, shape.epsilon, own)
    return own


@apart(SHAPE, I1, F2, F2, F2, I2, F2)
def route(shape, block, normed, logits, probabilities, experts, gates):
    """Router: logits and each expert's share of all scores [n, wide(E)], the k experts chosen
    [n, k], that of most score first, with their gates."""
    count = normed.shape[0]
    times(shape, block, ROUTER, normed, count, logits)
    biased(logits, block[ROUTER_BIAS], shape.experts)
    for r in range(count):
        for e in range(shape.experts):
            probabilities[r, e] = logits[r, e]
    if shape.scores == SCORES_SIGMOID:
        _sigmoid(probabilities, shape.experts)
    else:
        weigh(probabilities, shape.experts, np.zeros(LANES, dtype=np.float32))
    for r in range(count):
        for e in range(shape.experts, probabilities.shape[1]):
            probabilities[r, e] = 0.0
        if shape.best_of_group > 0 or block[CORRECTION] != 0:
            _corrected(shape, block[CORRECTION], probabilities[r], experts[r])
        else:
            _most_probable(probabilities[r], shape.experts, experts[r])
        total = np.float32(0.0)
        for j in range(shape.top_k):
            gates[r, j] = probabilities[r, experts[r, j]]
            total += gates[r, j]
        if shape.renormalise:
            for j in range(shape.top_k):
                gates[r, j] /= total + np.float32(1e-20)
        if shape.gate_scale != 1.0:
            for j in range(shape.top_k):
                gates[r, j] *= np.float32(shape.gate_scale)
        if block[SCALES] != 0:
            scales = floats(block[SCALES], shape.experts)
            for j in range(shape.top_k):
                gates[r, j] *= scales[experts[r, j]]
        if shape.scores == SCORES_SIGMOID:
            _shares(probabilities[r], shape.experts)


@jit
def _sigmoid(x, size):
    """1 / (1 + exp(-x)) of the first `size` of each row of x [n, wide], in place."""
    for r in range(x.shape[0]):
        for e in range(size):
            x[r, e] = -x[r, e]
        at = address(x) + r * x.shape[1] * 4
        exp_lanes(at, at, (size + LANES - 1) // LANES)
        for e in range(size):
            x[r, e] = np.float32(1.0) / (np.float32(1.0) + x[r, e])


@jit
def _shares(scores, size):
    """Scores [wide] over their sum, in place."""
    total = np.float32(0.0)
    for e in range(size):
        total += scores[e]
    factor = np.float32(1.0) / max(total, np.float32(1e-20))
    for e in range(size):
        scores[e] *= factor


@jit
def _most_probable(probabilities, size, experts):
    """The largest of the first `size`, as many as `experts` [k] has room for, the first of equal
    ones first."""
    for j in range(experts.shape[0]):
        best = -1
        for e in range(size):
            taken = False
            for i in range(j):
                taken = taken or experts[i] == e
            if not taken and (best < 0 or probabilities[e] > probabilities[best]):
                best = e
        experts[j] = best


@jit
def _corrected(shape, correction, scores, experts):
    """The experts of most score [wide(E)] with its `correction`, an address or 0, of those groups
    whose best have most; by score without it, most first."""
    wanted = np.empty(shape.experts, dtype=np.float32)
    for e in range(shape.experts):
        wanted[e] = scores[e]
    if correction != 0:
        more = floats(correction, shape.experts)
        for e in range(shape.experts):
            wanted[e] += more[e]
    if shape.best_of_group > 0 and shape.kept_groups < shape.groups:
        _best_groups(shape, wanted)
    _most_probable(wanted, shape.experts, experts)
    for j in range(1, experts.shape[0]):
        one, i = experts[j], j
        while i > 0 and scores[experts[i - 1]] < scores[one]:
            experts[i] = experts[i - 1]
            i -= 1
        experts[i] = one


@jit
def _best_groups(shape, wanted):
    """Rule out, in place, the experts of all groups but those whose best ones have most."""
    size = shape.experts // shape.groups
    sums = np.zeros(shape.groups, dtype=np.float32)
    best = np.empty(shape.best_of_group, dtype=np.int64)
    for g in range(shape.groups):
        _most_probable(wanted[g * size : (g + 1) * size], size, best)
        for i in range(shape.best_of_group):
            sums[g] += wanted[g * size + best[i]]
    kept = np.empty(shape.kept_groups, dtype=np.int64)
    _most_probable(sums, shape.groups, kept)
    for g in range(shape.groups):
        is_kept = False
        for i in range(shape.kept_groups):
            is_kept = is_kept or kept[i] == g
        if not is_kept:
            for e in range(g * size, (g + 1) * size):
                wanted[e] = -np.inf
