"""The trimmed value of a deployment: expected delay per token when quality is spent where it pays.

Under pinned accounting an action of a layer does not move the token, so layers are coupled by the
budget alone. With a price of quality lambda (seconds per unit of loss) every layer takes the action
of least delay + lambda * loss, and its expected cost is a table again,

    T_lambda[l, s, t] = pi_l E[ min over feasible actions of delay + lambda * loss ],

the expectation over patterns, importance deciles and steadiness classes, pi_l the share of tokens
still alive at the layer. The value of hosts and routes is the expected delay at an expected loss of
the budget D-bar, by the dual

    value = max over lambda >= 0 of ( sum of T_lambda along the routes - lambda * D-bar ),

whose maximum lies where the expected loss equals the budget and is found by bisection.

Actions are enumerated once per layer, hosts and server pair and condensed to what they come to,
delay and loss, at each of a few prices; in between a layer uses the better of these ways to act, so
the value is that of a real, slightly coarser policy. `skip_needs_transmission` is off: where
skipping saves no transmission it saves next to nothing and no positive price buys it.

Shapes: M servers, N layers, E experts, n typical tokens, C actions, G prices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from trimmoe.core.loss_curves import LossCurves
from trimmoe.core.profile import Profile
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.cost.actions import ActionSpace, Levers, StandIns
from trimmoe.cost.kernels import njit
from trimmoe.cost.lookahead import IMPORTANCE_DECILES, typical_tokens
from trimmoe.cost.model import CostModel
from trimmoe.placement.landscape import Summed
from trimmoe.placement.routes import traffic

PLANNING_LEVERS = Levers(stand_in=True, skip_needs_transmission=False)
Copies = Callable[[BoolArray, IntArray], IntArray | None]
"""Bits of servers' copies, [M, N, E], of hosts and routes."""
_Key = tuple[int, bytes, int, int, bytes]
_PRICES = 16
_KEPT_CURVES = 50_000
_BISECTIONS = 60


