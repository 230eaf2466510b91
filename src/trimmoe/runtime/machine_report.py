"""What a server says of its machine and its links; `probe` times it. Nothing here takes torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimmoe.core.specs import FloatArray

if TYPE_CHECKING:
    from trimmoe.runtime.wire.base import LinkEstimate


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkReport:
    """The link to one peer; None where it is not known yet."""

    peer: str
    delay_s: float | None
    bandwidth_bytes_per_s: float | None
    jitter_s: float | None
    """What round trips take beyond the shortest, on average."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineReport:
    """One server about itself."""

    server: str
    machine: str
    """Tells machines apart."""
    device: str
    threads: int
    free_bytes: int
    software_s: float
    """What the interpreter takes for a fixed piece of work: how quick software is there."""
    work_s: FloatArray
    """Quantiles 0.1, 0.5 and 0.9, [3, W, B] seconds."""
    links: tuple[LinkReport, ...]
    head_right: float = 0.0
    """Share of a draft head's first drafts that are right, as its file says; 0 where there is none.
    """
    naming_s: float = 0.0
    """What it takes to name one token behind one."""


def link_reports(estimates: Iterable[LinkEstimate]) -> tuple[LinkReport, ...]:
    """What a transport has learnt of its links."""
    return tuple(
        LinkReport(
            peer=link.peer,
            delay_s=link.delay_s,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
            jitter_s=None
            if link.round_trip_s is None or link.delay_s is None
            else max(link.round_trip_s - 2 * link.delay_s, 0.0),
        )
        for link in estimates
    )
