"""What the servers of a cluster and their links were measured to do: the artifact of a probe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
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
from trimmoe.core.contents import amount, count, require_contents, share
from trimmoe.core.errors import UserError
from trimmoe.core.precision import Precision
from trimmoe.core.specs import (
    BATCHES,
    BoolArray,
    ClusterSpec,
    FloatArray,
    IntArray,
    ModelSpec,
    Speeds,
)

MACHINES_KIND = "machines"
MACHINES_FORMAT = 1
SLOWEST_FACTOR = 10.0
"""What no server can have measured is taken at so many times the slowest of the others."""

AS_SAID, NOTICED_S = 0.25, 0.0003
"""Links that differ from what is said of them by no more than this share and so many seconds are
taken to be what is said."""


class Work(IntEnum):
    """Kinds of work that are timed."""

    DENSE = 0
    """Attention, router and shared expert of one layer."""
    EXPERT = 1
    """One routed expert."""
    HEAD = 2
    """What follows the last layer."""
    DRAFT = 3
    """All layers with the experts at hand: a server's own guess."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """M servers that were timed with W kinds of work in B sizes of batches."""

    header: Header
    cluster_name: str
    server_names: tuple[str, ...]
    model_hash: str
    precision: Precision
    batches: IntArray
    """Rows of each size, [B]."""
    work_s: FloatArray
    """Median of each server alone, [M, W, B] seconds."""
    low_s: FloatArray
    """The tenth percentile, [M, W, B]."""
    high_s: FloatArray
    """The ninetieth, [M, W, B]."""
    together: FloatArray
    """How many times as long work takes while all servers work at once: more than one where they
    share a machine, [M]."""
    machine: IntArray
    """Number of the machine that each server runs on, [M]."""
    free_bytes: IntArray
    """Memory that nobody had taken, [M]."""
    delay_s: FloatArray
    """One way; zero on the diagonal, NaN where unknown, [M, M]."""
    bandwidth_bytes_per_s: FloatArray
    """Infinite on the diagonal, NaN where unknown, [M, M]."""
    jitter_s: FloatArray
    """How much longer than the shortest a round trip takes on average, NaN where unknown, [M, M].
    """
    software_s: FloatArray
    """What the interpreter takes for a fixed piece of work, [M]."""
    hop_s: FloatArray
    """As in `Speeds`, [M]."""
    token_s: FloatArray
    """As in `Speeds`, [M]."""
    head_right: float = 0.0
    """As in `Speeds`."""
    naming_s: FloatArray | None = None
    """As in `Speeds`."""
    cold: FloatArray | None = None
    """How many times as long a few rows take where caches hold the weights of other servers of the
    machine, [M, W, B]; None where that is not known."""

    def save(self, path: Path) -> None:
        """Write to `path`, atomically."""
        save_artifact(path, self.header, self._arrays())

    @property
    def hash(self) -> str:
        return arrays_hash(self.header, self._arrays())

    def _arrays(self) -> dict[str, np.ndarray]:
        found = {name: getattr(self, name) for name in _ARRAYS}
        if self.head_right:
            found[_HEAD] = np.array([self.head_right])
        if self.cold is not None:
            found[_COLD] = self.cold
        return found if self.naming_s is None else found | {_NAMING: self.naming_s}

    @property
    def among_others_s(self) -> FloatArray:
        """What work takes by the side of the other servers of a machine while these wait, [M, W, B]
        seconds: as in decoding, where one works after the other."""
        return self.work_s if self.cold is None else self.work_s * self.cold

    def batch_times(self) -> tuple[float, ...]:
        """As in `Speeds`: of what layers take, over all servers."""
        taken_s = self.among_others_s[:, [Work.DENSE, Work.EXPERT]].sum(axis=(0, 1))
        at_s = np.interp(BATCHES, self.batches, taken_s)
        return tuple(np.maximum.accumulate(at_s / at_s[0]).tolist())

    def at_once(self) -> FloatArray:
        """Servers of the machine of each that may work at once without holding one another up: as
        many as there are over what all of them together take longer, [M]."""
        found = np.empty(self.machine.size)
        for machine in np.unique(self.machine):
            here = self.machine == machine
            found[here] = here.sum() / max(float(self.together[here].mean()), 1.0)
        return np.maximum(found, 1.0)

    def speeds(self) -> Speeds:
        """For plans."""
        row_s = self.among_others_s[:, :, 0]
        return Speeds(
            dense_s=row_s[:, Work.DENSE],
            expert_s=row_s[:, Work.EXPERT],
            head_s=row_s[:, Work.HEAD],
            draft_s=row_s[:, Work.DRAFT],
            hop_s=self.hop_s,
            token_s=self.token_s,
            machine=self.machine,
            at_once=self.at_once(),
            batch_times=self.batch_times(),
            head_right=self.head_right,
            naming_s=self.naming_s,
        )

    def applied(self, cluster: ClusterSpec, model: ModelSpec, precision: Precision) -> ClusterSpec:
        """The cluster with what was measured in the place of nominal figures.

        Links that nobody measured stay as they are, and so do those that are what was said of them:
        where they are emulated, by that. Raises `UserError` where the two do not belong together.
        """
        if cluster.server_names != self.server_names:
            raise UserError(
                f"The servers measured are {', '.join(self.server_names)}, those of the cluster "
                f"{', '.join(cluster.server_names)}; run `trimmoe probe` with this cluster file."
            )
        if (model.model_hash, precision) != (self.model_hash, self.precision):
            raise UserError(
                f"The machines were measured with another model or precision than {model.name} "
                f"({precision}); run `trimmoe probe` with it."
            )
        apart_s = np.abs(self.delay_s - cluster.delay_s)
        known = apart_s > AS_SAID * cluster.delay_s + NOTICED_S
        with np.errstate(invalid="ignore", divide="ignore"):
            wide = np.abs(self.bandwidth_bytes_per_s / cluster.bandwidth_bytes_per_s - 1) > AS_SAID
        layer_flops, said = model.layer_dense_flops.mean(), cluster.said_flops_per_s
        return replace(
            cluster,
            delay_s=np.where(known, self.delay_s, cluster.delay_s),
            bandwidth_bytes_per_s=np.where(
                wide, self.bandwidth_bytes_per_s, cluster.bandwidth_bytes_per_s
            ),
            flops_per_s=layer_flops / self.among_others_s[:, Work.DENSE, 0],
            speeds=self.speeds(),
            said_flops_per_s=cluster.flops_per_s if said is None else said,
        )


