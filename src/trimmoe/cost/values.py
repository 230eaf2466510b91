"""Value tables: the look-ahead (39), computed once per plan and only looked up, to full depth or
any horizon.

The recursion of `cost.lookahead` over the same states, backwards over the layers: where the token
is (its route, or its server under `migrate`), how steady it is, when it is likely to exit, how much
it may still lose, and the activated set. Allowances are rounded down to a grid of levels, so a
table never counts on spending that is not there; whether an action is affordable is checked live,
with the exact balance, by whoever takes it.

Shapes: W places, B steadiness classes, Q exit rows, V levels, P patterns, N layers, M servers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimmoe.core.profile import Profile
from trimmoe.core.specs import FloatArray, IntArray
from trimmoe.cost import deciding, enumerating
from trimmoe.cost.actions import ActionSpace, Candidates, as_batch
from trimmoe.cost.exits import ExitForecast
from trimmoe.cost.lookahead import IMPORTANCE_DECILES, Weights, typical_tokens
from trimmoe.cost.model import Accounting


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueTables:
    """Phi of (39) after every layer, for one set of weights."""

    weights: Weights
    exits: ExitForecast
    levels: FloatArray
    """Ascending allowances, the first 0, [V]."""
    after: tuple[FloatArray, ...]
    """Per layer, [W, B, P, Q, V]; a token that exits right after the layer costs nothing more,
    which is for the reader to weigh in with `exits.goes_on`."""
    place_of: IntArray
    """Which place a token is at after each layer: by route if pinned, [N, R], by the server it is
    on under `migrate`, [N, M]."""

    def after_actions(
        self,
        layer: int,
        menu: Candidates,
        *,
        route: IntArray,
        patterns: IntArray,
        left: FloatArray,
        steadiness: IntArray,
        exit_at: IntArray,
        migrates: bool,
    ) -> FloatArray:
        """Cost to go after every action of `menu`, [n, C].

        `route`, `patterns`, `steadiness`, `exit_at` [n]; `left` [n, C]: allowance after it.
        """
        exit_row = self.exits.rows(exit_at)
        ends = menu.destination if migrates else route[:, None]
        level = self.level_of(left)
        ahead = self.after[layer][
            self.place_of[layer][ends],
            steadiness[:, None],
            patterns[:, None],
            exit_row[:, None],
            level,
        ]
        goes_on = self.exits.goes_on[exit_row, layer][:, None]
        return np.where(menu.skips, 1.0, goes_on) * ahead

    def level_of(self, allowance: FloatArray) -> IntArray:
        """The last level within each allowance, same shape."""
        flat = np.ascontiguousarray(allowance).reshape(-1)
        return deciding.levels_of(self.levels, flat).reshape(allowance.shape)


def allowance_levels(budget: float, per_budget: int, budgets: int = 8) -> FloatArray:
    """Levels 0, D/m, 2D/m, ... up to 2 D, then ever coarser up to `budgets` times D-bar, [V].

    What lies above the last level counts as the last.
    """
    if budget <= 0:
        return np.zeros(1)
    fine = np.arange(2 * per_budget + 1) / per_budget
    coarse = np.geomspace(2.0, budgets, per_budget + 1)[1:]
    return budget * np.concatenate([fine, coarse])


def build_tables(
    space: ActionSpace,
    profile: Profile,
    weights: Weights,
    exits: ExitForecast,
    routes: IntArray,
    levels: FloatArray,
    *,
    horizon: int | None = None,
) -> ValueTables:
    """Dynamic programming from the last layer back; `routes` [M, N] matter unless `migrate`.

    With a `horizon` H (40) the table after a layer counts the H - 1 layers that follow it, each
    layer's by a short recursion of its own; without one all of them, in a single one.
    """
    places = _Places.of(space, routes)
    layers = space.cost.layer_count
    shape = (space.class_count, profile.patterns.shape[1], exits.goes_on.shape[0], levels.size)
    menus: _Menus = {}

    def nothing(layer: int) -> FloatArray:
        return np.zeros((places.count(layer), *shape))

    def before(layer: int, after: FloatArray) -> FloatArray:
        """From the values after `layer` those after the layer that precedes it."""
        arrival = _arrivals(space, profile, weights, exits, levels, places, layer, after, menus)
        # The pattern a token arrives with follows from the one it had in the layer before.
        flat = arrival.reshape(*arrival.shape[:3], -1)
        moved = profile.pattern_transitions[layer - 1] @ flat
        return np.ascontiguousarray(moved.reshape(arrival.shape))

    values = [nothing(layers - 1)]
    for layer in range(layers - 2, -1, -1):
        last = layer + 1 if horizon is None else min(layer + horizon - 1, layers - 1)
        after = values[-1] if horizon is None else nothing(last)
        for seen in range(last, layer, -1):
            after = before(seen, after)
        values.append(after)
        # They are large; only those are kept that the layer before looks at again.
        seen_again = range(layer + (horizon or 2) - 1)
        menus = {key: menu for key, menu in menus.items() if key[0] in seen_again}
    return ValueTables(
        weights=weights,
        exits=exits,
        levels=levels,
        after=tuple(reversed(values)),
        place_of=places.index,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Places:
    """Distinct futures after each layer: routes that agree from there on are one place."""

    index: IntArray
    """[N, M]."""
    routes: IntArray | None

    @staticmethod
    def of(space: ActionSpace, routes: IntArray) -> _Places:
        layers, servers = space.cost.layer_count, space.cost.server_count
        if space.cost.accounting is Accounting.MIGRATE:
            return _Places(index=np.tile(np.arange(servers), (layers, 1)), routes=None)
        index = [
            np.unique(routes[:, min(layer + 1, layers - 1) :], axis=0, return_inverse=True)[1]
            for layer in range(layers)
        ]
        return _Places(index=np.stack([each.reshape(-1) for each in index]), routes=routes)

    def count(self, layer: int) -> int:
        return int(self.index[layer].max()) + 1

    def entries(self, layer: int) -> list[tuple[int, int | None, int]]:
        """Source, destination and place after `layer` of each place before it."""
        before = self.index[layer - 1]
        first = [int(np.flatnonzero(before == place)[0]) for place in range(self.count(layer - 1))]
        if self.routes is None:
            return [(server, None, 0) for server in first]
        following = min(layer + 1, self.routes.shape[1] - 1)
        return [
            (
                int(self.routes[access, layer]),
                int(self.routes[access, following]),
                int(self.index[layer, access]),
            )
            for access in first
        ]


def _arrivals(
    space: ActionSpace,
    profile: Profile,
    weights: Weights,
    exits: ExitForecast,
    levels: FloatArray,
    places: _Places,
    layer: int,
    after: FloatArray,
    menus: _Menus,
) -> FloatArray:
    """Expected cost from entering `layer`, by place after the layer before, [W, B, P, Q, V]."""
    goes_on = np.ascontiguousarray(exits.goes_on[:, layer])
    scalars = (weights.loss_weight, weights.reference_s, weights.budget)
    found = []
    for source, destination, place in places.entries(layer):
        key = (layer, source, destination)
        if key not in menus:
            menus[key] = _typical(space, profile, layer, source, destination)
        typical = menus[key]
        found.append(
            deciding.arrival_values(
                typical.actions,
                typical.destination
                if destination is None
                else np.full_like(typical.destination, place),
                typical.local_loss,
                after,
                goes_on,
                levels,
                scalars,
                space.levers.skip_needs_transmission,
                len(IMPORTANCE_DECILES),
            )
        )
    return np.stack(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Typical:
    """The actions of a layer's typical tokens, classes outermost: [B * P * D, ...]."""

    actions: enumerating.Actions
    destination: IntArray
    local_loss: FloatArray