@dataclass(frozen=True, kw_only=True)
class TrimmedObjective(Summed):
    """See the module docstring; tables are at `price_s`."""

    cost: CostModel
    profile: Profile
    access_share: FloatArray
    budget: float
    """D-bar: flip rate a token may lose on average."""
    price_s: float = 0.0
    """lambda of `layer_table_s`, seconds per unit of loss."""
    servers: IntArray | None = None
    """Where routes may go in `layer_table_s`; None: everywhere. Fewer are quicker."""
    levers: Levers = PLANNING_LEVERS
    copied_bits: IntArray | None = None
    """Bits of the copies that each server is taken to have of all that it lacks, 0 for none,
    while routes are sought, [M]; None: no server has any."""
    copies: Copies | None = None
    """The copies that there would be; None: as they are taken to be."""
    name: str = "trimmed"
    _curves: dict[_Key, FloatArray] = field(init=False, default_factory=dict)

    @property
    def alive(self) -> FloatArray:
        """pi_l: share of tokens that reach each layer, [N]."""
        active = self.profile.active
        return active if self.levers.exit else np.ones_like(active)

    @property
    def prices(self) -> FloatArray:
        """Where actions are condensed, seconds per unit of loss, ascending, [G]."""
        slowest = max(float(self.cost.transfer_s.max()), float(self.cost.expert_s.max()))
        return slowest * np.geomspace(1e-2, 1e3, _PRICES)

    def at(self, price_s: float, servers: IntArray | None = None) -> TrimmedObjective:
        """The same objective with tables at another price; what is known is shared."""
        other = replace(self, price_s=price_s, servers=servers)
        object.__setattr__(other, "_curves", self._curves)
        return other

    def of_access(self, access: int) -> TrimmedObjective:
        """The same objective for users of one server alone; what is known is shared."""
        other = replace(self, access_share=np.eye(self.access_share.size)[access])
        object.__setattr__(other, "_curves", self._curves)
        return other

    def layer_table_s(self, layer: int, held: BoolArray) -> FloatArray:
        """T_lambda of one layer at `price_s`, infinite off `servers`, [M, M]."""
        count = self.cost.server_count
        servers = np.arange(count) if self.servers is None else self.servers
        table = np.full((count, count), np.inf)
        for source in servers.tolist():
            for destination in servers.tolist():
                delay, loss = self.curve(layer, held, source, destination)
                table[source, destination] = (delay + self.price_s * loss).min()
        return table

    def value_s(self, hosts: BoolArray, routes: IntArray) -> float:
        """Expected delay per token at an expected loss of the budget, seconds."""
        return self.priced(hosts, routes)[0]

    def copied(self, hosts: BoolArray, routes: IntArray) -> IntArray | None:
        """The copies that there would be; None: as they are taken to be."""
        return None if self.copies is None else self.copies(hosts, routes)

    def priced(self, hosts: BoolArray, routes: IntArray) -> tuple[float, float]:
        """`value_s` and the price at which the expected loss meets the budget."""
        return self.with_copies(hosts, routes, self.copied(hosts, routes))

    def with_copies(
        self, hosts: BoolArray, routes: IntArray, bits: IntArray | None
    ) -> tuple[float, float]:
        """`priced` where servers have copies in so many `bits`."""
        curves, weights = [], []
        for layer in range(hosts.shape[1]):
            there = None if bits is None else bits[:, layer]
            for source, destination, share in traffic(routes, self.access_share, layer):
                curves.append(self.curve(layer, hosts[:, layer], source, destination, there))
                weights.append(share)
        return self._dual(np.array(curves), np.array(weights), self._ends_s(routes))

    def _dual(self, curves: FloatArray, weight: FloatArray, ends_s: float) -> tuple[float, float]:
        """The maximum over prices; `curves` [W, 2, G + 1] of shares `weight` [W]."""
        delay, loss = curves[:, 0], curves[:, 1]

        def at(price_s: float) -> tuple[float, float]:
            best = (delay + price_s * loss).argmin(axis=1)[:, None]
            spent = float(weight @ np.take_along_axis(loss, best, axis=1)[:, 0])
            taken = float(weight @ np.take_along_axis(delay, best, axis=1)[:, 0])
            return ends_s + taken + price_s * (spent - self.budget), spent

        low, high = np.log(self.prices[0] / 10), np.log(self.prices[-1] * 10)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            if at(float(np.exp(middle)))[1] > self.budget:
                low = middle
            else:
                high = middle
        price_s = float(np.exp(high))
        # Concave in the price; where the budget never binds its maximum is at price zero.
        return max((at(price_s)[0], price_s), (at(0.0)[0], 0.0))

    def _ends_s(self, routes: IntArray) -> float:
        return float(self.access_share @ self.cost.ends_s(routes))

    def curve(
        self,
        layer: int,
        held: BoolArray,
        source: int,
        destination: int,
        bits: IntArray | None = None,
    ) -> FloatArray:
        """Delay (row 0) and loss (row 1) of a layer at each price, last exact, [2, G + 1].

        Both count by the share of tokens alive; the delay includes the dense part. `bits` [M, E] of
        servers' copies; None: as they are taken to be.
        """
        if bits is None and self.copied_bits is not None:
            bits = np.where(held, 0, self.copied_bits[:, None])
        # Only what is where the token is may stand in.
        own = b"" if bits is None else bits[source].tobytes()
        key = (layer, held.tobytes(), source, destination, own)
        found = self._curves.get(key)
        if found is None:
            if len(self._curves) >= _KEPT_CURVES:
                self._curves.clear()
            found = self._curves[key] = self._enumerated(layer, held, bits, source, destination)
        return found

    def _enumerated(
        self, layer: int, held: BoolArray, bits: IntArray | None, source: int, destination: int
    ) -> FloatArray:
        space = self._space(layer, held, bits)
        share = self.profile.pattern_share[layer] / len(IMPORTANCE_DECILES)
        row_share = np.tile(share, len(IMPORTANCE_DECILES))
        curve = np.zeros((2, _PRICES + 1))
        for steadiness in range(self.profile.class_count):
            tokens = typical_tokens(self.profile, layer, steadiness)
            there = row_share > 0
            menu = space.candidates(
                0, source, destination, **{name: of[there] for name, of in tokens.items()}
            )
            weight = row_share[there] * self.profile.class_share[layer, steadiness]
            curve += _condensed(menu.delay_s, menu.loss, weight, self.prices)
        curve[0] += self.cost.dense_s[source, layer]
        return curve * self.alive[layer]

    def _space(self, layer: int, held: BoolArray, copied: IntArray | None) -> ActionSpace:
        """The actions of one layer, as layer 0 of a model that has no other."""
        one, share = slice(layer, layer + 1), self.cost.rung_share
        skip, drop = (
            replace(curves, edges=curves.edges[one], upper=curves.upper[one])
            for curves in (self.profile.skip, self.profile.drop)
        )
        return ActionSpace(
            cost=replace(
                self.cost,
                expert_s=self.cost.expert_s[:, one],
                dense_s=self.cost.dense_s[:, one],
                rung_share=None if share is None else share[:, one],
            ),
            hosts=held[:, None],
            substitution_loss=self.profile.substitution_loss[one],
            feasible=self.profile.feasible[one],
            skip=skip,
            drop=drop,
            theta=np.ones(1),
            theta_drop=np.ones(1),
            levers=self.levers,
            stand_ins=self._stand_ins(layer, copied),
        )

    def _stand_ins(self, layer: int, bits: IntArray | None) -> StandIns | None:
        """Of one layer."""
        if bits is None or not self.levers.stand_in:
            return None
        one = slice(layer, layer + 1)
        curves = {
            few: replace(charged, edges=charged.edges[one], upper=charged.upper[one])
            for few, charged in self._charged.items()
        }
        return StandIns.of(curves, bits[:, None])

    @cached_property
    def _charged(self) -> dict[int, LossCurves]:
        """By bits of the copies."""
        share, top_k = self.profile.class_share, self.profile.top_k
        return {rung.bits: rung.within(self.budget, share, top_k) for rung in self.profile.rungs}


