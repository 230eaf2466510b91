"""Hosts for tokens that never leave their user's server: copies stand in for what it lacks.

Some server holds every expert, so that exact execution stays possible. What memory is left holds,
on every server, the layers in which copies lose most, which are mostly the first: a budget is
then spent where it buys most.

Shapes: M servers, N layers, E experts.
"""

from __future__ import annotations

import numpy as np

from trimmoe.core.profile import Profile
from trimmoe.core.specs import BoolArray, FloatArray, IntArray, ModelSpec


def home_hosts(model: ModelSpec, capacity: IntArray, loss: FloatArray) -> BoolArray | None:
    """Who holds what, [M, N, E]; None where this order packs no copy of every expert.

    `capacity` [M]: bytes; `loss` [N]: what it loses that copies stand in for a layer's experts.
    Layers stay whole where they fit, since nothing has to be decided in those.
    """
    sizes = model.expert_bytes
    hosts = np.zeros((capacity.size, *sizes.shape), dtype=bool)
    left = capacity.astype(np.int64).copy()
    order = np.argsort(-loss / sizes.sum(axis=1), kind="stable").tolist()
    for layer in order:
        for experts in _parts(sizes[layer], int(left.max())):
            server, size = int(left.argmax()), int(sizes[layer, experts].sum())
            if size > left[server]:
                return None
            hosts[server, layer, experts] = True
            left[server] -= size
    for layer in order:
        for server, held in enumerate(hosts[:, layer]):
            for expert in np.flatnonzero(~held).tolist():
                if sizes[layer, expert] <= left[server]:
                    held[expert] = True
                    left[server] -= sizes[layer, expert]
    return hosts


def _parts(sizes: IntArray, room: int) -> list[list[int]]:
    """A layer's experts together if there is room for them, else one by one."""
    experts = list(range(sizes.size))
    return [experts] if sizes.sum() <= room else [[expert] for expert in experts]


def copy_losses(profile: Profile) -> FloatArray | None:
    """What it loses that copies of the most bits stand in for a layer's experts, [N]; None where
    that was not measured."""
    if not profile.rungs:
        return None
    best = max(profile.rungs, key=lambda rung: rung.bits)
    return (profile.class_share * best.curves.upper.mean(axis=2)).sum(axis=1)
