"""The predecessor's deployment, reconstructed: similar experts grouped, each group dispersed.

The paper says of its reference [37] only that it "groups functionally similar same-layer experts
and disperses them across edge servers, so that each server can preserve local substitute
candidates", that every expert is deployed at least once (c.2) and that memory is kept (c.1).
What is reconstructed here:

- Groups: per layer, balanced k-medoids on the profile's similarity Sim_l: G medoids start as the
  experts least like one another, then experts are assigned to medoids (an assignment problem with
  ceil(E / G) places per group) and medoids moved to the most central member, in turn, until
  nothing changes. Deterministic.
- Dispersal: one copy of every expert. A copy gives its server a local substitute for its whole
  group, so a second member of a group on the same server is wasted; each expert goes to a server
  with room that holds the fewest members of its group, among these to the one that would be the
  least filled relative to its capacity. Experts go largest first, then layer by layer, within a
  layer from the most to the least activated, so that the roomiest servers take the busiest.
- If unequal sizes leave an expert without room, all experts are packed afresh without regard to
  groups (`capacity.packed_hosts`), which refuses a cluster where nothing fits.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment

from trimmoe.core.profile import Profile
from trimmoe.core.specs import BoolArray, ClusterSpec, FloatArray, IntArray, ModelSpec
from trimmoe.placement.capacity import packed_hosts

_MEDOID_ROUNDS = 20


def expert_groups(similarity: FloatArray, group_count: int) -> IntArray:
    """Group of every expert of one layer, shape [E], from Sim_l of shape [E, E].

    Balanced k-medoids: at most ceil(E / group_count) members each.
    """
    experts = similarity.shape[0]
    group_count = min(group_count, experts)
    places = -(-experts // group_count)
    medoids = _unlike_experts(similarity, group_count)
    group_of = np.full(experts, -1)
    for _ in range(_MEDOID_ROUNDS):
        gain = np.repeat(similarity[:, medoids], places, axis=1)
        _, place = linear_sum_assignment(gain, maximize=True)
        if np.array_equal(place // places, group_of):
            break
        group_of = place // places
        medoids = np.array(
            [
                _medoid(similarity, np.flatnonzero(group_of == g), medoids[g])
                for g in range(group_count)
            ]
        )
    return group_of


def _unlike_experts(similarity: FloatArray, count: int) -> IntArray:
    """Experts least like one another: the least typical, then farthest-first, shape [count]."""
    chosen = [int(similarity.sum(axis=1).argmin())]
    while len(chosen) < count:
        closest = similarity[:, chosen].max(axis=1)
        closest[chosen] = np.inf
        chosen.append(int(closest.argmin()))
    return np.array(chosen)


def _medoid(similarity: FloatArray, members: IntArray, previous: int) -> int:
    if members.size == 0:
        return int(previous)
    return int(members[similarity[np.ix_(members, members)].sum(axis=1).argmax()])


def dispersed_hosts(
    cluster: ClusterSpec, model: ModelSpec, profile: Profile, capacity: IntArray, group_count: int
) -> BoolArray:
    """One copy of every expert, similar ones apart, shape [M, N, E]; satisfies (c.1), (c.2).

    Raises `UserError` if the experts cannot be packed into `capacity` [M].
    """
    hosts = _dispersed(model, profile, capacity, group_count)
    return packed_hosts(cluster, model, capacity) if hosts is None else hosts


def _dispersed(
    model: ModelSpec, profile: Profile, capacity: IntArray, group_count: int
) -> BoolArray | None:
    shape = (capacity.size, model.layer_count, model.expert_count)
    hosts, used = np.zeros(shape, dtype=bool), np.zeros(capacity.size, dtype=np.int64)
    groups = [expert_groups(similarity, group_count) for similarity in profile.similarity]
    for layer, expert in _placing_order(model, profile):
        size = int(model.expert_bytes[layer, expert])
        roomy = np.flatnonzero(used + size <= capacity)
        if roomy.size == 0:
            return None
        mates = hosts[roomy, layer][:, groups[layer] == groups[layer][expert]].sum(axis=1)
        filled = (used[roomy] + size) / capacity[roomy]
        server = roomy[np.lexsort((filled, mates))[0]]
        hosts[server, layer, expert] = True
        used[server] += size
    return hosts


def _placing_order(model: ModelSpec, profile: Profile) -> list[tuple[int, int]]:
    """(layer, expert) largest first, then by layer, then by how often activated."""
    layer, expert = np.indices(model.expert_bytes.shape).reshape(2, -1)
    order = np.lexsort((expert, -profile.activated.ravel(), layer, -model.expert_bytes.ravel()))
    return list(zip(layer[order].tolist(), expert[order].tolist(), strict=True))
