"""Copies in few bits of experts that a server does not hold, to guess with and to stand in.

A copy in eight bits leaves nearly all guesses as they are, one in four bits most, one in two bits
most of those. What is activated often gets one first, and more bits when all have so many. Where a
token's way has layers on a server, its copies stand in for experts that it lacks there: they come
before others, in as many bits as fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimmoe.core.precision import bits_in_groups
from trimmoe.core.specs import BoolArray, FloatArray, IntArray, ModelSpec
from trimmoe.core.stand_ins import ASCENDING, RUNGS


def allowance_bytes(model: ModelSpec, share: float) -> int:
    """Memory for copies on each server: a share of what all experts take as they are served."""
    return int(share * model.total_expert_bytes)


def reserved_bytes(capacity: IntArray, model: ModelSpec, allowance: int) -> IntArray:
    """What of the memory for experts [M] is kept for copies: the allowance where there is room for
    it, but no more than half of what one copy of every expert leaves, [M]."""
    whole = int(capacity.sum())
    left = max(whole - model.total_expert_bytes, 0)
    return np.minimum(allowance, capacity * (left / max(2 * whole, 1))).astype(np.int64)


def copied_bits(
    model: ModelSpec,
    hosts: BoolArray,
    frequency: FloatArray,
    allowed: IntArray,
    passing: BoolArray | None = None,
    rungs: Sequence[int] = ASCENDING,
) -> IntArray:
    """Bits of every server's copies, 0 where it has none, [M, N, E].

    `hosts` [M, N, E]; `frequency` [N, E]: how often each expert is activated; `allowed` [M]: bytes;
    `passing` [M, N]: whether any route has a layer on a server, where copies stand in for experts,
    in as many bits as there are, before others are had to guess with; None: nowhere; `rungs`:
    numbers of bits, ascending, that copies may have.
    """
    order = np.argsort(-frequency, axis=None, kind="stable")
    places = [divmod(int(at), frequency.shape[1]) for at in order]
    found = np.zeros(hosts.shape, dtype=np.int64)
    for server, bits in enumerate(found):
        missing = [where for where in places if not hosts[(server, *where)]]
        room = _Room(model=model, bits=bits, left=int(allowed[server]))
        if passing is not None:
            needed = [where for where in missing if passing[server, where[0]]]
            for rung in rungs:
                room.raise_to(rung, needed)
        for rung in rungs:
            room.raise_to(rung, missing)
    return found


@dataclass(kw_only=True, slots=True)
class _Room:
    """What is left on a server for copies."""

    model: ModelSpec
    bits: IntArray
    """Of its copies so far, [N, E]."""
    left: int
    """Bytes."""

    def raise_to(self, rung: int, places: Sequence[tuple[int, int]]) -> None:
        """Give experts, in order, copies in so many bits, if theirs have fewer and it fits."""
        weights = _parameters(self.model)
        sizes = {bits: copy_bytes(weights, bits) for bits in RUNGS}
        for where in places:
            before = int(self.bits[where])
            taken = int(sizes[before][where]) if before else 0
            more = int(sizes[rung][where]) - taken
            if before < rung and more <= self.left:
                self.bits[where], self.left = rung, self.left - more


def passed_by(routes: IntArray, servers: int) -> BoolArray:
    """Whether any of the routes [R, N] has a layer on a server, [M, N]."""
    found = np.zeros((servers, routes.shape[1]), dtype=bool)
    found[routes, np.arange(routes.shape[1])] = True
    return found


def standing_in(model: ModelSpec, allowed: IntArray, rungs: Sequence[int] = ASCENDING) -> IntArray:
    """The most bits, of those of `rungs`, of which a server that has `allowed` [M] bytes for copies
    has one of every expert that it lacks in the layers it runs, as far as can be told before it is
    known which these are: a quarter of all experts; 0 where that many do not fit, [M]."""
    found = np.zeros(allowed.shape, dtype=np.int64)
    for bits in rungs:
        needed = float(copy_bytes(_parameters(model), bits).sum()) / 4
        found = np.where(needed <= allowed, bits, found)
    return found


def copy_bytes(weights: FloatArray, bits: int) -> IntArray:
    """What so many weights take in few bits."""
    return np.rint(weights * bits_in_groups(bits) / 8).astype(np.int64)


def copies_bytes(model: ModelSpec, bits: IntArray) -> IntArray:
    """What every server's copies take, [M], of bits [M, N, E]."""
    sizes = [np.where(bits == rung, copy_bytes(_parameters(model), rung), 0) for rung in RUNGS]
    return np.sum(sizes, axis=(0, 2, 3)).astype(np.int64)


def _parameters(model: ModelSpec) -> FloatArray:
    return model.expert_flops / 2
