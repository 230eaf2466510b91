"""What full depth says of final exits, in both simulating drivers: where it contradicts them they
become rarer, whether it checks them afterwards or some of them beforehand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simulated import World, drained, world
from trimmoe.core.exit_states import ExitState
from trimmoe.core.ledger import Kind, Ledger
from trimmoe.simulator.replay import replay


def exiting(state: ExitState, audit_share: float) -> World:
    """A profile that swears exits are harmless, so that only what audits say is against them."""
    one = world(
        "final-exits", layers=6, exit_state=state, audit_share=audit_share, exits_charged=False,
        exits_weighed=False, exit_risk=0.01, confidence=0.5, window_tokens=4, exit_step=1.0,
    )  # fmt: skip
    nothing = np.zeros_like(one.profile.exit_error_upper)
    sworn = replace(one.profile, exit_error_upper=nothing, exit_echo=np.zeros(2))
    return replace(one, profile=sworn, engine=replace(one.engine, profile=sworn))


def contradicted(one: World, wrong: bool) -> World:
    """The same tokens, of which full depth predicts something else than any exit, or the same."""
    everywhere = np.full(one.trace.confidence.shape, wrong)
    return replace(one, trace=replace(one.trace, wrong=everywhere))


def queueing(one: World) -> Ledger:
    return drained(one).ledger


def expected(one: World) -> Ledger:
    access = np.arange(one.trace.sequence_count) % one.engine.cost.server_count
    told = replay(one.engine, one.trace, access, budget=1.0, confidence=0.5)
    return sum(told[1:], told[0])


@pytest.mark.parametrize("driver", [queueing, expected])
@pytest.mark.parametrize(("state", "audit_share"), [(ExitState.WHOLE, 0.0), (ExitState.DENSE, 0.3)])
def test_exits_that_full_depth_contradicts_become_rarer(driver, state, audit_share) -> None:
    one = exiting(state, audit_share)
    right, wrong = (driver(contradicted(one, value)) for value in (False, True))
    assert right.audits > 10
    assert 0 < wrong.share(Kind.EXITED) < 0.6 * right.share(Kind.EXITED)
    assert 0 < wrong.audits < right.audits


@pytest.mark.parametrize("driver", [queueing, expected])
def test_where_it_was_not_recorded_audits_are_as_often_right_as_heads_promise(driver) -> None:
    """Those with the least draws are audited; as often as others they are contradicted."""
    one = exiting(ExitState.DENSE, 0.3)
    assert one.trace.wrong is None
    doubtful = replace(one, trace=replace(one.trace, confidence=one.trace.confidence * 0 + 0.6))
    contradicted_ones = driver(contradicted(doubtful, True)).share(Kind.EXITED)
    right = driver(contradicted(doubtful, False)).share(Kind.EXITED)
    assert contradicted_ones <= driver(doubtful).share(Kind.EXITED) < right
