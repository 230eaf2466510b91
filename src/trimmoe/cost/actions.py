"""The feasible actions of a layer, what each costs and what it gives up (30-32, 34, 35).

An action says for every slot of the activated set what runs it and where: its target, a feasible
substitute, its target's stand-in where the token is, or nobody (dropped). Dropping all slots is the
paper's skip. Delays couple the slots only through a maximum, losses only through a sum, so the
undominated combinations are found by scanning delay caps: under each cap every slot takes its least
lossy option that meets the cap.

Every loss depends on how steady the token is: its class, from a linear head on its hidden state,
says how easily its prediction flips.

Shapes: n tokens, k slots, C candidate actions per token, B steadiness classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from trimmoe.core.loss_curves import LossCurves
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.core.stand_ins import NO_STAND_IN, RUNGS, numbered
from trimmoe.cost import enumerating, kernels
from trimmoe.cost.enumerating import DROPPED, Actions, Batch, Menu
from trimmoe.cost.model import Accounting, CostModel

__all__ = ["DROPPED", "ActionSpace", "Candidates", "Levers"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Levers:
    """Which approximations a policy may use; all off is exact execution."""

    substitute: bool = True
    stand_in: bool = False
    """Run copies in few bits of experts that are elsewhere, where the plan and the profile have
    them. Not under `migrate`."""
    drop_slots: bool = True
    """Drop single slots of an activated set; False is the paper's all-or-nothing skip."""
    skip: bool = True
    exit: bool = True
    skip_needs_transmission: bool = True
    """Admit a skip only if no local action is feasible: Gamma > 0 (35)."""
    local: bool = True
    """Whether there is a choice too where all activated experts run where the token is and stays.
    Off, it runs them, so that tokens pass such layers without a decision. Not under `migrate`."""

    @property
    def lossless(self) -> bool:
        return not (self.substitute or self.stand_in or self.drop_slots or self.skip)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """Actions of n tokens; column 0 is always exact execution at least delay.

    Whether an action may be taken depends on the allowance: ask `allowed`.
    """

    slot_expert: IntArray
    """[n, C, k] as `core.stand_ins` numbers what runs, -1 = dropped."""
    slot_server: IntArray
    """[n, C, k]."""
    destination: IntArray
    """Where the layer's result gathers, [n, C]."""
    delay_s: FloatArray
    """[n, C], without the dense part; infinite where there is no such action."""
    loss: FloatArray
    """[n, C]; exactly 0 in column 0."""
    skips: BoolArray
    """Whether the action runs no expert at all, [n, C]."""
    local_loss: FloatArray
    """Least loss of running all slots on the source, infinite if it cannot, [n]."""
    skip_needs_transmission: bool

    def allowed(self, allowance: FloatArray) -> BoolArray:
        """The feasible set (34) for tokens that may still lose `allowance` [n]; [n, C].

        Exact execution costs no quality, so column 0 is always in it (Property 2).
        """
        allowed = np.isfinite(self.delay_s) & (self.loss <= allowance[:, None])
        allowed &= ~self.pointless(allowance)
        allowed[:, 0] = True
        return allowed

    def pointless(self, allowance: FloatArray) -> BoolArray:
        """Skips where an action within `allowance` [n] is local, which Gamma > 0 (35) excludes;
        [n, C]."""
        gated = self.skip_needs_transmission & (self.local_loss <= allowance)
        return self.skips & gated[:, None]


NOT_FREE = 1e-12
"""The least that a stand-in loses, so that without a budget none runs, whatever was measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StandIns:
    """Copies in few bits that may run where a token is, and what they lose."""

    number: IntArray
    """As `core.stand_ins` numbers them, -1 where a server has none, [M, N, E]."""
    edges: FloatArray
    """Of the slot's softmax mass, by rung, [K, N, B, G]."""
    upper: FloatArray
    """Loss of each bin, the same shape."""

    @staticmethod
    def of(curves: Mapping[int, LossCurves], bits: IntArray) -> StandIns | None:
        """Copies in so many `bits` [M, N, E] by the losses of each number of bits, of one shape
        all; None if there are none that anything is known of."""
        known = np.where(np.isin(bits, list(curves)), bits, 0)
        if not known.any():
            return None
        # Nobody looks at rungs that were not measured.
        like = next(iter(curves.values()))
        rungs = [curves.get(few, like) for few in RUNGS]
        return StandIns(
            number=numbered(known),
            edges=np.stack([rung.edges for rung in rungs]),
            upper=np.maximum(np.stack([rung.upper for rung in rungs]), NOT_FREE),
        )

    @staticmethod
    def none(servers: int, layers: int, experts: int) -> StandIns:
        """Where nothing stands in."""
        nothing = np.ones((0, layers, 1, 1))
        number = np.full((servers, layers, experts), NO_STAND_IN)
        return StandIns(number=number, edges=nothing, upper=nothing)


