"""The feasible actions of a layer, what each costs and what it gives up (30-32, 34, 35).

An action says for every slot of the activated set which expert runs it and where: its target, a
feasible substitute, or nobody (dropped). Dropping all slots is the paper's skip. Delays couple the
slots only through a maximum, losses only through a sum, so the undominated combinations are found
by scanning delay caps: under each cap every slot takes its least lossy option that meets the cap.

Shapes: n tokens, k slots, O options per slot, C candidate actions per token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trimmoe.core.profile import LossCurves
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.cost.model import Accounting, CostModel, host_delay_s, layer_delay_s

DROPPED = -1
NO_ACTION_S = np.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class Levers:
    """Which approximations a policy may use; all off is exact execution."""

    substitute: bool = True
    drop_slots: bool = True
    """Drop single slots of an activated set; False is the paper's all-or-nothing skip."""
    skip: bool = True
    exit: bool = True
    skip_needs_transmission: bool = True
    """Admit a skip only if no local action is feasible: Gamma > 0 (35)."""

    @property
    def lossless(self) -> bool:
        return not (self.substitute or self.drop_slots or self.skip)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """Actions of n tokens; column 0 is always exact execution at least delay.

    Whether an action may be taken depends on the allowance: ask `allowed`.
    """

    slot_expert: IntArray
    """[n, C, k], -1 = dropped."""
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
        if self.skip_needs_transmission:
            # Gamma > 0 (35): a skip is pointless where an affordable action is local.
            allowed &= ~(self.skips & (self.local_loss <= allowance)[:, None])
        allowed[:, 0] = True
        return allowed


class _Options:
    """Per-slot choices of n tokens: expert, server, delay_s and loss, each [n, k, O]."""

    def __init__(self, expert: IntArray, server: IntArray, delay_s: FloatArray, loss: FloatArray):
        self.expert, self.server, self.delay_s, self.loss = expert, server, delay_s, loss

    def pick(self, choice: IntArray) -> tuple[IntArray, IntArray, FloatArray]:
        """Expert, server and summed loss of `choice` [n, C, k] (option index per slot)."""
        rows = np.arange(choice.shape[0])[:, None, None]
        columns = np.arange(choice.shape[2])
        at = (rows, columns, choice)
        return self.expert[at], self.server[at], self.loss[at].sum(-1)


