"""Servers that were timed, in tests."""

from __future__ import annotations

import numpy as np

from trimmoe.core.machines import BATCHES, Machines, machines_header
from trimmoe.core.precision import Precision
from trimmoe.core.specs import ClusterSpec, ModelSpec


def timed_machines(
    cluster: ClusterSpec, model: ModelSpec, *, hop_s: float = 0.0, token_s: float = 0.0
) -> Machines:
    """Server m takes (m + 1) ms for a layer, a tenth for an expert, three times it for the head and
    twenty times it to guess; every further row a quarter more."""
    count = cluster.server_count
    one_s = np.outer(1e-3 * (1 + np.arange(count)), [1.0, 0.1, 3.0, 20.0])
    work_s = one_s[:, :, None] * (0.75 + 0.25 * np.array(BATCHES))
    return Machines(
        header=machines_header(
            cluster, Precision.NONE, settings={}, input_hashes={"model": model.model_hash}
        ),
        cluster_name=cluster.name,
        server_names=cluster.server_names,
        model_hash=model.model_hash,
        precision=Precision.NONE,
        batches=np.array(BATCHES),
        work_s=work_s,
        low_s=0.9 * work_s,
        high_s=1.1 * work_s,
        together=np.ones(count),
        machine=np.arange(count),
        free_bytes=np.full(count, 1 << 30),
        delay_s=cluster.delay_s,
        bandwidth_bytes_per_s=cluster.bandwidth_bytes_per_s,
        jitter_s=np.zeros((count, count)),
        software_s=np.full(count, 1e-3),
        hop_s=np.full(count, hop_s),
        token_s=np.full(count, token_s),
    )
