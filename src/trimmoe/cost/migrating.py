"""What exact execution costs on average where tokens move to what they activate.

Under `migrate` accounting where a token is follows from what it activated before, so that places
and activated sets are followed together through the layers. Shapes: M servers, N layers, E
experts, P patterns, k slots.
"""

from __future__ import annotations

import numpy as np

from trimmoe.core.profile import Profile
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.cost import kernels
from trimmoe.cost.lookahead import first_expert_first
from trimmoe.cost.model import CostModel


def migrating_reference_s(
    cost: CostModel, hosts: BoolArray, profile: Profile, access_share: FloatArray
) -> float:
    """d_ref under `migrate`: the mean per-layer delay of exact execution that always takes the
    fastest way, seconds.

    Tokens start at their access servers and go from pattern to pattern as the profile's do.
    `hosts` [M, N, E].
    """
    here = access_share[:, None] * profile.pattern_share[0]
    total_s = 0.0
    for layer in range(cost.layer_count):
        delay_s, to = fastest_moves(cost, hosts, profile, layer)
        met = here > 0
        total_s += float(here[met] @ delay_s[met])
        if layer < cost.layer_count - 1:
            here = _moved(here, to) @ profile.pattern_transitions[layer]
    return total_s / cost.layer_count


def fastest_moves(
    cost: CostModel, hosts: BoolArray, profile: Profile, layer: int
) -> tuple[FloatArray, IntArray]:
    """The least delay of exact execution from every server of every pattern, and the server that it
    moves the token to, the first among equals, [M, P] each.

    The slot of largest mass runs where the token goes, the others wherever is fastest on the way;
    infinite where an expert has no host.
    """
    experts, _ = first_expert_first(profile.patterns[layer], profile.pattern_mass[layer])
    held = np.ascontiguousarray(hosts[:, layer])
    return _fastest_moves(cost.links, layer, held, np.ascontiguousarray(experts))


def _moved(here: FloatArray, to: IntArray) -> FloatArray:
    """Shares of tokens [M, P] after each has gone `to` [M, P] its server."""
    after = np.zeros_like(here)
    np.add.at(after, (to, np.arange(here.shape[1])), here)
    return after


@kernels.njit
def _fastest_moves(links, layer, held, patterns):
    """`fastest_moves` of patterns [P, k], first expert first; `held` [M, E]."""
    servers, (count, slots) = held.shape[0], patterns.shape
    least, to = np.full((servers, count), np.inf), np.zeros((servers, count), dtype=np.int64)
    at = np.empty(slots, dtype=np.int64)
    for source in range(servers):
        for destination in range(servers):
            best = kernels.nearest_hosts(links, layer, held, source, destination)[0]
            for p in range(count):
                there = held[destination, patterns[p, 0]]
                at[0] = destination
                for j in range(1, slots):
                    at[j] = best[patterns[p, j]]
                    there = there and at[j] >= 0
                if there:
                    delay = kernels.slots_delay_s(
                        links, layer, source, destination, patterns[p], at
                    )
                    if delay < least[source, p]:
                        least[source, p], to[source, p] = delay, destination
    return least, to
