"""A contender under load: from a cluster at rest, or from one as full as that would become.

A cluster at rest fills for as long as an answer takes. Where tokens are slow that is tens of
thousands of tokens simulated before the few hundred that are measured, and all they do is bring as
many answers under way as ever will be. But where nobody waits, how many that is follows from how
long tokens take alone, and how far each answer has come is uniform. So slow ones begin full, and
only where tokens turn out to wait do they fill from rest after all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimmoe.core.errors import UserError
from trimmoe.core.specs import FloatArray
from trimmoe.core.trace import Trace
from trimmoe.engine.step import Engine
from trimmoe.policy.build import Deployment
from trimmoe.simulator.arrivals import Requests, Source, join_requests
from trimmoe.simulator.measure import Sample
from trimmoe.simulator.run import simulate
from trimmoe.simulator.settings import Load, SimulationSettings

_FILLING_TOKENS = 8
"""Tokens simulated while a cluster at rest fills, over those measured, from which on it begins full
instead."""
SETTLING_TOKENS = 5
"""Tokens of an answer until whatever the sudden beginning led to is over."""
SAVING_TOKENS = 12
"""The same where answers have a budget: their accounts begin empty, and what an answer has saved by
then is about what it keeps."""
_BUSY = 0.8
"""Use of a server or link from which on others may wait for longer than what is settled in."""
_SLOWER = 1.1
"""Time of a token over that without load, likewise."""
_EXTENSIONS = 8
"""Times a run is made longer for tokens that wait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A contender under load, ready to be simulated."""

    engine: Engine
    deployment: Deployment
    trace: Trace
    alone_s: FloatArray
    """Time per token without load of answers that enter at each server, [M]."""
    tokens: int
    """To be measured in a run."""
    budgeted: bool
    """Whether answers have a budget that they may save."""

    @property
    def mean_alone_s(self) -> float:
        return float(self.deployment.plan.cluster.access_share @ self.alone_s)

    def begins_full(self, settings: SimulationSettings) -> bool:
        """Whether filling a cluster at rest would take many more tokens than are measured."""
        load = settings.load
        if load.rate_per_s is None or not load.fixed_lengths:
            return False
        filling = load.rate_per_s * load.output_tokens * settings.warm_up_s
        return filling > _FILLING_TOKENS * self.tokens

    def simulated(self, settings: SimulationSettings) -> tuple[list[Sample], bool]:
        """A sample per seed, and whether they began full. Raises `UserError` if hardly any token is
        ever through."""
        if self.begins_full(settings):
            samples = list(self._from_full(settings))
            if is_settled(samples, self.mean_alone_s):
                return samples, True
        for _ in range(_EXTENSIONS):
            samples = simulate(self.engine, self.deployment, self.trace, settings)
            if min(one.token_s.size for one in samples) >= self.tokens / 4:
                return samples, False
            # Queues made tokens slower than they are alone: look for longer.
            warm_up_s, duration_s = 2.0 * settings.warm_up_s, 4.0 * settings.duration_s
            settings = replace(
                settings,
                warm_up_s=warm_up_s,
                duration_s=duration_s,
                control_s=control_s(duration_s),
            )
        raise UserError("Hardly any token is ever through; the cluster is too small for the load.")

    def _from_full(self, settings: SimulationSettings) -> Iterator[Sample]:
        tokens = SAVING_TOKENS if self.budgeted else SETTLING_TOKENS
        shorter = replace(settings, warm_up_s=tokens * float(self.alone_s.max()))
        for seed in settings.seeds:
            requests = full_start(
                settings.load,
                self.deployment.plan.cluster.access_share,
                self.alone_s,
                sequences=self.trace.sequence_count,
                length=self.trace.length,
                end_s=shorter.end_s,
                seed=seed,
            )
            one = replace(shorter, seeds=(seed,))
            yield from simulate(self.engine, self.deployment, self.trace, one, requests=requests)


def control_s(duration_s: float) -> float:
    """Seconds between the instants at which what was learnt is decided on."""
    return max(1.0, duration_s / 16)


def full_start(
    load: Load,
    access_share: FloatArray,
    alone_s: FloatArray,
    *,
    sequences: int,
    length: int,
    end_s: float,
    seed: int,
) -> Requests:
    """The requests of an open loop of answers of equal length until `end_s`, those under way at its
    beginning with what is left of them.

    `alone_s` [M]: time per token without load of answers that enter at each server. The trace that
    they are made of has so many `sequences` of `length` tokens.
    """
    assert load.rate_per_s is not None
    assert load.fixed_lengths
    source = Source(load, access_share, sequences=sequences, length=length, seed=seed)
    arriving = source.until(end_s)
    rng, output = np.random.default_rng([seed, 6]), round(load.output_tokens)
    counts = rng.poisson(load.rate_per_s * access_share * output * alone_s)
    access = np.repeat(np.arange(counts.size), counts)
    under_way = Requests(
        # Each is somewhere in a token: the next one begins within the time of one.
        arrival_s=rng.random(access.size) * alone_s[access],
        access=access,
        sequence=rng.integers(sequences, size=access.size),
        offset=rng.integers(length, size=access.size),
        prompt=np.zeros(access.size, dtype=np.int64),
        output=rng.integers(1, output + 1, size=access.size),
    )
    both = join_requests([under_way, arriving])
    return both.taken(np.argsort(both.arrival_s, kind="stable"))


def is_settled(samples: Sequence[Sample], alone_s: float) -> bool:
    """Whether tokens hardly waited, so that what they began with is what would have come of it."""
    took_s = float(np.concatenate([one.token_s for one in samples]).mean())
    busiest = max(max(one.server_use.max(), one.link_use.max()) for one in samples)
    return took_s <= _SLOWER * alone_s and busiest <= _BUSY