@dataclass(frozen=True, kw_only=True)
class ActionSpace:
    """The feasible set A_{i,q,l} (34) on one deployment; pure look-ups in fixed arrays."""

    cost: CostModel
    hosts: BoolArray
    """x_{m,l,k}, [M, N, E]."""
    substitution_loss: FloatArray
    """Q_l(r, k), [N, E, E]."""
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

    @cached_property
    def substitutes(self) -> IntArray:
        """Feasible substitutes of every expert, least lossy first, -1 padded, [N, E, R]."""
        layers, experts, _ = self.feasible.shape
        loss = np.where(self.feasible, self.substitution_loss, np.inf)
        loss[:, np.arange(experts), np.arange(experts)] = np.inf
        limit = min(self.max_substitutes, experts - 1) if self.levers.substitute else 0
        order = np.argsort(loss, axis=-1, kind="stable")[:, :, :limit]
        usable = np.isfinite(np.take_along_axis(loss, order, axis=-1))
        assert order.shape == (layers, experts, limit)
        return np.where(usable, order, -1)

    @cached_property
    def _best_hosts(self) -> dict[tuple[int, int, int], tuple[IntArray, FloatArray]]:
        return {}

    @cached_property
    def local_loss(self) -> FloatArray:
        """Least loss of serving a target on a given server, inf if impossible, [M, N, E]."""
        experts = np.arange(self.hosts.shape[2])
        allowed = self.feasible if self.levers.substitute else np.zeros_like(self.feasible)
        loss = np.where(allowed, self.substitution_loss, np.inf)
        loss[:, experts, experts] = 0.0
        per_server = np.where(self.hosts[:, :, None, :], loss[None], np.inf)
        return per_server.min(-1)

    def best_hosts(self, layer: int, source: int, destination: int) -> tuple[IntArray, FloatArray]:
        """The server of least delay for each expert of a layer and that delay, each [E]."""
        key = (layer, source, destination)
        if key not in self._best_hosts:
            delay = host_delay_s(self.cost, layer, source, destination)
            delay = np.where(self.hosts[:, layer], delay, np.inf)
            servers = delay.argmin(0)
            self._best_hosts[key] = (servers, delay[servers, np.arange(delay.shape[1])])
        return self._best_hosts[key]

    def candidates(
        self,
        layer: int,
        source: int,
        destination: int | None,
        *,
        experts: IntArray,
        masses: FloatArray,
        importance: FloatArray,
    ) -> Candidates:
        """Actions of n tokens that share a source server.

        `destination` is kappa(l+1), or None under `migrate`, where each action chooses it.
        `experts`, `masses`: activated set and softmax masses [n, k], first expert first;
        `importance` [n].
        """
        assert (destination is None) == (self.cost.accounting is Accounting.MIGRATE)
        if destination is not None:
            parts = [self._toward(layer, source, destination, experts, masses)]
        else:
            everywhere = [
                self._toward(layer, source, place, experts, masses, first_at=place)
                for place in range(self.cost.server_count)
            ]
            parts = [_exact_first(everywhere)]
        stay = source if destination is None else destination
        parts.append(self._skip(layer, source, stay, experts, importance))
        return _joined(parts)

    def _toward(
        self,
        layer: int,
        source: int,
        destination: int,
        experts: IntArray,
        masses: FloatArray,
        *,
        first_at: int | None = None,
    ) -> Candidates:
        """Execute actions whose result gathers at one destination.

        With `first_at`, the first slot must run there: under `migrate` that is what moves the
        token.
        """
        options = self._options(layer, source, destination, experts, masses, first_at)
        choice, possible = _under_caps(options)
        slot_expert, slot_server, loss = options.pick(choice)
        shape = loss.shape
        sources, places = np.full(shape, source), np.full(shape, destination)
        delay = layer_delay_s(self.cost, layer, sources, places, slot_expert, slot_server)
        exact = (choice == 0).all(-1)
        runs = (slot_expert != DROPPED).any(-1)
        return Candidates(
            slot_expert=slot_expert,
            slot_server=slot_server,
            destination=places,
            delay_s=np.where(possible & runs, delay, NO_ACTION_S),
            loss=np.where(exact, 0.0, loss),
            skips=np.zeros(shape, dtype=bool),
            local_loss=self.local_loss[source, layer][experts].sum(-1),
            skip_needs_transmission=self.levers.skip_needs_transmission,
        )

    def _options(
        self,
        layer: int,
        source: int,
        destination: int,
        experts: IntArray,
        masses: FloatArray,
        first_at: int | None,
    ) -> _Options:
        """Target, substitutes and drop of every slot, in this order along the last axis."""
        server_of, delay_of = self.best_hosts(layer, source, destination)
        substitutes = self.substitutes[layer][experts]
        taken = (substitutes[..., None] == experts[:, None, None, :]).any(-1)
        runs = np.concatenate([experts[..., None], np.where(taken, -1, substitutes)], axis=-1)
        known = np.maximum(runs, 0)
        delay = np.where(runs >= 0, delay_of[known], np.inf)
        server = server_of[known]
        if first_at is not None:
            here = self.hosts[first_at, layer][known[:, 0]] & (runs[:, 0] >= 0)
            alone = host_delay_s(self.cost, layer, source, destination)[first_at]
            delay[:, 0] = np.where(here, alone[known[:, 0]], np.inf)
            server[:, 0] = first_at
        loss = self.substitution_loss[layer][experts[..., None], known]
        loss[..., 0] = 0.0
        if not (self.levers.drop_slots and experts.shape[1] > 1):
            return _Options(runs, server, delay, loss)
        dropped_loss = self.drop.upper_at(layer, masses)[..., None]
        admitted = (masses <= self.theta_drop[layer])[..., None]
        if first_at is not None:
            admitted[:, 0] = False
        return _Options(
            np.concatenate([runs, np.full_like(runs[..., :1], DROPPED)], axis=-1),
            np.concatenate([server, np.full_like(server[..., :1], source)], axis=-1),
            np.concatenate([delay, np.where(admitted, 0.0, np.inf)], axis=-1),
            np.concatenate([loss, dropped_loss], axis=-1),
        )

    def _skip(
        self,
        layer: int,
        source: int,
        destination: int,
        experts: IntArray,
        importance: FloatArray,
    ) -> Candidates:
        """The skip action of each token (32), one column."""
        admitted = (importance <= self.theta[layer]) & self.levers.skip
        delay = self.cost.transfer_s[source, destination]
        slots = (experts.shape[0], 1, experts.shape[1])
        return Candidates(
            slot_expert=np.full(slots, DROPPED),
            slot_server=np.full(slots, source),
            destination=np.full(slots[:2], destination),
            delay_s=np.where(admitted, delay, NO_ACTION_S)[:, None],
            loss=self.skip.upper_at(layer, importance)[:, None],
            skips=np.ones(slots[:2], dtype=bool),
            local_loss=self.local_loss[source, layer][experts].sum(-1),
            skip_needs_transmission=self.levers.skip_needs_transmission,
        )


