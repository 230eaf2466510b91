"""The work assigned in a scheduling slot (20) and its limit (c.11), by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from byhand import hosting, world
from trimmoe.experiments.method_engines import make_engine
from trimmoe.policy.build import deploy
from trimmoe.policy.presets import exact, paper
from trimmoe.simulator.measure import figures
from trimmoe.simulator.run import simulate
from trimmoe.simulator.settings import Load, Prefill, SimulationSettings
from trimmoe.simulator.workload import Workload, relieved
from trimmoe.simulator.world import NONE, Rows, make_rows
from worlds import random_trace

MS = 1e-3
EXPERT_S = np.array([1.0, 2.0])[:, None, None] * np.ones((2, 2, 3)) * MS
"""An expert takes 1 ms on server 0, 2 ms on server 1."""


def two_tokens() -> Rows:
    """The first runs a slot on each server, then one on server 1 and none; the second a slot on
    server 0, and exits: what its row says of the layer left is an older token's."""
    rows = make_rows(2, layers=2, slots=2)
    rows.expert[0], rows.server[0] = [[0, 1], [2, NONE]], [[0, 1], [1, 0]]
    rows.expert[1], rows.server[1] = [[1, NONE], [0, 0]], [[0, 0], [1, 1]]
    rows.layers[:] = [2, 1]
    return rows


def test_work_is_every_experts_time_in_the_slot_in_which_its_token_set_out() -> None:
    work, rows = Workload(slot_s=4 * MS, expert_s=EXPERT_S), two_tokens()
    work.count(rows, np.array([0, 0, 1]), np.array([0.5, 3.9, 4.0]) * MS)
    np.testing.assert_allclose(work.use(0, 3) * 4, [[2.0, 8.0], [1.0, 0.0], [0.0, 0.0]])
    assert work.use(1, 1).shape == (0, 2)


def test_a_server_is_full_after_a_slot_that_gave_it_more_than_it_can_do_in_one() -> None:
    work, rows = Workload(slot_s=4 * MS, expert_s=EXPERT_S), two_tokens()
    work.count(rows, np.array([0]), np.array([0.0]))
    assert work.full(4 * MS).tolist() == [False, False], "as much as it can do is not more"
    rows.began_s[:] = [1 * MS, 5 * MS]
    both = work.with_flying(rows, np.array([0, 1]))
    assert both.full(4 * MS).tolist() == [False, True]
    assert both.full(8 * MS).tolist() == [False, False]
    assert work.full(4 * MS).tolist() == [False, False], "what is under way is not kept"


def test_full_servers_are_left_out_but_for_what_nobody_else_has() -> None:
    hosts = np.array([[[1, 1, 0]], [[1, 0, 1]], [[0, 0, 1]]], dtype=bool)
    left = relieved(hosts, np.array([True, True, False]))
    # Expert 0 is on full servers only, expert 1 on one of them; expert 2 has another host.
    assert left.astype(int).tolist() == [[[1, 1, 0]], [[1, 0, 0]], [[0, 0, 1]]]
    assert (relieved(hosts, np.zeros(3, dtype=bool)) == hosts).all()


@pytest.mark.parametrize("limited", [False, True])
def test_work_goes_elsewhere_in_the_slot_after_one_with_too_much(limited: bool) -> None:
    """150 tokens of 1 ms in every slot of 100 ms, all of users at server 0; server 1 has the expert
    too, 5 ms away. Unlimited, server 0 runs them all; limited, they take turns."""
    made = world(hosting([[0]], [[0]], experts=1), [[0, 5], [5, 0]])
    plan = replace(made.plan, cluster=replace(made.plan.cluster, access_share=np.array([1.0, 0.0])))
    settings = exact().but(workload_limit=limited)
    sample, *_ = simulate(
        make_engine(plan, made.profile, made.model, settings),
        deploy(plan, made.profile, made.model, settings.accounting),
        random_trace(np.random.default_rng(0), made.profile, sequences=3, length=4),
        SimulationSettings(
            load=Load(
                rate_per_s=1500.0,
                burstiness=0.0,
                output_tokens=1,
                fixed_lengths=True,
                prefill=Prefill.EXCLUDED,
            ),
            warm_up_s=0.0,
            duration_s=0.4,
            control_s=0.1,
            seeds=(0,),
        ),
    )
    one, other = [1.5, 0.0], [0.0, 1.5]
    expected = [one, other, one, other] if limited else [one] * 4
    np.testing.assert_allclose(sample.workload, expected, atol=0.02)
    assert figures(sample, 0.3)["overloaded_share"] == 0.5


def test_the_letter_keeps_to_the_limit() -> None:
    assert paper().readings.workload_limit
    assert not exact().readings.workload_limit