@dataclass(frozen=True, kw_only=True)
class ActionSpace:
    """The feasible set A_{i,q,l} (34) on one deployment; pure look-ups in fixed arrays."""

    cost: CostModel
    hosts: BoolArray
    """x_{m,l,k}, [M, N, E]."""
    substitution_loss: FloatArray
    """Q_l(r, k) by steadiness class and slot rank, [N, B, R, E, E]."""
    feasible: BoolArray
    """k in V_{l,r}, [N, E, E]."""
    skip: LossCurves
    drop: LossCurves
    theta: FloatArray
    """Importance at or below which a skip is admitted (24), [N]."""
    theta_drop: FloatArray
    """The same for the mass of one dropped slot, [N]."""
    levers: Levers
    max_substitutes: int = 4
    stand_ins: StandIns | None = None
    """None: no action runs any."""

    @property
    def class_count(self) -> int:
        """B."""
        return self.substitution_loss.shape[1]

    @cached_property
    def substitutes(self) -> IntArray:
        """Feasible substitutes of every expert, least lossy first, -1 padded, [N, B, E, S]."""
        experts = self.feasible.shape[1]
        loss = np.where(self.feasible[:, None], self.substitution_loss.mean(2), np.inf)
        loss[..., np.arange(experts), np.arange(experts)] = np.inf
        limit = min(self.max_substitutes, experts - 1) if self.levers.substitute else 0
        order = np.argsort(loss, axis=-1, kind="stable")[..., :limit]
        usable = np.isfinite(np.take_along_axis(loss, order, axis=-1))
        return np.where(usable, order, -1)

    def served_locally(
        self,
        layer: int,
        source: int | IntArray,
        experts: IntArray,
        masses: FloatArray,
        steadiness: IntArray,
    ) -> FloatArray:
        """Least loss of running all slots of the activated sets [n, k], of these masses [n, k], on
        their source, [n]."""
        here = np.broadcast_to(source, steadiness.shape)
        batch = as_batch(experts, masses, np.zeros(here.shape), steadiness, here, here)
        rows = batch.source, batch.experts, batch.masses, batch.steadiness
        return enumerating.local_losses(self.menu, layer, *rows)

    @cached_property
    def menu(self) -> Menu:
        """The same arrays in the form that the compiled loops read."""
        server, delay_s = kernels.all_nearest_hosts(self.cost.links, kernels.plain(self.hosts))
        stand_ins = self.stand_ins or StandIns.none(*self.hosts.shape)
        arrays = {
            "hosts": self.hosts,
            "best_server": server,
            "best_s": delay_s,
            "substitutes": self.substitutes,
            "substitution_loss": self.substitution_loss,
            "feasible": self.feasible & self.levers.substitute,
            "drop_edges": self.drop.edges,
            "drop_upper": self.drop.upper,
            "skip_edges": self.skip.edges,
            "skip_upper": self.skip.upper,
            "theta": self.theta,
            "theta_drop": self.theta_drop,
            "stand_in": stand_ins.number,
            "stand_in_edges": stand_ins.edges,
            "stand_in_upper": stand_ins.upper,
        }
        return Menu(
            links=self.cost.links,
            **{name: kernels.plain(array) for name, array in arrays.items()},
            drops=self.levers.drop_slots,
            skips=self.levers.skip,
            settles=not self.levers.local,
            stands_in=self.stand_ins is not None,
        )

    def candidates(
        self,
        layer: int,
        source: int | IntArray,
        destination: int | None,
        *,
        experts: IntArray,
        masses: FloatArray,
        importance: FloatArray,
        steadiness: IntArray,
    ) -> Candidates:
        """Actions of n tokens on their source servers [n], or the one that they share.

        `destination` is kappa(l+1), or None under `migrate`, where each action chooses it.
        `experts`, `masses`: activated set and softmax masses [n, k], first expert first;
        `importance`, `steadiness` [n].
        """
        assert (destination is None) == (self.cost.accounting is Accounting.MIGRATE)
        here = np.broadcast_to(source, importance.shape)
        there = here if destination is None else np.full(importance.shape, destination)
        batch = as_batch(experts, masses, importance, steadiness, here, there)
        local = self.served_locally(layer, source, experts, masses, steadiness)
        if destination is not None:
            return self._toward(layer, batch, local, first_at=None)
        return _exact_first(self._everywhere(layer, batch, local), self.cost.server_count, here)

    def _everywhere(self, layer: int, batch: Batch, local_loss: FloatArray) -> Candidates:
        """`_toward` each of the servers in turn, [n, M x C]."""
        servers, count = self.cost.server_count, batch.source.size
        place = np.tile(np.arange(servers), count)
        each = Batch._make(np.repeat(column, servers, axis=0) for column in batch)
        actions = self._toward(
            layer,
            each._replace(destination=place),
            np.repeat(local_loss, servers),
            first_at=place,
        )
        columns = {}
        for name in _PER_ACTION:
            array = getattr(actions, name)
            columns[name] = array.reshape(count, servers * array.shape[1], *array.shape[2:])
        return replace(actions, local_loss=local_loss, **columns)

    def _toward(
        self, layer: int, batch: Batch, local_loss: FloatArray, *, first_at: IntArray | None
    ) -> Candidates:
        """Actions whose result gathers at the batch's destination; the last column skips.

        With `first_at` [n], the first slot must run there: under `migrate` that is what moves the
        token.
        """
        actions = self.enumerate(layer, batch, first_at=first_at)
        count, columns = actions.loss.shape
        skips = np.zeros((count, columns), dtype=bool)
        skips[:, -1] = True
        return Candidates(
            slot_expert=actions.expert,
            slot_server=actions.server,
            destination=np.repeat(batch.destination[:, None], columns, axis=1),
            delay_s=actions.delay_s,
            loss=actions.loss,
            skips=skips,
            local_loss=local_loss,
            skip_needs_transmission=self.levers.skip_needs_transmission,
        )

    def enumerate(self, layer: int, batch: Batch, *, first_at: IntArray | None = None) -> Actions:
        """Every action of n tokens that may be worth taking; column 0 exact, the last the skip."""
        count, slots = batch.experts.shape
        columns = 2 + slots * enumerating.choices_of(self.menu)
        actions = Actions(
            np.empty((count, columns, slots), dtype=np.int64),
            np.empty((count, columns, slots), dtype=np.int64),
            np.empty((count, columns)),
            np.empty((count, columns)),
        )
        first = np.full(count, -1) if first_at is None else kernels.plain(first_at)
        enumerating.enumerate_actions(self.menu, layer, batch, first, actions)
        return actions


