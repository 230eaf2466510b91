"""Replicas of whole layers, in runs along chains of servers: what single replicas cannot find.

A replica of one expert saves nothing while the other activated experts of its layer stay remote,
and a whole layer saves little while the route goes elsewhere for its neighbours; so greedy steps
by single replicas stop early. Here a step gives a run of consecutive layers to a chain of close
servers, each filled to its free memory, and is worth what it really saves: the drop in expected
exact delay per token when every access server then takes its best route. Steps are taken while
any saves, the largest saving first (not per byte: long runs would lose to their own beginnings).

Routes through a changed run are evaluated exactly by dynamic programming: the cost to arrive
before the run (`arrive`), through the run with its layers local to the chain, and the cost from
after it (`ahead`), which do not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trimmoe.core.profile import Profile
from trimmoe.core.specs import BoolArray, FloatArray, IntArray, ModelSpec
from trimmoe.cost.expected import expected_layer_delay_s, layer_table_s
from trimmoe.cost.model import CostModel
from trimmoe.placement.capacity import used_bytes

_CHAIN_LENGTH = 3
"""Servers in one step."""
_NEXT_SERVERS = 3
"""How many of the closest servers with room a chain may go on to."""
_LEAST_SAVING = 1e-6
"""Steps that save less than this share of the present delay are rounding, not savings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Consecutive layers from `first_layer`, each wholly on the server given for it."""

    first_layer: int
    servers: tuple[int, ...]
    saving_s: float
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """A step being grown; `cost_s` [A, M]: least cost to arrive on each server after it."""

    cost_s: FloatArray
    layer: int
    servers: tuple[int, ...]
    chain: tuple[int, ...]
    room: int
    size_bytes: int


class BlockSearch:
    """Hosts that grow by steps, with the tables that price a step; mutable, one plan's work.

    A = access servers with users, of shares `weight`.
    """

    def __init__(
        self,
        cost: CostModel,
        model: ModelSpec,
        profile: Profile,
        hosts: BoolArray,
        capacity: IntArray,
        access_share: FloatArray,
    ) -> None:
        self._cost, self._model, self._profile = cost, model, profile
        self._access = np.flatnonzero(access_share > 0)
        self._weight = access_share[self._access]
        self.hosts = hosts.copy()
        self._capacity = capacity
        self._delays = expected_layer_delay_s(cost, hosts, profile)
        self._whole = np.empty((cost.server_count, *self._delays.shape))
        self._refresh(range(cost.layer_count))

    def best_step(self) -> Step | None:
        """The step of largest saving, the first of equals; None if nothing saves."""
        best = max(self._steps(), key=lambda step: step.saving_s, default=None)
        if best is None or best.saving_s <= _LEAST_SAVING * self.expected_s:
            return None
        return best

    def take(self, step: Step) -> None:
        """Add the replicas of a step."""
        layers = range(step.first_layer, step.first_layer + len(step.servers))
        for layer, server in zip(layers, step.servers, strict=True):
            self.hosts[server, layer] = True
            self._delays[layer] = self._whole[server, layer]
        self._refresh(layers)

    def _refresh(self, changed: range) -> None:
        """Bring all tables up to date with `hosts`, of which the `changed` layers are new."""
        for server in range(self._cost.server_count):
            for layer in changed:
                self._whole[server, layer] = self._with_whole_layer(server, layer)
        held = np.einsum("mlk,lk->ml", self.hosts.astype(np.int64), self._model.expert_bytes)
        self._missing = self._model.expert_bytes.sum(axis=1)[None, :] - held
        self._free = self._capacity - used_bytes(self.hosts, self._model)
        self._arrive = self._arrivals()
        self._ahead = self._remainders()
        present = (self._arrive[0] + self._ahead[0]).min(axis=1)
        self.expected_s = float(self._weight @ present)

    def _with_whole_layer(self, server: int, layer: int) -> FloatArray:
        if self.hosts[server, layer].all():
            return self._delays[layer]
        held = self.hosts[:, layer].copy()
        held[server] = True
        return layer_table_s(self._cost, held, self._profile, layer)

    def _arrivals(self) -> list[FloatArray]:
        """Least cost to have each layer's token on each server, before the layer, [A, M] each."""
        arrive = [self._cost.enter_s[self._access]]
        for table in self._delays[:-1]:
            arrive.append(_through(arrive[-1], table))
        return arrive

    def _remainders(self) -> list[FloatArray]:
        """Least cost from each layer on, from each server; the last entry is the way back."""
        back = self._cost.token_transfer_s[:, self._access].T
        ahead = [back, back + self._delays[-1].diagonal()]
        for table in self._delays[-2::-1]:
            ahead.append(_through(ahead[-1], table.T))
        return ahead[::-1]

    def _steps(self) -> Iterator[Step]:
        for first_layer in range(self._cost.layer_count):
            for server in range(self._cost.server_count):
                start = _Run(
                    cost_s=self._arrive[first_layer],
                    layer=first_layer,
                    servers=(),
                    chain=(server,),
                    room=int(self._free[server]),
                    size_bytes=0,
                )
                yield from self._grown(start)

    def _grown(self, run: _Run) -> Iterator[Step]:
        """Every step that begins like `run`, each server filled before the next."""
        while run.layer < self._cost.layer_count:
            missing = int(self._missing[run.chain[-1], run.layer])
            if missing > run.room:
                break
            run = self._one_more(run, missing)
            if run.size_bytes:
                yield self._as_step(run)
        else:
            return
        if len(run.chain) == _CHAIN_LENGTH or not run.servers:
            return
        for server in self._next_servers(run):
            yield from self._grown(
                _Run(
                    cost_s=run.cost_s,
                    layer=run.layer,
                    servers=run.servers,
                    chain=(*run.chain, server),
                    room=int(self._free[server]),
                    size_bytes=run.size_bytes,
                )
            )

    def _next_servers(self, run: _Run) -> list[int]:
        """The closest servers outside the chain that have room for its next layer."""
        near = np.argsort(self._cost.transfer_s[run.chain[-1]], kind="stable").tolist()
        fit = self._missing[:, run.layer] <= self._free
        return [m for m in near if fit[m] and m not in run.chain][:_NEXT_SERVERS]

    def _one_more(self, run: _Run, missing: int) -> _Run:
        server = run.chain[-1]
        table = self._whole[server, run.layer]
        last = run.layer == self._cost.layer_count - 1
        return _Run(
            # The last layer's result stays where it is, for the head.
            cost_s=run.cost_s + table.diagonal() if last else _through(run.cost_s, table),
            layer=run.layer + 1,
            servers=(*run.servers, server),
            chain=run.chain,
            room=run.room - missing,
            size_bytes=run.size_bytes + missing,
        )

    def _as_step(self, run: _Run) -> Step:
        delay = (run.cost_s + self._ahead[run.layer]).min(axis=1)
        return Step(
            first_layer=run.layer - len(run.servers),
            servers=run.servers,
            saving_s=self.expected_s - float(self._weight @ delay),
            size_bytes=run.size_bytes,
        )


def _through(cost_s: FloatArray, table: FloatArray) -> FloatArray:
    """Least cost after one more layer, [A, M], from that before it and its table [M, M]."""
    return (cost_s[:, :, None] + table[None]).min(axis=1)


def add_blocks(
    cost: CostModel,
    model: ModelSpec,
    profile: Profile,
    hosts: BoolArray,
    capacity: IntArray,
    access_share: FloatArray,
) -> BoolArray:
    """`hosts` with the steps that save added, largest saving first, shape [M, N, E].

    Keeps (c.1) if `hosts` does; the expected delay on best routes never rises.
    """
    search = BlockSearch(cost, model, profile, hosts, capacity, access_share)
    while (step := search.best_step()) is not None:
        search.take(step)
    return search.hosts