_ARRAYS = (
    "batches", "work_s", "low_s", "high_s", "together", "machine", "free_bytes", "delay_s",
    "bandwidth_bytes_per_s", "jitter_s", "software_s", "hop_s", "token_s",
)  # fmt: skip
_HEAD, _NAMING, _COLD = "head_right", "naming_s", "cold"


_TIME = replace(amount("M W B"), least=1e-12)
_FIELDS = {
    "batches": replace(count("B"), least=1),
    "work_s": _TIME,
    "low_s": amount("M W B"),
    "high_s": amount("M W B"),
    "together": amount("M"),
    "machine": count("M"),
    "free_bytes": count("M"),
    "delay_s": amount("M M", unknown=True),
    "bandwidth_bytes_per_s": amount("M M", endless=True, unknown=True),
    "jitter_s": amount("M M", unknown=True),
    **{name: amount("M") for name in ("software_s", "hop_s", "token_s")},
    _HEAD: share("1", optional=True),
    _NAMING: replace(amount("M"), optional=True),
    _COLD: replace(amount("M W B"), least=1.0, optional=True),
}
"""What is in the file."""
assert _FIELDS.keys() == {*_ARRAYS, _HEAD, _NAMING, _COLD}


def load_machines(path: Path) -> Machines:
    """Read what was measured; raises `UserError` if it is missing, damaged or of another format."""
    header, arrays = load_artifact(path, kind=MACHINES_KIND, format_version=MACHINES_FORMAT)
    with undamaged(path, MACHINES_KIND):
        names = read_names(header, "server_names")
        require_contents(arrays, _FIELDS, M=len(names), W=len(Work))
        head_right = float(arrays.pop(_HEAD, np.zeros(1))[0])
        return Machines(
            header=header,
            cluster_name=str(header.extra["cluster_name"]),
            server_names=names,
            model_hash=header.input_hashes["model"],
            precision=Precision(header.extra["precision"]),
            head_right=head_right,
            **arrays,
        )


def machines_header(
    cluster: ClusterSpec,
    precision: Precision,
    *,
    settings: Mapping[str, object],
    input_hashes: Mapping[str, str],
) -> Header:
    """The header of what was measured; `input_hashes` names at least `model`."""
    assert "model" in input_hashes
    return Header(
        kind=MACHINES_KIND,
        format_version=MACHINES_FORMAT,
        settings=dict(settings),
        input_hashes=dict(input_hashes),
        extra={
            "cluster_name": cluster.name,
            "server_names": list(cluster.server_names),
            "precision": str(precision),
        },
    )


def plausible(measured: FloatArray, known: BoolArray) -> FloatArray:
    """Measured times [M, ...] with nonsense of a server taken at its slowest plausible.

    `known` [M] says who answered at all. What is no positive number, or of no server that did, is
    `SLOWEST_FACTOR` times the slowest of the others; raises `UserError` if there are none.
    """
    good = known.reshape(-1, *[1] * (measured.ndim - 1)) & np.isfinite(measured) & (measured > 0)
    if not good.any(axis=0).all():
        raise UserError("No server could be measured; look into their logs and try again.")
    slowest = np.where(good, measured, 0.0).max(axis=0)
    return np.where(good, measured, SLOWEST_FACTOR * slowest)