def as_batch(
    experts: IntArray,
    masses: FloatArray,
    importance: FloatArray,
    steadiness: IntArray,
    source: IntArray,
    destination: IntArray,
) -> Batch:
    """Tokens in the form that the compiled loops read: contiguous, of one type each."""
    whole = (experts, steadiness, source, destination)
    experts, steadiness, source, destination = (kernels.plain(array, np.int64) for array in whole)
    return Batch(
        experts=experts,
        masses=kernels.plain(masses, np.float64),
        importance=kernels.plain(importance, np.float64),
        steadiness=steadiness,
        source=source,
        destination=destination,
    )


def _exact_first(everywhere: Candidates, servers: int, here: IntArray) -> Candidates:
    """The actions towards each server [n, M x C], the fastest exact one in column 0; of the skips,
    which stay where the token is, that on its server `here` [n], last."""
    index = np.arange(everywhere.loss.shape[1]).reshape(servers, -1)
    exact, executing = index[:, 0], index[:, :-1].ravel()
    rows = np.arange(here.size)
    order = np.column_stack([np.tile(executing, (here.size, 1)), index[here, -1]])
    fastest = everywhere.delay_s[:, exact].argmin(1)
    order[rows, 0], order[rows, fastest * (index.shape[1] - 1)] = exact[fastest], exact[0]
    columns = {name: getattr(everywhere, name)[rows[:, None], order] for name in _PER_ACTION}
    return replace(everywhere, **columns)


_PER_ACTION = ("slot_expert", "slot_server", "destination", "delay_s", "loss", "skips")
