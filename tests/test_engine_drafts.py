"""Drafts in the engine: exits that cost no quality, since nobody is shown them unconfirmed.

Replays of the same generated tokens with and without them: what a token costs where its draft is
right is what an exit costs, where it is wrong what it costs without.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from factories import random_cluster, random_model_spec
from synthetic import random_plan
from trimmoe.core.exit_states import ExitState
from trimmoe.core.ledger import Kind, Ledger
from trimmoe.core.trace import Trace
from trimmoe.cost.model import Accounting
from trimmoe.engine.step import Engine
from trimmoe.experiments.method_engines import make_engine
from trimmoe.policy.presets import PRESETS
from trimmoe.policy.settings import PolicySettings
from trimmoe.simulator.generate import Parameters
from trimmoe.simulator.generated_profile import generate_profile_and_trace
from trimmoe.simulator.replay import replay

SERVERS, CONFIDENCE = 4, 0.9


def lossless(**changes) -> PolicySettings:
    return PRESETS["lossless"]().but(exits_weighed=False, **changes)


class Replayed:
    """Generated tokens of one world under several policies."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.model = random_model_spec(rng, layers=6, experts=4, top_k=2)
        self.profile, self.trace = generate_profile_and_trace(
            self.model,
            Parameters(exit_hazard=(0.1, 0.3), exit_confidence=0.7),
            sequences=6, length=6, seed=seed, profile_tokens=256,
        )  # fmt: skip
        self.plan = random_plan(rng, self.model, random_cluster(rng, servers=SERVERS))
        self.access = rng.integers(SERVERS, size=self.trace.sequence_count)

    def engine(self, policy: PolicySettings) -> Engine:
        return make_engine(self.plan, self.profile, self.model, policy)

    def ledgers(
        self, policy: PolicySettings, confidence: float = CONFIDENCE, trace: Trace | None = None
    ) -> list[Ledger]:
        return replay(
            self.engine(policy),
            trace or self.trace,
            self.access,
            budget=policy.budget,
            confidence=confidence,
        )


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_a_right_draft_costs_what_an_exit_does_and_a_wrong_one_what_it_costs_without(
    seed: int,
) -> None:
    world = Replayed(seed)
    free = {"exit_risk": None, "exits_charged": False, "exit_rule": "fixed"}
    final = lossless(draft_confidence=None, confidence=0.6, **free)
    exits, plain = world.ledgers(final, 0.6), world.ledgers(PRESETS["exact"]())
    for one, exit, whole in zip(world.ledgers(lossless()), exits, plain, strict=True):
        assert one.tokens == 1
        assert one.loss == 0.0
        assert (one.kinds.sum(1) == 1).all()
        assert one.audits == exit.audits
        as_it_was = exit if one.kinds[:, Kind.EXITED].any() else whole
        assert (one.kinds == as_it_was.kinds).all()
        assert one.slots_run == as_it_was.slots_run
        # Two drafts after one another take as long as full depth at least.
        delay_s = max(as_it_was.delay_s, whole.delay_s / 2)
        assert one.delay_s == pytest.approx(delay_s, abs=1e-12)
        assert (one.messages >= whole.messages).all()


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**32 - 1))
def test_all_right_they_only_save_and_all_wrong_they_cost_no_time(seed: int) -> None:
    world = Replayed(seed)
    plain = world.ledgers(PRESETS["exact"]())
    sure, unsure = (
        replace(world.trace, confidence=np.where(world.trace.confidence >= 0.6, value, 0.0))
        for value in (1.0, 1e-9)
    )
    right = world.ledgers(lossless(draft_confidence=0.6), trace=sure)
    wrong = world.ledgers(lossless(draft_confidence=1e-9), trace=unsure)
    drafts = sum(one.audits for one in right)
    assert drafts > 0
    assert sum(one.audits for one in wrong) == drafts
    for good, bad, whole in zip(right, wrong, plain, strict=True):
        # The layers left are not waited for; the way back from the exit may be a longer one.
        assert bad.delay_s == pytest.approx(whole.delay_s, abs=1e-12)
        assert (bad.kinds == whole.kinds).all()
        assert (good.messages == whole.messages).all()
        assert bad.hops >= whole.hops


def test_where_drafts_are_wrong_more_often_than_promised_fewer_are_made() -> None:
    world = Replayed(3)
    bold = lossless(draft_confidence=0.6, window_tokens=6)
    all_wrong, all_right = (
        replace(world.trace, wrong=np.full(world.trace.confidence.shape, value))
        for value in (True, False)
    )
    right, wrong = (
        sum(one.audits for one in world.ledgers(bold, trace=trace))
        for trace in (all_right, all_wrong)
    )
    assert 0 < wrong < right / 2


def test_where_servers_are_busy_only_drafts_are_made_that_are_worth_others_waiting() -> None:
    """Waiting as long as being served is being busy half of the time, thrice as long three
    quarters."""
    world = Replayed(3)
    engine = world.engine(lossless(draft_confidence=0.1))
    service_s = engine.cost.expert_s.mean(axis=(1, 2))
    drafts = []
    for times, busy in ((0.0, 0.0), (1.0, 0.5), (3.0, 0.75), (99.0, 0.99)):
        waiting = replace(engine, cost=engine.cost.with_waiting(times * service_s))
        assert waiting.exits.busy == pytest.approx(np.full(engine.routes.shape[0], busy))
        told = replay(waiting, world.trace, world.access, budget=0.0, confidence=CONFIDENCE)
        drafts.append(sum(one.audits for one in told))
    assert drafts == sorted(drafts, reverse=True)
    assert len(set(drafts)) == len(drafts)


def test_drafts_are_not_charged_nor_taken_where_exits_are_ruled_out() -> None:
    world = Replayed(3)
    bold = lossless(draft_confidence=0.6)
    engine = world.engine(bold)
    assert engine.exit_terms(0.95) == (0.6, 0.0)
    assert engine.exit_terms(2.0) == (2.0, 0.0)
    assert not any(one.audits for one in world.ledgers(bold, 2.0))
    assert any(one.audits for one in world.ledgers(bold, 0.95))


def test_only_what_goes_on_whole_where_that_costs_something_can_be_a_draft() -> None:
    with pytest.raises(AssertionError):
        lossless(exit_state=ExitState.DENSE)
    with pytest.raises(AssertionError):
        lossless(accounting=Accounting.MIGRATE)
