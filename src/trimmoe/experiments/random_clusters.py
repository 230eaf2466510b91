"""Random clusters in the ranges of the paper's testbed."""

from __future__ import annotations

import numpy as np

from trimmoe.core.specs import ClusterSpec

GB = 10**9


def paper_cluster(
    seed: int, *, servers: int = 10, memory_ratio: float = 2.0, sites: int = 3
) -> ClusterSpec:
    """18-120 TFLOPS, 12-48 GB, links of 0.8-10 Gbps and 0.3-22 ms, users spread unevenly.

    Servers stand on a line of sites; links inside a site take the fast end of the ranges, links
    between sites grow slower with distance. Links hold in both directions.
    """
    rng = np.random.default_rng(seed)
    site = np.sort(rng.integers(sites, size=servers))
    apart = np.abs(site[:, None] - site[None, :])
    near_s, far_s = rng.uniform(0.3e-3, 1.5e-3, apart.shape), rng.uniform(5e-3, 22e-3, apart.shape)
    scale = np.where(apart == 0, 0.0, apart / max(sites - 1, 1))
    delay_s = np.where(apart == 0, near_s, np.clip(far_s * scale, 3e-3, 22e-3))
    gbps = np.where(
        apart == 0, rng.uniform(5.0, 10.0, apart.shape), rng.uniform(0.8, 3.0, apart.shape)
    )
    delay_s, gbps = (np.triu(each, 1) + np.triu(each, 1).T for each in (delay_s, gbps))
    np.fill_diagonal(gbps, np.inf)
    users = rng.gamma(1.0, size=servers)
    return ClusterSpec(
        name=f"random-{seed}",
        server_names=tuple(f"s{site[index]}-{index}" for index in range(servers)),
        memory_bytes=(rng.choice([12, 16, 24, 32, 48], servers) * GB).astype(np.int64),
        memory_ratio=memory_ratio,
        flops_per_s=rng.uniform(18e12, 120e12, servers),
        access_share=users / users.sum(),
        bandwidth_bytes_per_s=gbps * 1e9 / 8,
        delay_s=delay_s,
    )
