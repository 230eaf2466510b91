"""Plans for servers that join: first by a cluster file, or by what machines say of themselves where
there is none, then by what was measured of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from rich.console import Console

from trimmoe.core.plan import Plan
from trimmoe.core.specs import ClusterSpec, IntArray
from trimmoe.experiments.drifting import Drift
from trimmoe.experiments.explain import explain_plan
from trimmoe.experiments.measuring import measured
from trimmoe.experiments.preparation import profile_of, searched_plan, wanted
from trimmoe.experiments.sample_text import sample_text
from trimmoe.placement.capacity import used_bytes
from trimmoe.placement.moving import too_large_beside
from trimmoe.placement.stand_ins import copies_bytes
from trimmoe.runtime.launch.addresses import Endpoint
from trimmoe.runtime.launch.artifacts import Artifacts, model_spec_of
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.deployment import Hello
from trimmoe.runtime.launch.head import ServerView
from trimmoe.runtime.launch.lookout import Glance
from trimmoe.runtime.launch.whoever import NO_ROOM

Say = Callable[[str], None]
_MEMORY_SHARE = 0.7
"""Of what is free on a machine, for weights; the rest is for caches and batches."""
_PROCESS_BYTES = 600e6
"""What a server takes beside that."""
_FLOPS_PER_CORE_S = 50e9
_LINK_BYTES_PER_S, _LINK_S = 1e9 / 8, 1e-3
"""Nominal, until measured."""


class JoinedPlanner:
    """`Planner` of `trimmoe serve --head`."""

    def __init__(
        self, config: ServeConfig, say: Say, console: Console, cluster: ClusterSpec | None
    ) -> None:
        """Calibrates if need be; `cluster` is what a file says. Raises `UserError`."""
        self._config, self._say, self._console = config, say, console
        self._cluster = cluster
        self._model = model_spec_of(config)
        self._drift: Drift | None = None
        self._free_bytes: dict[str, int] = {}
        """On the machine of each server, beside what it served when it was measured."""
        self._profile = profile_of(config, self._model, lambda: sample_text("calibration"), say)

    def nominal(self, joined: Mapping[str, Hello]) -> Artifacts:
        """A plan by the cluster file; without one by memory and cores, over links that are all
        alike. Raises `UserError`."""
        known = self._cluster
        return self._artifacts(joined_cluster(joined) if known is None else known.among([*joined]))

    def measured(
        self, now: Artifacts, where: Sequence[Endpoint], servers: Sequence[ServerView]
    ) -> Artifacts:
        """Measure servers that run by `now`, and plan again; shows the plan."""
        machines = measured(self._exact, now, where, servers)
        cluster = machines.applied(now.plan.cluster, self._model, self._config.quantise)
        made = self._artifacts(cluster)
        self._drift = Drift(
            profile=self._profile,
            model=self._model,
            precision=self._config.quantise,
            nominal=now.plan.cluster,
            machines=machines,
            search=wanted(self._config)[0],
        )
        explain_plan(made.plan, made.profile, made.model, self._console, lambda: True)
        self._free_bytes = dict(
            zip(machines.server_names, machines.free_bytes.tolist(), strict=True)
        )
        return made

    def short_beside(self, made: Artifacts, joined: Mapping[str, Hello]) -> str:
        """Servers of machines without memory for a plan beside what they serve, or had free when
        they joined; empty if there are none."""
        names = made.plan.cluster.server_names
        free = [self._free_bytes.get(name, joined[name].memory_bytes) for name in names]
        machine = [joined[name].address for name in names]
        return self._short(made.plan, np.array(free), np.unique(machine, return_inverse=True)[1])

    def drifted(self, now: Artifacts, told: Sequence[Glance], moving_s: float) -> Artifacts | None:
        """A plan that is better by more than moving to it costs, since machines have changed; None
        while there is none. Raises `UserError`."""
        if self._drift is None:
            return None
        made = self._drift.look(now.plan, told, moving_s, self._planned)
        if made is None:
            return None
        machines = self._drift.machines
        if short := self._short(made, machines.free_bytes, machines.machine):
            self._say(NO_ROOM.format(short))
            return None
        return replace(now, plan=made)

    def _short(self, plan: Plan, free_bytes: IntArray, machine: IntArray) -> str:
        """Servers of machines that cannot load a plan beside what serves; arrays [M] as of
        `too_large_beside`."""
        needed = used_bytes(plan.hosts, self._model) + self._model.dense_bytes + int(_PROCESS_BYTES)
        if plan.stand_in_bits is not None:
            needed = needed + copies_bytes(self._model, plan.stand_in_bits)
        short = too_large_beside(needed, free_bytes, machine)
        names = zip(plan.cluster.server_names, machine.tolist(), strict=True)
        return ", ".join(name for name, at in names if at in short)

    @property
    def wavers(self) -> bool:
        """Whether another look soon would settle it."""
        return self._drift is not None and self._drift.wavers

    @property
    def _exact(self) -> ServeConfig:
        return self._config.model_copy(update={"policy": "exact", "method": None, "budget": None})

    def _artifacts(self, cluster: ClusterSpec) -> Artifacts:
        return Artifacts(profile=self._profile, plan=self._planned(cluster), model=self._model)

    def _planned(self, cluster: ClusterSpec) -> Plan:
        config = self._config
        search, settings = wanted(config)
        told = repr((cluster.server_names, cluster.memory_bytes.tolist()))
        identity = hashlib.sha256(told.encode()).hexdigest()
        return searched_plan(
            self._profile, self._model, cluster, search, settings, identity, survive=config.survive
        )


def joined_cluster(joined: Mapping[str, Hello]) -> ClusterSpec:
    """What machines say of themselves; servers of one machine share what it has."""
    count = len(joined)
    hosted = np.array([len(each.servers) for each in joined.values()])
    free = np.array([each.memory_bytes for each in joined.values()]) * _MEMORY_SHARE / hosted
    cores = np.array([each.cores for each in joined.values()])
    bandwidth, delay_s = (
        np.full((count, count), _LINK_BYTES_PER_S),
        np.full((count, count), _LINK_S),
    )
    np.fill_diagonal(bandwidth, np.inf)
    np.fill_diagonal(delay_s, 0.0)
    return ClusterSpec(
        name="joined",
        server_names=tuple(joined),
        memory_bytes=np.maximum(free - _PROCESS_BYTES, 0.0).astype(np.int64),
        memory_ratio=None,
        flops_per_s=cores * _FLOPS_PER_CORE_S / hosted,
        access_share=np.full(count, 1.0 / count),
        bandwidth_bytes_per_s=bandwidth,
        delay_s=delay_s,
    )
