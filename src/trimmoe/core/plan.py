"""The plan: who holds which experts, and on which route each access server's sequences run."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from trimmoe.core.artifact import (
    Header,
    arrays_hash,
    load_artifact,
    read_names,
    save_artifact,
    undamaged,
)
from trimmoe.core.contents import Kept, amount, count, require_contents, share
from trimmoe.core.profile import Profile
from trimmoe.core.specs import (
    BATCHES,
    DEVICE,
    BoolArray,
    ClusterSpec,
    IntArray,
    Speeds,
    straight_times,
)
from trimmoe.core.stand_ins import RUNGS

PLAN_KIND = "plan"
PLAN_FORMAT = 1
STAND_IN_BITS = (0, *RUNGS)
"""That a copy of an expert may have; 0 where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A deployment X with its routes, on the cluster it was made for."""

    header: Header
    cluster: ClusterSpec
    hosts: BoolArray
    """x_{m,l,k} of (c.2), shape [M, N, E]."""
    routes: IntArray
    """kappa: the server that runs attention, KV cache and router of each MoE layer for sequences
    that enter at each server, shape [M (access), N]."""
    expert_capacity_bytes: IntArray
    """C_m of (c.1): memory left for experts, shape [M]."""
    stand_in_bits: IntArray | None = None
    """Bits of the copies that stand in for experts a server does not hold; 0 where it has none,
    shape [M, N, E]."""

    def save(self, path: Path) -> None:
        """Write the plan to `path`, atomically."""
        save_artifact(path, self.header, self._arrays())

    def inflation(self, budget: float) -> float:
        """gamma: how much more than its parts a policy's approximations flip together, as measured
        with the budget nearest to this one; 1 if it was never measured."""
        measured: dict[str, float] = self.header.settings.get("inflation", {})
        if not measured or budget <= 0:
            return 1.0
        nearest = min(measured, key=lambda known: abs(float(known) - budget))
        return float(measured[nearest])

    def with_inflation(self, measured: dict[float, float]) -> Plan:
        """The same plan with gamma measured at some budgets."""
        known = {str(budget): gamma for budget, gamma in measured.items()}
        settings = self.header.settings | {"inflation": known}
        return replace(self, header=replace(self.header, settings=settings))

    def _stand_ins(self) -> dict[str, np.ndarray]:
        bits = self.stand_in_bits
        return {} if bits is None else {"stand_in_bits": bits.astype(np.uint8)}

    def is_of(self, profile: Profile) -> bool:
        """Whether it was made from this profile."""
        same = self.header.input_hashes["profile"] == profile.hash
        return same and self.hosts.shape[1:] == (profile.layer_count, profile.expert_count)

    @property
    def hash(self) -> str:
        return arrays_hash(self.header, self._arrays())

    def _arrays(self) -> dict[str, np.ndarray]:
        cluster = self.cluster
        said = cluster.said_flops_per_s
        return {f"{_SPEEDS}{name}": array for name, array in _measured(cluster).items()} | {
            "hosts": self.hosts.astype(np.uint8),
            **self._stand_ins(),
            "routes": self.routes,
            "expert_capacity_bytes": self.expert_capacity_bytes,
            "cluster.memory_bytes": cluster.memory_bytes,
            "cluster.flops_per_s": cluster.flops_per_s,
            "cluster.access_share": cluster.access_share,
            "cluster.bandwidth_bytes_per_s": cluster.bandwidth_bytes_per_s,
            "cluster.delay_s": cluster.delay_s,
            **({} if said is None else {_SAID: said}),
        }


def _stand_in_bits(arrays: dict[str, np.ndarray]) -> IntArray | None:
    found = arrays.get("stand_in_bits")
    if found is None:
        return None
    if not np.isin(found, STAND_IN_BITS).all():
        raise ValueError("stand_in_bits holds impossible values")
    return found.astype(np.int64)


def load_plan(path: Path) -> Plan:
    """Read a plan; raises `UserError` if it is missing, damaged or of another format."""
    header, arrays = load_artifact(path, kind=PLAN_KIND, format_version=PLAN_FORMAT)
    with undamaged(path, PLAN_KIND):
        names = read_names(header, "server_names")
        require_contents(arrays, _FIELDS, M=len(names), B=len(BATCHES))
        _require_header(header, len(names))
        cluster = ClusterSpec(
            name=header.extra["cluster_name"],
            server_names=names,
            memory_ratio=header.extra["memory_ratio"],
            memory_bytes=arrays["cluster.memory_bytes"],
            flops_per_s=arrays["cluster.flops_per_s"],
            access_share=arrays["cluster.access_share"],
            bandwidth_bytes_per_s=arrays["cluster.bandwidth_bytes_per_s"],
            delay_s=arrays["cluster.delay_s"],
            devices=tuple(header.extra.get("devices", ())),
            speeds=_speeds(arrays),
            said_flops_per_s=arrays.get(_SAID),
        )
        return Plan(
            header=header,
            cluster=cluster,
            hosts=arrays["hosts"].astype(bool),
            routes=arrays["routes"],
            expert_capacity_bytes=arrays["expert_capacity_bytes"],
            stand_in_bits=_stand_in_bits(arrays),
        )


def _require_header(header: Header, servers: int) -> None:
    """Raise `ValueError` or `KeyError` unless the header is a plan's."""
    extra, hashes = header.extra, header.input_hashes
    ratio, devices = extra["memory_ratio"], extra.get("devices", [])
    measured = header.settings.get("inflation", {})
    good = (
        isinstance(extra["cluster_name"], str)
        and bool(hashes["model"] and hashes["profile"])
        and (ratio is None or (isinstance(ratio, int | float) and 0 < ratio < math.inf))
        and isinstance(devices, list)
        and len(devices) in (0, servers)
        and all(re.fullmatch(DEVICE, str(each)) for each in devices)
        and isinstance(measured, dict)
        and all(0 <= float(budget) < math.inf for budget in measured)
        and all(isinstance(each, int | float) and 0 < each < 1e6 for each in measured.values())
    )
    if not good:
        raise ValueError("its header")