@dataclass(frozen=True, kw_only=True)
class EachUserObjective(Summed):
    """The trimmed value where nobody spends what users of other servers leave, as their accounts
    have it: the mean over users of what the users of each server come to by themselves."""

    whole: TrimmedObjective
    name: str = "trimmed"

    def layer_table_s(self, layer: int, held: BoolArray) -> FloatArray:
        """As of the whole."""
        return self.whole.layer_table_s(layer, held)

    def value_s(self, hosts: BoolArray, routes: IntArray) -> float:
        """Expected delay per token, seconds."""
        share, bits = self.whole.access_share, self.whole.copied(hosts, routes)
        own = [
            self.whole.of_access(access).with_copies(hosts, routes, bits)[0]
            for access in np.flatnonzero(share).tolist()
        ]
        return float(share[share > 0] @ np.array(own))


@njit
def _condensed(delay_s, loss, weight, prices):
    """Expected delay and loss when every row [n, C] acts best at each price, last exact."""
    rows, actions = delay_s.shape
    curve = np.zeros((2, prices.size + 1))
    for i in range(rows):
        for g in range(prices.size):
            best, least = 0, np.inf
            for c in range(actions):
                cost = delay_s[i, c] + prices[g] * loss[i, c]
                if cost < least:
                    best, least = c, cost
            curve[0, g] += weight[i] * delay_s[i, best]
            curve[1, g] += weight[i] * loss[i, best]
        curve[0, prices.size] += weight[i] * delay_s[i, 0]
    return curve
