"""What one process shows of the cluster that it stands for."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from trimmoe.runtime.picture import LinkPicture, Picture, ServerPicture, State
from trimmoe.runtime.probe import used_bytes
from trimmoe.runtime.service import LinkStats

if TYPE_CHECKING:
    from trimmoe.runtime.local_service import LocalService


def picture_of(service: LocalService) -> Picture:
    """Links are charged, not used, and all work is done by the process itself."""
    outline, health, stats = service.decoder.outline, service.health(), service.stats()
    requests, running, waiting = service.under_way()
    up = ServerPicture(state=State.UP, uptime_s=time.monotonic() - service.since_s)
    here = replace(
        up,
        kv_usage=stats.kv_cache_usage,
        running=running,
        queued=waiting,
        tokens=service.tokens,
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
        running=running,
        waiting=waiting,
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
