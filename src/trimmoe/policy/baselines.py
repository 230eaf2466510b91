"""Policies that others use or published, behind the same `Policy.decide`.

What they approximate is priced by the calibrated losses, so that their ledgers compare, and is
executed for real where quality is measured. They know of a budget only that what is beyond what is
left of it runs exactly; give their sequences one that never binds to see them as published.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trimmoe.core.profile import Profile, slot_ranks
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.cost.actions import DROPPED, ActionSpace
from trimmoe.cost.kernels import curve_at
from trimmoe.cost.model import Accounting, CostModel, layer_delay_s
from trimmoe.policy.base import Decision, Observation, Policy
from trimmoe.policy.nearest import exact_decision, placed


@dataclass(frozen=True, kw_only=True)
class MixtureOfDepths(Policy):
    """Skip the layers where a token's router mass is lowest, wherever they run.

    After Mixture-of-Depths (Raposo et al., 2024), without its training: its learned router is
    reconstructed as the importance (4), its capacity as a skip rate per layer. The original runs
    an eighth of the tokens in every second layer, which a model that was not trained for it does
    not survive; what rate is comparable, `matched_skip_rate` says. It does not look at links.
    """

    space: ActionSpace
    routes: IntArray
    """[R, N]."""
    below: FloatArray
    """Importance under which a layer is skipped, [N]."""

    def decide(self, observation: Observation) -> Decision:
        """Exact execution, or a skip where the importance is low."""
        exact = exact_decision(self.space, self.routes, observation)
        skipped = observation.importance < self.below[observation.layer]
        source = observation.server
        skip_loss = _skip_loss(self.space, observation)
        skipped &= skip_loss <= observation.allowance
        stays = self.space.cost.accounting is Accounting.MIGRATE
        destination = np.where(skipped & stays, source, exact.destination)
        travel = self.space.cost.transfer_s[source, destination]
        return Decision(
            slot_expert=np.where(skipped[:, None], DROPPED, exact.slot_expert),
            slot_server=np.where(skipped[:, None], source[:, None], exact.slot_server),
            destination=destination,
            delay_s=np.where(skipped, travel, exact.delay_s),
            loss=np.where(skipped, skip_loss, 0.0),
            ahead=exact.ahead,
        )


def skip_thresholds(importance_quantiles: FloatArray, rate: float) -> FloatArray:
    """The importance that a share `rate` of tokens stays under, per layer, [N].

    `importance_quantiles` [N, 101]. A rate of 0 skips nothing.
    """
    if rate <= 0:
        return np.zeros(importance_quantiles.shape[0])
    grid = np.linspace(0.0, 1.0, importance_quantiles.shape[1])
    return np.array([np.interp(rate, grid, row) for row in importance_quantiles])


def matched_skip_rate(space: ActionSpace, profile: Profile, budget: float) -> float:
    """The share of every layer's tokens at which skips of least importance are charged `budget` per
    token, by calibration; at most 1."""
    share = np.linspace(0.0, 1.0, profile.importance_quantiles.shape[1])
    charged = np.zeros(share.size)
    for layer, quantiles in enumerate(profile.importance_quantiles):
        middles = (quantiles[1:] + quantiles[:-1]) / 2
        classes = _class_share(space, profile)[layer]
        for steady, weight in enumerate(classes):
            edges, upper = space.skip.edges[layer, steady], space.skip.upper[layer, steady]
            losses = np.array([curve_at(edges, upper, mass) for mass in middles])
            charged[1:] += weight * np.cumsum(losses * np.diff(share))
    within = int(np.searchsorted(charged, budget, side="right")) - 1
    if within == share.size - 1:
        return 1.0
    beyond = slice(within, within + 2)
    return float(np.interp(budget, charged[beyond], share[beyond]))


@dataclass(frozen=True, kw_only=True)
class LocalPrior(Policy):
    """Route to experts that are near: the router's probabilities plus a bias for local experts.

    The activated set becomes the k experts of largest biased probability; an expert that was
    displaced keeps its gate and the newcomer takes its slot. A bias of 1 takes local experts
    wherever there are enough of them, 0 is exact.
    """

    space: ActionSpace
    routes: IntArray
    bias: float

    def decide(self, observation: Observation) -> Decision:
        """The biased activated set at its nearest hosts; needs the router's probabilities."""
        assert observation.probabilities is not None, "local routing needs the whole router output"
        local = self.space.hosts[observation.server, observation.layer]
        return masked_decision(
            self.space,
            self.routes,
            observation,
            observation.probabilities + self.bias * local,
        )


@dataclass(frozen=True, kw_only=True)
class MaskedGating(Policy):
    """Gate over the experts of chosen servers only, by the router's own order.

    An adaptation of MoE^2 (Jin et al., 2025): it selects a subset of servers under latency and
    energy limits and masks the gate to their experts; its selection is made offline with the plan,
    its gate is reconstructed as the router's probabilities without the masked experts. A masked
    expert's gate goes to the newcomer in its slot.
    """

    space: ActionSpace
    routes: IntArray
    admitted: BoolArray
    """Which servers take part, [M]."""

    def decide(self, observation: Observation) -> Decision:
        """The best k experts that some admitted server holds."""
        assert observation.probabilities is not None, "masked gating needs the whole router output"
        there = self.space.hosts[self.admitted, observation.layer].any(0)
        masked = np.where(there, observation.probabilities, -1.0)
        return masked_decision(self.space, self.routes, observation, masked)