def _exact_first(parts: list[Candidates]) -> Candidates:
    """Join per-destination actions so that column 0 is the fastest exact one."""
    joined = _joined(parts)
    exact_columns = np.cumsum([0] + [part.delay_s.shape[1] for part in parts[:-1]])
    fastest = exact_columns[joined.delay_s[:, exact_columns].argmin(1)]
    rows = np.arange(fastest.size)
    order = np.tile(np.arange(joined.delay_s.shape[1]), (fastest.size, 1))
    order[rows, 0], order[rows, fastest] = fastest, 0
    return take_columns(joined, order)


def _under_caps(options: _Options) -> tuple[NDArray[np.int64], BoolArray]:
    """Option per slot under every delay cap: choice [n, C, k] and whether it exists [n, C].

    Column 0 is the exact action; the caps are the distinct delays that some option has.
    """
    count, slots, per_slot = options.delay_s.shape
    caps = options.delay_s.reshape(count, slots * per_slot)
    meets = options.delay_s[:, None] <= caps[:, :, None, None]
    meets &= np.isfinite(options.delay_s)[:, None]
    # Among equally lossy options the faster one; loss dominates because it is compared first.
    order = np.lexsort((options.delay_s, options.loss), axis=-1)
    rank = np.argsort(order, axis=-1)
    ranked = np.where(meets, rank[:, None], per_slot)
    choice = ranked.argmin(-1)
    possible = (ranked.min(-1) < per_slot).all(-1) & np.isfinite(caps)
    exact = np.zeros((count, 1, slots), dtype=np.int64)
    reachable = np.isfinite(options.delay_s[..., 0]).all(-1, keepdims=True)
    return np.concatenate([exact, choice], axis=1), np.concatenate([reachable, possible], axis=1)


_PER_ACTION = ("slot_expert", "slot_server", "destination", "delay_s", "loss", "skips")


def _joined(parts: list[Candidates]) -> Candidates:
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts], axis=1)
        for name in _PER_ACTION
    }
    return replace(parts[0], **columns)


def take_columns(candidates: Candidates, columns: IntArray) -> Candidates:
    """The actions `columns` [n, C'] of each token, in that order."""
    rows = np.arange(columns.shape[0])[:, None]
    return replace(
        candidates, **{name: getattr(candidates, name)[rows, columns] for name in _PER_ACTION}
    )