_Menus = dict[tuple[int, int, int | None], _Typical]
"""By layer, source and destination."""


def _typical(
    space: ActionSpace, profile: Profile, layer: int, source: int, destination: int | None
) -> _Typical:
    kinds = [typical_tokens(profile, layer, steady) for steady in range(space.class_count)]
    tokens = {name: np.concatenate([kind[name] for kind in kinds]) for name in kinds[0]}
    if destination is None:
        menu = space.candidates(layer, source, None, **tokens)
        whole = enumerating.Actions(
            np.ascontiguousarray(menu.slot_expert),
            np.ascontiguousarray(menu.slot_server),
            np.ascontiguousarray(menu.delay_s),
            np.ascontiguousarray(menu.loss),
        )
        return _Typical(
            actions=whole,
            destination=np.ascontiguousarray(menu.destination),
            local_loss=menu.local_loss,
        )
    rows = tokens["importance"].size
    batch = as_batch(**tokens, source=np.full(rows, source), destination=np.full(rows, destination))
    actions = space.enumerate(layer, batch)
    local = space.served_locally(
        layer, source, tokens["experts"], tokens["masses"], tokens["steadiness"]
    )
    return _Typical(
        actions=actions,
        destination=np.zeros(actions.loss.shape, dtype=np.int64),
        local_loss=local,
    )
