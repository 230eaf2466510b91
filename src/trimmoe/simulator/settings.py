"""What a simulation runs, and how long."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from trimmoe.core.errors import UserError
from trimmoe.core.specs import ClusterSpec, straight_times
from trimmoe.cost.batching import BATCH_SHARE


class Prefill(StrEnum):
    """What becomes of prompts."""

    CHUNKED = "chunked"
    """They run exactly before the first token is decoded, in chunks, each of which follows the one
    before through the layers as closely as it can."""
    EXCLUDED = "excluded"
    """They cost nothing: a request starts with its first decoded token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Who asks for what. Exactly one of `rate_per_s` (open loop) and `concurrency` (closed loop:
    a finished request is replaced at once) is set."""

    rate_per_s: float | None = None
    """Requests per second over the whole cluster, by the shares of the access servers."""
    concurrency: int | None = None
    requests: int | None = None
    """No more than so many in a run. Only in the open loop."""
    burstiness: float = 1.0
    """Squared coefficient of variation of the gaps between requests: 1 is Poisson, above 1
    requests come in bursts (gamma gaps), 0 is a metronome. Only in the open loop."""
    prompt_tokens: float = 64.0
    output_tokens: float = 64.0
    """Means; every request generates at least one token."""
    fixed_lengths: bool = False
    """All requests have the mean lengths; otherwise lengths are geometric."""
    prefill: Prefill = Prefill.CHUNKED
    prefill_chunk: int = 64
    """Prompt tokens that go through the layers together."""

    def __post_init__(self) -> None:
        if (self.rate_per_s is None) == (self.concurrency is None):
            raise UserError("Give either a rate (open loop) or a concurrency (closed loop).")
        if self.rate_per_s is not None and self.rate_per_s <= 0:
            raise UserError("The rate must be above 0 requests per second.")
        if self.concurrency is not None and self.concurrency < 1:
            raise UserError("The concurrency must be at least 1.")
        if self.requests is not None and (self.requests < 1 or self.rate_per_s is None):
            raise UserError("A number of requests is at least 1 and goes with a rate.")
        if self.burstiness < 0:
            raise UserError("The burstiness must be at least 0; 1 is Poisson.")
        if self.output_tokens < 1 or self.prompt_tokens < 1 or self.prefill_chunk < 1:
            raise UserError("Prompts, outputs and prefill chunks have at least 1 token.")


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationSettings:
    """One scenario; every seed is one independent run of it."""

    load: Load
    budget: float = 0.02
    """D-bar of every request."""
    confidence: float = 0.9
    """p_J of every request."""
    warm_up_s: float = 5.0
    """Left out of every figure."""
    duration_s: float = 30.0
    """Measured after the warm-up."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    batch_share: float | None = None
    """Share of a single token's service time that a batch needs only once, because the weights
    are read once: n tokens take x (share + (1 - share) n), x being the cost model's time of one.
    Per batch for the dense part, per batch and expert for experts. 0: no gain from batching.
    None: as the cluster's machines were measured, `BATCH_SHARE` if they were not."""
    max_batch: int | None = None
    """Tokens that a server takes at once; None: all that are ready for the same layer."""
    link_queues: bool = True
    """Whether the messages on a link wait for one another. Off, each takes its own time only, as
    the cost model has it."""
    control_s: float = 1.0
    """What finished tokens taught (loss weight, exit threshold) and, if `waiting_feedback`,
    measured waiting times reach decisions at these intervals; in between nothing changes."""
    waiting_feedback: bool = False
    """Whether the policy is rebuilt with running averages of the waiting times."""
    waiting_memory: float = 0.5
    """Weight of the earlier intervals in those averages."""
    sla_s: float = 0.2
    """Time per decoded token that counts as good service."""
    outage_every_s: float | None = None
    """A server drawn at random stands still for `outage_s` this often, from the next control
    instant on, which counts as its work; None: none does."""
    outage_s: float = 10.0

    def __post_init__(self) -> None:
        if self.warm_up_s < 0 or self.duration_s <= 0 or self.control_s <= 0:
            raise UserError("The warm-up must be at least 0 s, duration and interval above 0 s.")
        if (self.outage_every_s is not None and self.outage_every_s <= 0) or self.outage_s <= 0:
            raise UserError("Outages last longer than 0 s and come at intervals above 0 s.")
        share = 0.0 if self.batch_share is None else self.batch_share
        if not 0.0 <= share <= 1.0 or not 0.0 <= self.waiting_memory < 1.0:
            raise UserError("The batch share must be in [0, 1], the waiting memory in [0, 1).")
        if self.max_batch is not None and self.max_batch < 1:
            raise UserError("A batch has at least 1 unit.")
        if not self.seeds:
            raise UserError("Give at least one seed.")
        if self.budget < 0:
            raise UserError("The budget must be at least 0.")

    def batch_times_on(self, cluster: ClusterSpec) -> tuple[float, ...]:
        """By `batch_share`, or what is known of the cluster's machines; see `Speeds`."""
        if self.batch_share is None and cluster.speeds is not None:
            return cluster.speeds.batch_times
        return straight_times(BATCH_SHARE if self.batch_share is None else self.batch_share)

    @property
    def end_s(self) -> float:
        """When the run is over."""
        return self.warm_up_s + self.duration_s
