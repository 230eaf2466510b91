"""The simulator against the real servers: the same cluster, plan, arrivals and tokens in both.

Each method answers the same requests on the rehearsed cluster; what its tokens did there is the
trace that the simulator plays. Compared are the times of decoded tokens, and how the methods rank
that the servers tell apart.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ran_trace import trace_of_run
from rehearsal import Answered, rehearsal
from trimmoe.core.choice import Choice
from trimmoe.core.ledger import Kind
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import FloatArray
from trimmoe.core.trace import Trace
from trimmoe.experiments.method_engines import make_engine, plan_for
from trimmoe.experiments.methods import find_method, replayed
from trimmoe.models.base import MoEView
from trimmoe.policy.build import deploy
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.service import ServedModel
from trimmoe.simulator.arrivals import Requests
from trimmoe.simulator.measure import Estimate, Sample, estimate
from trimmoe.simulator.run import simulate
from trimmoe.simulator.settings import Load, SimulationSettings


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What both sides run."""

    folder: str
    """Of the checkpoint."""
    view: MoEView
    """The whole model."""
    served: ServedModel
    profile: Profile
    plan: Plan
    budget: float
    confidence: float
    batch_share: float
    max_batch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """A pattern of arrivals of requests of equal lengths."""

    name: str
    requests: int
    prompt: int
    output: int
    streams: int | None = None
    """Requests answered at a time; None for the open loop."""
    rate_per_s: float | None = None

    def slowed(self, slow_motion: float) -> Traffic:
        """The same on a cluster whose clock goes so many times slower."""
        rate = None if self.rate_per_s is None else self.rate_per_s / slow_motion
        return replace(self, rate_per_s=rate)

    def drawn(self, access_share: FloatArray, vocabulary: int, seed: int):
        """Prompts [R, prompt] and the requests they belong to."""
        rng = np.random.default_rng(seed)
        gaps_s = rng.exponential(1.0 / (self.rate_per_s or 1.0), self.requests)
        constant = np.ones(self.requests, dtype=np.int64)
        asked = Requests(
            arrival_s=np.cumsum(gaps_s) if self.rate_per_s else np.zeros(self.requests),
            access=rng.choice(access_share.size, size=self.requests, p=access_share),
            sequence=np.arange(self.requests),
            offset=0 * constant,
            prompt=self.prompt * constant,
            output=self.output * constant,
        )
        return rng.integers(vocabulary, size=(self.requests, self.prompt)).tolist(), asked


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One method under one traffic, on both sides."""

    method: str
    traffic: str
    real_s: FloatArray
    """Time of each decoded token on the servers, [n]."""
    simulated_s: FloatArray
    """In the simulator, [n]."""
    real_first_s: FloatArray
    simulated_first_s: FloatArray
    """Times to first token, [R]."""
    expected_s: float
    """Mean of the cost model, without queues."""
    hops: tuple[float, float]
    """Hidden vectors per token on both sides."""
    exits: float
    """Share of token-layers left out by exits on the servers."""
    trace_hashes: tuple[str, ...]

    @property
    def figures(self) -> dict[str, Any]:
        """Milliseconds of both sides and the simulator's relative to the servers'."""
        row: dict[str, Any] = {"method": self.method, "traffic": self.traffic}
        sides = {"real": self.real_s, "simulated": self.simulated_s}
        for name, of in _STATISTICS.items():
            both = {side: 1e3 * of(values) for side, values in sides.items()}
            row |= {f"{name}_{side}_ms": value for side, value in both.items()}
            row[f"{name}_ratio"] = both["simulated"] / both["real"]
        first = float(self.simulated_first_s.mean() / self.real_first_s.mean())
        return row | {
            "tokens": int(self.real_s.size),
            "first_token_ratio": first,
            "expected_ms": 1e3 * self.expected_s,
            "hops_real": self.hops[0],
            "hops_simulated": self.hops[1],
            "exited_share": self.exits,
            "trace_hashes": list(self.trace_hashes),
        }


_STATISTICS: dict[str, Callable[[FloatArray], float]] = {
    "mean": lambda values: float(values.mean()),
    "p99": lambda values: float(np.quantile(values, 0.99)),
}


def validate(subject: Subject, method: str, traffic: Traffic, *, seed: int) -> Pair:
    """Run one method on both sides. Raises `UserError` if it cannot place the model, or is no
    policy that servers run."""
    chosen = find_method(method)
    model = subject.view.spec
    plan = plan_for(chosen, subject.plan, subject.profile, model)
    policy = replayed(Choice(method=method, budget=subject.budget, confidence=subject.confidence))
    # Which exits are audited is a matter of chance, and of another on either side.
    policy = policy.but(audit_share=0.0)
    share, vocabulary = plan.cluster.access_share, model.vocab_size
    prompts, asked = traffic.drawn(share, vocabulary, seed)
    answers, trace = asyncio.run(_served(subject, plan, policy, traffic, prompts, asked))
    sample = _simulated(subject, plan, policy, traffic, asked, trace, answers)
    return _pair(method, traffic, answers, sample, trace)


async def _served(
    subject: Subject,
    plan: Plan,
    policy: PolicySettings,
    traffic: Traffic,
    prompts: Sequence[Sequence[int]],
    asked: Requests,
) -> tuple[list[Answered], Trace]:
    async with rehearsal(
        subject.folder,
        profile=subject.profile,
        plan=plan,
        policy=policy,
        model=subject.served,
        batch_share=subject.batch_share,
        max_batch=subject.max_batch,
    ) as stage:
        if traffic.streams is None:
            answers = await stage.open(prompts, asked)
        else:
            answers = await stage.closed(prompts, asked, traffic.streams)
        nodes = stage.nodes
    hosts, bits = (plan.hosts, plan.stand_in_bits) if policy.guesses else (None, None)
    trace = trace_of_run(
        subject.view,
        subject.profile,
        prompts,
        answers,
        nodes,
        asked.access,
        hosts=hosts,
        stand_in_bits=bits,
    )
    return answers, trace


def _simulated(
    subject: Subject,
    plan: Plan,
    policy: PolicySettings,
    traffic: Traffic,
    asked: Requests,
    trace: Trace,
    answers: Sequence[Answered],
) -> Sample:
    model = subject.view.spec
    engine = make_engine(plan, subject.profile, model, policy)
    last_s = max(float(one.came_s[-1]) for one in answers)
    settings = SimulationSettings(
        load=Load(
            rate_per_s=traffic.rate_per_s,
            concurrency=traffic.streams,
            prompt_tokens=traffic.prompt,
            output_tokens=traffic.output,
        ),
        budget=policy.budget,
        confidence=policy.confidence,
        warm_up_s=0.0,
        duration_s=10.0 * last_s,
        control_s=0.25,
        seeds=(0,),
        batch_share=subject.batch_share,
        max_batch=subject.max_batch,
    )
    deployment = deploy(plan, subject.profile, model, policy.accounting)
    (sample,) = simulate(engine, deployment, trace, settings, requests=asked)
    assert sample.after.running == 0, "everything was answered long before the end"
    return sample


def _pair(
    method: str, traffic: Traffic, answers: Sequence[Answered], sample: Sample, trace: Trace
) -> Pair:
    ledgers = [event.ledger for one in answers for event in one.events[1:]]
    known = [ledger for ledger in ledgers if ledger is not None]
    total = sum(known[1:], known[0])
    mine = sample.ledger
    return Pair(
        method=method,
        traffic=traffic.name,
        real_s=np.concatenate([one.token_s for one in answers]),
        simulated_s=sample.token_s,
        real_first_s=np.array([one.came_s[0] - one.asked_s for one in answers]),
        simulated_first_s=sample.first_token_s,
        expected_s=total.mean_delay_s,
        hops=(total.hops / total.tokens, mine.hops / mine.tokens),
        exits=total.share(Kind.EXITED),
        trace_hashes=(trace.hash,),
    )


def pooled(pairs: Sequence[Pair]) -> Pair:
    """One method under several draws of one traffic, all tokens together."""
    first, shares = pairs[0], np.array([pair.real_s.size for pair in pairs], dtype=float)
    shares /= shares.sum()
    hops = shares @ np.array([pair.hops for pair in pairs])
    return Pair(
        method=first.method,
        traffic=first.traffic,
        real_s=np.concatenate([pair.real_s for pair in pairs]),
        simulated_s=np.concatenate([pair.simulated_s for pair in pairs]),
        real_first_s=np.concatenate([pair.real_first_s for pair in pairs]),
        simulated_first_s=np.concatenate([pair.simulated_first_s for pair in pairs]),
        expected_s=float(shares @ np.array([pair.expected_s for pair in pairs])),
        hops=(float(hops[0]), float(hops[1])),
        exits=float(shares @ np.array([pair.exits for pair in pairs])),
        trace_hashes=tuple(one for pair in pairs for one in pair.trace_hashes),
    )


def ranking(rows: Sequence[dict[str, Any]], key: str) -> list[str]:
    """Methods of one traffic, quickest first."""
    return [row["method"] for row in sorted(rows, key=lambda row: row[key])]


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Two methods under the same draws of one traffic: what the second's mean time per token is
    more than the first's, which is the quicker one on the servers."""

    quicker: str
    slower: str
    real: Estimate
    """Over the draws, s."""
    simulated: Estimate

    @property
    def decided(self) -> bool:
        """Whether the servers tell the two apart: what is more exceeds what chance would do."""
        return self.real.low_95 > 0.0

    @property
    def alike(self) -> bool:
        """Whether the simulator ranks them as the servers do."""
        return self.simulated.mean > 0.0

    @property
    def contrary(self) -> bool:
        """Whether both sides tell them apart, and otherwise: batches form by chance on either."""
        return self.decided and self.simulated.high_95 < 0.0


def orders(drawn: Mapping[str, Sequence[Pair]]) -> list[Order]:
    """Every two methods, by name; of each its draws, the same ones for all."""
    return [_order(one, other) for one, other in itertools.combinations(list(drawn.values()), 2)]


def _order(one: Sequence[Pair], other: Sequence[Pair]) -> Order:
    quicker, slower = sorted(
        (one, other), key=lambda pairs: sum(pair.real_s.mean() for pair in pairs)
    )
    draws = list(zip(quicker, slower, strict=True))
    return Order(
        quicker=quicker[0].method,
        slower=slower[0].method,
        real=estimate([float(b.real_s.mean() - a.real_s.mean()) for a, b in draws]),
        simulated=estimate([float(b.simulated_s.mean() - a.simulated_s.mean()) for a, b in draws]),
    )
