"""What one process shows of the cluster that it stands for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from trimmoe.runtime.decoder import Outline
from trimmoe.runtime.picture import (
    LinkPicture,
    Picture,
    RequestPicture,
    ServerPicture,
    State,
)
from trimmoe.runtime.probe import used_bytes
from trimmoe.runtime.service import Health, LinkStats, ServiceStats


def picture_of(
    outline: Outline,
    health: Health,
    stats: ServiceStats,
    requests: Sequence[RequestPicture],
    *,
    since_s: float,
    tokens: int,
) -> Picture:
    """Links are charged, not used, and all work is done by the process itself, which has served
    since `since_s` of the monotonic clock and made so many tokens."""
    up = ServerPicture(state=State.UP, uptime_s=time.monotonic() - since_s)
    here = replace(
        up,
        kv_usage=stats.kv_cache_usage,
        running=stats.running,
        queued=stats.waiting,
        tokens=tokens,
        memory_bytes=used_bytes(torch.device("cpu")),
    )
    servers = [up] * len(outline.layout.servers)
    servers[outline.access] = here
    index = {held.name: at for at, held in enumerate(outline.layout.servers)}
    return Picture(
        server=outline.access,
        ok=health.ok,
        reason=health.reason,
        layout=outline.layout,
        servers=tuple(servers),
        links=tuple(_link(each, index) for each in stats.links if each.source in index),
        routes=outline.routes,
        policy=outline.policy,
        requests=tuple(requests),
        running=stats.running,
        waiting=stats.waiting,
    )


def _link(stats: LinkStats, index: dict[str, int]) -> LinkPicture:
    return LinkPicture(
        source=index[stats.source],
        destination=index[stats.destination],
        delay_s=None,
        planned_delay_s=(stats.round_trip_s or 0.0) / 2,
        bandwidth_bytes_per_s=None,
        sent_bytes=stats.size_bytes,
        up=True,
    )
