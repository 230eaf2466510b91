"""Choosing an action and valuing what follows, compiled.

`choose` is the decision of a batch, `arrival_values` one layer of the value tables; both weigh the
same actions with the same step cost. `cost.values` and `policy.trim` wrap them. Shapes as in
`cost.enumerating`; W places, Q exit rows, V levels, P patterns.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trimmoe.core.specs import FloatArray
from trimmoe.cost.enumerating import (
    Actions,
    choices_of,
    local_loss_of,
    make_room,
    token_actions,
)
from trimmoe.cost.kernels import bare, njit

_HAIR = 1e-9
"""Of a level step, so that 3 * 0.1 counts as 0.3; a real shortfall is orders larger."""


class Values(NamedTuple):
    """Cost to go after a layer and how to look it up; see `cost.values.ValueTables`."""

    levels: FloatArray
    """Ascending allowances from 0, [V]."""
    after: FloatArray
    """Of one layer: by place, steadiness, pattern, exit row and level, [W, B, P, Q, V]."""
    goes_on: FloatArray
    """Of one layer: probability that a token does not exit right after executing, [Q]."""
    members: NDArray[np.uint8]
    """Of one layer: whether an expert is in a pattern, [E, P]."""


@bare
def step_cost(delay_s, loss, loss_weight, reference_s, budget):
    """f of (31) and (32) of one action.

    Zero weights must not meet infinities: an action that does not exist stays infinite, and
    without a budget any loss is.
    """
    if delay_s == np.inf:
        return np.inf
    cost = (1.0 - loss_weight) * delay_s / reference_s
    if budget > 0:
        return cost + loss_weight * loss / budget
    return np.inf if loss > 0 else cost


@njit
def step_costs(delay_s, loss, loss_weight, reference_s, budget):
    """`step_cost` of every action [n], each under its own loss weight [n]."""
    cost = np.empty(delay_s.shape[0])
    for i in range(cost.shape[0]):
        cost[i] = step_cost(delay_s[i], loss[i], loss_weight[i], reference_s, budget)
    return cost


@bare
def level_of(levels, allowance):
    """The last level within the allowance: rounded down, never up."""
    hair = _HAIR * levels[1] if levels.shape[0] > 1 else 0.0
    return max(np.searchsorted(levels, allowance + hair, side="right") - 1, 0)


@njit
def levels_of(levels, allowances):
    """`level_of` every allowance [n]."""
    level = np.empty(allowances.shape[0], dtype=np.int64)
    for i in range(level.shape[0]):
        level[i] = level_of(levels, max(allowances[i], 0.0))
    return level


@bare
def nearest_pattern(members, experts, shared):
    """The first pattern, `members` [E, P], of the largest overlap with a token's experts [k].

    `shared` [P] is scratch. Expert by expert, so that the patterns are counted side by side.
    """
    shared[:] = 0
    for j in range(experts.shape[0]):
        has = members[experts[j]]
        for p in range(shared.shape[0]):
            shared[p] += has[p]
    best, most = 0, -1
    for p in range(shared.shape[0]):
        if shared[p] > most:
            best, most = p, shared[p]
    return best


@njit
def choose(menu, layer, tokens, allowance, exit_row, place, values, weights, gated, picked):
    """The action of least step cost plus cost to go per token (40).

    `weights`: loss weight, reference_s, budget; `gated`: whether a skip needs Gamma > 0 (35).
    Writes expert and server [n, k], delay, loss and the cost to go if the token does not exit [n]
    into `picked`.
    """
    slots = tokens.experts.shape[1]
    columns = 2 + slots * choices_of(menu)
    room, at = make_room(menu, slots), np.empty(slots, dtype=np.int64)
    out = Actions(
        np.empty((1, columns, slots), dtype=np.int64),
        np.empty((1, columns, slots), dtype=np.int64),
        np.empty((1, columns)),
        np.empty((1, columns)),
    )
    scratch = room, at, out, np.empty(values.members.shape[1], dtype=np.uint8)
    limits = allowance, exit_row, place
    _choose(menu, layer, tokens, limits, values, weights, gated, picked, scratch)


@bare
def _choose(menu, layer, tokens, limits, values, weights, gated, picked, scratch):
    """`choose` with all the arrays it needs."""
    allowance, exit_row, place = limits
    room, at, out, shared = scratch
    loss_weight, reference_s, budget = weights
    expert, server, delay_s, loss, to_come = picked
    for i in range(tokens.experts.shape[0]):
        ends = tokens.source[i], tokens.destination[i]
        skip = token_actions(menu, layer, tokens, i, ends, -1, allowance[i], room, at, out, 0)
        steady = tokens.steadiness[i]
        pattern = nearest_pattern(values.members, tokens.experts[i], shared)
        to_go = values.after[place[i], steady, pattern, exit_row[i]]
        stays = values.goes_on[exit_row[i]]
        best, least, expected = 0, np.inf, np.inf
        for c in range(skip + 1):
            lost = out.loss[0, c]
            if out.delay_s[0, c] == np.inf or (c > 0 and lost > allowance[i]):
                continue
            if c == skip and gated:
                local = local_loss_of(
                    menu, layer, ends[0], tokens.experts[i], tokens.masses[i], steady
                )
                if local <= allowance[i]:
                    continue
            cost = step_cost(out.delay_s[0, c], lost, loss_weight, reference_s, budget)
            ahead = to_go[level_of(values.levels, max(allowance[i] - lost, 0.0))]
            cost += ahead if c == skip else stays * ahead
            if cost < least:
                best, least, expected = c, cost, ahead
        for j in range(at.shape[0]):
            expert[i, j], server[i, j] = out.expert[0, best, j], out.server[0, best, j]
        delay_s[i], loss[i] = out.delay_s[0, best], out.loss[0, best]
        to_come[i] = expected


@njit
def arrival_values(actions, place, local_loss, after, goes_on, levels, weights, gated, deciles):
    """Least expected cost from entering a layer at one place, [B, P, Q, V].

    `actions`: of P * D rows per class, deciles outermost, as [B * P * D, C, ...]; the last column
    skips. `place` [B * P * D, C]: where each action leads to, an index into `after`
    [W, B, P, Q, V], the cost to go after the layer. `local_loss` [B * P * D].
    """
    loss_weight, reference_s, budget = weights
    _, classes, patterns, exits, count = after.shape
    columns = actions.loss.shape[1]
    value = np.zeros((classes, patterns, exits, count))
    least = np.empty((exits, count))
    hair = _HAIR * levels[1] if count > 1 else 0.0
    for row in range(actions.loss.shape[0]):
        b, p = row // (deciles * patterns), row % patterns
        delay, loss = actions.delay_s[row], actions.loss[row]
        kept = _undominated(delay, loss, place[row], columns)
        least[:] = np.inf
        for index in range(kept.shape[0]):
            c = kept[index]
            skips = c == columns - 1
            cost = step_cost(delay[c], loss[c], loss_weight, reference_s, budget)
            ahead = after[place[row, c], b, p]
            left = 0
            for v in range(count):
                allowance = levels[v]
                if c > 0 and loss[c] > allowance:
                    continue
                if skips and gated and local_loss[row] <= allowance:
                    continue
                # Allowances ascend, so what is left of them does too.
                while left + 1 < count and levels[left + 1] <= allowance - loss[c] + hair:
                    left += 1
                for q in range(exits):
                    # A skip cannot be the end: only an executed layer is followed by an exit.
                    stays = 1.0 if skips else goes_on[q]
                    total = cost + stays * ahead[q, left]
                    least[q, v] = min(least[q, v], total)
        for q in range(exits):
            for v in range(count):
                value[b, p, q, v] += least[q, v] / deciles
    return value


@njit
def _undominated(delay, loss, place, columns):
    """Columns that exist and that no other with the same end is both faster and less lossy than;
    exact execution and the skip stay."""
    kept = np.empty(columns, dtype=np.int64)
    size = 0
    for c in range(columns):
        if delay[c] == np.inf:
            continue
        beaten = False
        if 0 < c < columns - 1:
            for other in range(columns - 1):
                if other == c or delay[other] == np.inf or place[other] != place[c]:
                    continue
                no_worse = delay[other] <= delay[c] and loss[other] <= loss[c]
                better = delay[other] < delay[c] or loss[other] < loss[c]
                if no_worse and (better or other < c):
                    beaten = True
                    break
        if not beaten:
            kept[size] = c
            size += 1
    return kept[:size]