_SPEEDS = "cluster.speeds."
"""What the names of arrays of what was measured begin with."""
_TIMED = ("dense_s", "expert_s", "head_s", "draft_s", "hop_s", "token_s", "at_once", "naming_s")
_TIMES, _SHARE = "batch_times", "batch_share"
"""What batches take; earlier versions wrote what share of a row's time one needs only once."""
_SAID = "cluster.said_flops_per_s"
_FIELDS = {
    "hosts": count("M N E", 1),
    "stand_in_bits": replace(count("M N E", max(STAND_IN_BITS)), optional=True),
    "routes": count("M N", "M"),
    "expert_capacity_bytes": Kept(axes="M", whole=True),
    "cluster.memory_bytes": count("M"),
    "cluster.flops_per_s": amount("M"),
    _SAID: replace(amount("M"), optional=True),
    "cluster.access_share": share("M"),
    "cluster.bandwidth_bytes_per_s": amount("M M", endless=True),
    "cluster.delay_s": amount("M M"),
    **{f"{_SPEEDS}{name}": replace(amount("M"), optional=True) for name in _TIMED},
    f"{_SPEEDS}machine": replace(count("M"), optional=True),
    **{f"{_SPEEDS}{name}": share("1", optional=True) for name in (_SHARE, "head_right")},
    f"{_SPEEDS}{_TIMES}": replace(amount("B"), optional=True),
}
"""What is in the file: M servers, N MoE layers of E experts."""


def _measured(cluster: ClusterSpec) -> dict[str, np.ndarray]:
    """What was measured of the cluster, if anything."""
    speeds = cluster.speeds
    if speeds is None:
        return {}
    of_all = {_TIMES: np.array(speeds.batch_times)}
    if speeds.head_right:
        of_all["head_right"] = np.array([speeds.head_right])
    return {**speeds.arrays(), **of_all}


def _speeds(arrays: dict[str, np.ndarray]) -> Speeds | None:
    found = {
        name.removeprefix(_SPEEDS): array
        for name, array in arrays.items()
        if name.startswith(_SPEEDS)
    }
    if not found:
        return None
    share, right = (float(found.pop(name, np.zeros(1))[0]) for name in (_SHARE, "head_right"))
    times = tuple(found.pop(_TIMES, np.array(straight_times(share))).tolist())
    return Speeds(**found, batch_times=times, head_right=right)


def plan_header(
    cluster: ClusterSpec, *, settings: dict, input_hashes: dict[str, str], seed: int
) -> Header:
    """The header of a plan for `cluster`; `input_hashes` names at least `model` and `profile`."""
    assert {"model", "profile"} <= input_hashes.keys()
    return Header(
        kind=PLAN_KIND,
        format_version=PLAN_FORMAT,
        settings=settings,
        input_hashes=input_hashes,
        seed=seed,
        extra={
            "cluster_name": cluster.name,
            "server_names": list(cluster.server_names),
            "devices": list(cluster.devices),
            "memory_ratio": cluster.memory_ratio,
        },
    )