def admitted_servers(cost: CostModel, routes: IntArray, hosts: BoolArray) -> BoolArray:
    """MoE^2's subset of servers under a latency limit, [M]: the least limit under which half of
    every layer's experts are there.

    `hosts` [M, N, E]. The original's limits come with the task, in seconds and joules; a paper that
    names none leaves the half as arbitrary as any other share, see `matched_servers`.
    """
    return _nearest_servers(
        cost, routes, lambda admitted: bool((hosts[admitted].any(0).mean(1) >= 0.5).all())
    )


def matched_servers(
    space: ActionSpace, routes: IntArray, profile: Profile, budget: float
) -> BoolArray:
    """The least latency limit under which masking the gate is expected to be charged at most
    `budget` per token, [M]."""

    def affordable(admitted: BoolArray) -> bool:
        there: BoolArray = np.logical_or.reduce(space.hosts[admitted], axis=0)
        return (
            bool(np.any(there, axis=1).all())
            and expected_mask_loss(space, profile, there) <= budget
        )

    return _nearest_servers(space.cost, routes, affordable)


def expected_mask_loss(space: ActionSpace, profile: Profile, there: BoolArray) -> float:
    """What tokens are charged on average where only the experts `there` [N, E] run.

    Whom the router would take instead is only known per token: here anybody that is there, in
    proportion to how often it is activated. Slots count alike.
    """
    losses = profile.slots_alike(space.substitution_loss)[:, :, 0]
    by_class = _class_share(space, profile)
    total = 0.0
    for layer, present in enumerate(there):
        activated = profile.activated[layer]
        newcomer = activated * present
        newcomer = newcomer / newcomer.sum() if newcomer.any() else present / present.sum()
        masked = activated * ~present
        total += float(masked @ np.tensordot(by_class[layer], losses[layer], 1) @ newcomer)
    return total


def _nearest_servers(
    cost: CostModel, routes: IntArray, enough: Callable[[BoolArray], bool]
) -> BoolArray:
    """Servers [M] in the order of their mean time from the routes' servers until they are `enough`,
    or all."""
    used = np.bincount(routes.reshape(-1), minlength=cost.server_count) / routes.size
    away_s = used @ cost.transfer_s + cost.waiting_s + cost.expert_s.mean((1, 2))
    admitted = np.zeros(cost.server_count, dtype=bool)
    for server in np.argsort(away_s, kind="stable"):
        admitted[server] = True
        if enough(admitted):
            break
    return admitted


def masked_decision(
    space: ActionSpace, routes: IntArray, observation: Observation, scores: FloatArray
) -> Decision:
    """Run the k experts of largest score [n, E] at their nearest hosts.

    Experts that stay activated keep their slots; newcomers, best first, take the slots of those
    displaced, the least probable slot last.
    """
    layer, targets = observation.layer, observation.experts
    wanted = np.argsort(-scores, axis=1, kind="stable")[:, : targets.shape[1]]
    same = targets[:, :, None] == wanted[:, None, :]
    # Every row has as many newcomers as slots without an owner, so both sides run in step.
    ran = targets.copy()
    ran[~same.any(2)] = wanted[~same.any(1)]
    source = observation.server
    destination, server = placed(space, routes, observation, ran)
    rank = slot_ranks(targets.shape[1], space.substitution_loss.shape[2])
    loss = space.substitution_loss[layer, _class(space, observation)[:, None], rank, targets, ran]
    total = np.where(ran == targets, 0.0, loss).sum(1)
    exact = exact_decision(space, routes, observation)
    keeps = total > observation.allowance
    delay_s = layer_delay_s(space.cost, layer, source, destination, ran, server)
    return Decision(
        slot_expert=np.where(keeps[:, None], targets, ran),
        slot_server=np.where(keeps[:, None], exact.slot_server, server),
        destination=np.where(keeps, exact.destination, destination),
        delay_s=np.where(keeps, exact.delay_s, delay_s),
        loss=np.where(keeps, 0.0, total),
        ahead=exact.ahead,
    )


def _skip_loss(space: ActionSpace, observation: Observation) -> FloatArray:
    """What skipping the layer is charged, [n]."""
    edges, upper = space.skip.edges[observation.layer], space.skip.upper[observation.layer]
    kinds = zip(_class(space, observation), observation.importance, strict=True)
    return np.array([curve_at(edges[kind], upper[kind], mass) for kind, mass in kinds])


def _class_share(space: ActionSpace, profile: Profile) -> FloatArray:
    """Shares of the classes that the space tells apart, [N, B]."""
    return profile.class_share if space.class_count > 1 else np.ones((profile.layer_count, 1))


def _class(space: ActionSpace, observation: Observation) -> IntArray:
    return np.minimum(observation.steadiness, space.class_count - 1)
