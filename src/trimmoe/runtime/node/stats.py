"""One server in figures: for `/metrics`, and for whoever looks on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trimmoe.runtime.node.parts import Parts
from trimmoe.runtime.service import LinkStats, ServiceStats
from trimmoe.runtime.wire.base import Counters


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSnapshot:
    """One server at one moment."""

    server: str
    ok: bool
    reason: str
    peers_up: tuple[str, ...]
    sequences: int
    """Under way, whose routes cross this server."""
    retained: int
    """Sequences that are over and whose states are kept here."""
    kv_cache_usage: float
    queued: int
    """Items that are ready to be computed."""
    gathering: int
    """Units whose partial sums are still to come."""
    batches: Mapping[str, int]
    """By kind of step."""
    items: Mapping[str, int]
    """Items in those batches."""
    waiting_s: float
    """Mean time that slots of generated tokens wait here before they are begun."""
    restarts: int
    """Attempts of this server's users that were lost."""
    engines_built: int
    malformed: Mapping[str, int]
    """Messages that made no sense, by type."""
    traffic: Counters


def service_stats(parts: Parts, running: int, waiting: int) -> ServiceStats:
    """For `/metrics`."""
    own, links = parts.transport.name, parts.transport.link_estimates()
    sent = parts.transport.counters.sent
    feedback = parts.worker.state.feedback
    said, memory = parts.front_end.speculation.guessing, parts.front_end.memory
    return ServiceStats(
        running=running,
        waiting=waiting,
        kv_cache_usage=max([parts.intake.seats.usage, *parts.reporter.kv_usage.values()]),
        links=tuple(
            LinkStats(
                source=own,
                destination=peer,
                size_bytes=sent[peer].size_bytes if peer in sent else 0,
                round_trip_s=links[peer].round_trip_s if peer in links else None,
            )
            for peer in parts.cluster.server_names
            if peer != own
        ),
        expert_executions=parts.worker.counter.counts.copy(),
        audits=feedback.audits,
        false_exits=feedback.false_exits,
        guesses=said.made,
        right_guesses=said.right,
        prefix_queries=memory.asked,
        prefix_hits=memory.tokens,
        verified=parts.jury.verified,
        wrong_results=parts.jury.wrong,
        left_out=len(parts.jury.left_out),
    )


def snapshot(parts: Parts) -> NodeSnapshot:
    """See the fields."""
    health, seats = parts.health(), parts.intake.seats
    return NodeSnapshot(
        server=parts.transport.name,
        ok=health.ok,
        reason=health.reason,
        peers_up=tuple(sorted(parts.transport.peers_up())),
        sequences=len(seats),
        retained=seats.retained,
        kv_cache_usage=seats.usage,
        queued=len(parts.intake.scheduler),
        gathering=len(parts.intake.gather),
        batches=dict(parts.batch_loop.batch_counts),
        items=dict(parts.batch_loop.item_counts),
        waiting_s=parts.reporter.waiting_s,
        restarts=parts.front_end.restarts,
        engines_built=parts.planner.builds,
        malformed=dict(parts.malformed),
        traffic=parts.transport.counters,
    )
