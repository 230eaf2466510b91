"""The look-ahead cost-to-go by its literal recursion (38, 39), memoised.

The state after layer l is the activated set it had (a pattern of the profile's codebook), the
server it is on, what it may still lose, and what kind of token it is: how steady, and when it is
likely to exit (never right after a skip). One node of the recursion values all patterns of a layer
at once.

The recursion is exponential in the horizon when allowances are exact, as in the paper; rounding
allowances down to a grid makes the memo hit. Rounded down, a plan never counts on spending that
is not there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from trimmoe.core.profile import Profile
from trimmoe.core.specs import FloatArray, IntArray
from trimmoe.cost.actions import ActionSpace, Candidates
from trimmoe.cost.deciding import step_costs
from trimmoe.cost.exits import ExitForecast

IMPORTANCE_DECILES = (2, 5, 8)
"""A layer not yet reached has one of these deciles of its pattern's importance, equally likely."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Turns seconds and flip rates into one dimensionless cost (21, 31)."""

    loss_weight: float
    """omega_D; the delay weight omega_T is one minus it."""
    reference_s: float
    """d_ref: mean delay of one exact layer on this deployment."""
    budget: float
    """D-bar: flip rate a token may lose on average; with 0, loss is never worth anything."""

    def step_cost(self, delay_s: FloatArray, loss: FloatArray) -> FloatArray:
        """f of (31) and (32), same shape as the arguments."""
        flat = [np.ascontiguousarray(array).reshape(-1) for array in (delay_s, loss)]
        weight = np.full(flat[0].size, self.loss_weight)
        cost = step_costs(*flat, weight, self.reference_s, self.budget)
        return cost.reshape(delay_s.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenKind:
    """What is known of a token besides where it is."""

    steadiness: int
    """Its class, see `Profile.steady_edges`."""
    exit_row: int
    """Its row of the exit forecast."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a token is: on a route (pinned) or simply on a server (migrate)."""

    route: tuple[int, ...] | None
    server: int | None = None

    def source(self, layer: int) -> int:
        """The server the token is on when it enters `layer`."""
        if self.route is not None:
            return self.route[layer]
        assert self.server is not None
        return self.server

    def destination(self, layer: int) -> int | None:
        """kappa(l+1); the last layer gathers where it is; None if the action decides."""
        if self.route is None:
            return None
        return self.route[min(layer + 1, len(self.route) - 1)]

    def moved_to(self, server: int) -> Place:
        """The place after a layer whose result gathered on `server`."""
        return self if self.route is not None else Place(route=None, server=server)


@dataclass(kw_only=True)
class LookAhead:
    """Phi^(h) of (39) for every pattern of a layer; a pure function with a memo.

    A token's steadiness class and exit forecast are taken to stay what they are.
    """

    space: ActionSpace
    profile: Profile
    weights: Weights
    exits: ExitForecast
    allowance_step: float | None = None
    """Allowances are rounded down to multiples of this; None keeps them exact."""
    _menus: dict = field(default_factory=dict)
    _values: dict = field(default_factory=dict)

    def to_go(
        self, layer: int, place: Place, allowance: float, horizon: int, token: TokenKind
    ) -> FloatArray:
        """Expected cost of the next `horizon` layers after `layer`, per pattern of `layer`, [P].

        `place` is where the token is after `layer`; that it goes on is taken as given.
        """
        last = self.space.cost.layer_count - 1
        if horizon <= 0 or layer >= last:
            return np.zeros(self.profile.patterns.shape[1])
        arrived = self._arrival(layer + 1, place, self.rounded(allowance), horizon, token)
        return self.profile.pattern_transitions[layer] @ arrived

    def rounded(self, allowance: float) -> float:
        """The allowance the recursion may count on."""
        return float(self._rounded_all(np.array(allowance)))

    def _arrival(
        self, layer: int, place: Place, allowance: float, horizon: int, token: TokenKind
    ) -> FloatArray:
        """Expected least cost from entering `layer`, per pattern of `layer`, [P]."""
        key = (layer, place, allowance, horizon, token)
        if key not in self._values:
            self._values[key] = self._least_cost(layer, place, allowance, horizon, token)
        return self._values[key]

    def _least_cost(
        self, layer: int, place: Place, allowance: float, horizon: int, token: TokenKind
    ) -> FloatArray:
        menu = self._menu(layer, place, token.steadiness)
        rows = menu.delay_s.shape[0]
        allowed = menu.allowed(np.full(rows, allowance))
        cost = np.where(allowed, self.weights.step_cost(menu.delay_s, menu.loss), np.inf)
        if horizon > 1:
            cost = cost + self.after(
                layer,
                place,
                menu,
                np.tile(np.arange(self.profile.patterns.shape[1]), len(IMPORTANCE_DECILES)),
                allowance - menu.loss,
                allowed,
                horizon - 1,
                steadiness=np.full(rows, token.steadiness),
                exit_row=np.full(rows, token.exit_row),
            )
        return cost.min(1).reshape(len(IMPORTANCE_DECILES), -1).mean(0)

    def after(
        self,
        layer: int,
        place: Place,
        menu: Candidates,
        patterns: IntArray,
        left: FloatArray,
        allowed: np.ndarray,
        horizon: int,
        *,
        steadiness: IntArray,
        exit_row: IntArray,
    ) -> FloatArray:
        """Phi^(horizon) after every action of `menu`, [n, C]; zero where not allowed.

        `patterns` [n]: the activated set of each row; `left` [n, C]: allowance after the action;
        `steadiness`, `exit_row` [n]: the kind of each token. Executing may end the token, a skip
        never does.
        """
        phi = np.zeros(menu.delay_s.shape)
        kinds = [np.broadcast_to(kind[:, None], phi.shape) for kind in (steadiness, exit_row)]
        goes_on = np.where(menu.skips, 1.0, self.exits.goes_on[kinds[1], layer])
        wanted = allowed & (goes_on > 0)
        if not wanted.any():
            return phi
        states = np.stack([self._rounded_all(left), menu.destination, *kinds], axis=-1)[wanted]
        distinct, which = np.unique(states, axis=0, return_inverse=True)
        tables = [
            self.to_go(
                layer,
                place.moved_to(int(server)),
                float(left_over),
                horizon,
                TokenKind(steadiness=int(steady), exit_row=int(row)),
            )
            for left_over, server, steady, row in distinct
        ]
        rows = np.broadcast_to(patterns[:, None], phi.shape)[wanted]
        phi[wanted] = goes_on[wanted] * np.stack(tables)[which.reshape(-1), rows]
        return phi

    def _rounded_all(self, allowance: FloatArray) -> FloatArray:
        if self.allowance_step is None:
            return allowance
        # The hair keeps 3 * 0.1 in the bin of 0.3; a real shortfall is orders larger.
        return np.floor(allowance / self.allowance_step + 1e-9) * self.allowance_step

    def _menu(self, layer: int, place: Place, steadiness: int) -> Candidates:
        source, destination = place.source(layer), place.destination(layer)
        key = (layer, source, destination, steadiness)
        if key not in self._menus:
            tokens = typical_tokens(self.profile, layer, steadiness)
            self._menus[key] = self.space.candidates(layer, source, destination, **tokens)
        return self._menus[key]

    def weighted(self, weights: Weights) -> LookAhead:
        """The same look-ahead under other weights; what does not depend on them is shared."""
        return replace(self, weights=weights, _values={})


def typical_tokens(profile: Profile, layer: int, steadiness: int) -> dict[str, np.ndarray]:
    """The tokens that stand for all that may reach a layer: every pattern at every one of
    IMPORTANCE_DECILES, deciles outermost; arguments of `ActionSpace.candidates`."""
    repeats = len(IMPORTANCE_DECILES)
    importance = profile.pattern_importance[layer][:, IMPORTANCE_DECILES]
    experts, masses = first_expert_first(profile.patterns[layer], profile.pattern_mass[layer])
    return {
        "experts": np.tile(experts, (repeats, 1)),
        "masses": np.tile(masses, (repeats, 1)),
        "importance": importance.T.reshape(-1),
        "steadiness": np.full(importance.size, steadiness),
    }


def first_expert_first(experts: IntArray, masses: FloatArray) -> tuple[IntArray, FloatArray]:
    """Activated sets [n, k] reordered by descending mass, as routers give them."""
    order = np.argsort(-masses, axis=1, kind="stable")
    return np.take_along_axis(experts, order, axis=1), np.take_along_axis(masses, order, axis=1)
