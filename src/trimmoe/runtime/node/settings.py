"""How one server runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSettings:
    """See the fields; `server` is the index in the plan's cluster."""

    server: int
    kv_slots: int = 16
    """Sequences whose routes may cross this server at the same time."""
    max_waiting: int = 64
    """Requests of this server's users that may wait for a place."""
    max_batch: int = 64
    """Rows of one batch."""
    prefill_chunk: int = 64
    """Prompt tokens that pass a layer together; what a long prompt delays others by."""
    threads: int = 1
    """That a batch is computed with."""
    machine: tuple[int, ...] = ()
    """Number of the machine of each server; empty: each has one to itself."""
    at_once: float = 1.0
    """Servers of one machine that may compute at once without holding one another up, where that
    was not measured."""
    slowdown: float = 1.0
    """Emulates a machine that computes so many times slower than this one."""
    batch_share: float | None = None
    """If set, batches take what the cost model says of the plan's machine, see `cost.batching`,
    instead of what they take here; this machine has to be the faster one."""
    measures: bool = True
    """Whether measured links and waiting times enter the costs that decisions are made with."""
    changed_share: float = 0.25
    """Relative change of a cost that makes new decisions' tables worth building."""
    report_every_s: float = 1.0
    """Time between two reports of what is measured to the other servers."""
    gather_news_s: float = 0.05
    """How long to wait for more news before an engine is built."""
    patience_s: float = 60.0
    """How long a request whose expert has no live host waits for a lost server to come back."""
    stall_s: float = 5.0
    """A sequence unheard of for so long is asked for; if no server has it in hand after as long
    again, it is begun anew."""
    prefix_cache: bool = True
    """Whether what was read of prompts and answers is kept for those that begin alike."""
    verify_share: float = 0.0
    """Of the results of experts on other servers, what is computed a second time and compared."""
    seed: int = 0
    """Of the draws that choose which exits are audited, and which results are verified."""
    log_events: bool = False
    """Keep every event of the engine with its commands, and every batch; memory grows."""

    def __post_init__(self) -> None:
        assert min(self.kv_slots, self.max_batch, self.prefill_chunk) > 0
        assert self.max_waiting >= 0
        assert self.slowdown >= 1.0
        assert 0.0 <= self.verify_share <= 1.0
        assert self.batch_share is None or (0.0 <= self.batch_share <= 1.0 == self.slowdown)
