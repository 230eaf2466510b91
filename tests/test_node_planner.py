"""What is measured reaches the costs, beside the decisions and never in their way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from factories import random_cluster, random_model_spec, random_profile
from nodes import answers, request, running, staircase_routes, world
from serving import Tiny
from synthetic import random_plan
from trimmoe.core.errors import UserError
from trimmoe.core.plan import Plan
from trimmoe.cost.model import cost_model
from trimmoe.engine.exits import ExitRules
from trimmoe.policy.presets import PRESETS
from trimmoe.policy.trim import TrimPolicy, rounded_weight
from trimmoe.runtime.node.records.messages import LoadReport
from trimmoe.runtime.node.records.packing import MalformedMessage
from trimmoe.runtime.node.watch import planner as planner_module
from trimmoe.runtime.node.watch.deployments import (
    CUT_DELAY_S,
    Basis,
    Conditions,
    build,
    changed_much,
    detours,
    measured_cost,
)
from trimmoe.runtime.node.watch.planner import Planner
from wires import soon, until

SERVERS = 4


def basis(name: str = "substitute-only", *, density: float = 0.4, **changes: object) -> Basis:
    rng = np.random.default_rng(5)
    model = random_model_spec(rng, layers=3, experts=5, top_k=2)
    profile = random_profile(rng, model)
    plan: Plan = random_plan(rng, model, random_cluster(rng, servers=SERVERS), density=density)
    plan = replace(plan, routes=np.array([[0, 1, 1], [1, 1, 2], [2, 2, 2], [3, 0, 3]]))
    return Basis.of(plan, profile, model, PRESETS[name]().but(**changes))


def load_report(**changes: Any) -> LoadReport:
    fields: dict[str, Any] = {
        "delay_s": [None] * SERVERS,
        "bandwidth_bytes_per_s": [None] * SERVERS,
        "waiting_s": 0.0,
        "kv_usage": 0.0,
        "unreachable": [],
    }
    return LoadReport(**(fields | changes))


async def test_prompts_cost_what_they_take_the_fullest_server_for_each_token_of_all() -> None:
    """Forty per cent of a server's time while servers' users are shown ten tokens a second."""
    async with planning(basis()) as (planner, _):
        assert planner.read_s == 0.0
        planner.note(0, load_report(prompts=0.2))
        assert planner.read_s == 0.0, "of no token nobody knows what it takes"
        planner.note(1, load_report(prompts=0.4, tokens_per_s=4.0))
        planner.note(2, load_report(prompts=0.1, tokens_per_s=6.0))
        assert planner.read_s == pytest.approx(0.04)


@asynccontextmanager
async def planning(
    basis: Basis, changed_share: float | None = 0.25
) -> AsyncGenerator[tuple[Planner, list]]:
    """A planner at work and the engines it came up with."""
    pool, applied = ThreadPoolExecutor(1), []
    planner = Planner(
        basis,
        server=0,
        pool=pool,
        apply=applied.append,
        feedback=lambda: applied[-1].engine.start().feedback,
        delay_s=0.01,
        changed_share=changed_share,
    )
    await planner.build_first()
    task = asyncio.create_task(planner.run())
    try:
        yield planner, applied
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        pool.shutdown()


async def test_measured_links_and_waiting_are_in_the_rebuilt_engines_costs() -> None:
    fixed = basis()
    plan, model = fixed.plan, fixed.model
    async with planning(fixed) as (planner, applied):
        before = applied[0].engine.cost
        np.testing.assert_allclose(before.transfer_s, plan.cluster.transfer_s(model.hidden_bytes))
        delays = [None, 0.5, 0.25, None]
        rates = [None, 1e6, None, None]
        planner.note(0, load_report(delay_s=delays, bandwidth_bytes_per_s=rates))
        planner.note(2, load_report(waiting_s=0.75))
        await until(lambda: len(applied) == 2)
        cost = applied[1].engine.cost
        z = model.hidden_bytes
        assert cost.transfer_s[0, 1] == pytest.approx(0.5 + z / 1e6)
        planned = z / plan.cluster.bandwidth_bytes_per_s[0, 2]
        assert cost.transfer_s[0, 2] == pytest.approx(0.25 + planned)
        assert cost.transfer_s[0, 3] == before.transfer_s[0, 3]
        assert cost.transfer_s[1, 0] == before.transfer_s[1, 0]
        assert cost.waiting_s.tolist() == [0.0, 0.0, 0.75, 0.0]
        assert applied[1].engine.reference_s == applied[0].engine.reference_s
        # Exact execution of prompts looks at the same costs.
        assert not np.array_equal(applied[1].exact_hosts.server, applied[0].exact_hosts.server)


@pytest.mark.parametrize("nonsense", [np.nan, np.inf, -np.inf, -1.0, 0.0, 5e-324, 1e300])
def test_no_measurement_makes_costs_absurd(nonsense: float) -> None:
    """A peer's figures are not trusted; the worst that a link can be is cut."""
    fixed = basis()
    planned = measured_cost(fixed, Conditions.planned(SERVERS))
    square = np.full((SERVERS, SERVERS), nonsense)
    conditions = Conditions(
        lost=frozenset(),
        cut=frozenset(),
        delay_s=square,
        bandwidth_bytes_per_s=square,
        waiting_s=np.full(SERVERS, nonsense),
        busy=np.full(SERVERS, nonsense),
    )
    cost = measured_cost(fixed, conditions)
    assert cost.busy is not None
    assert ((cost.busy >= 0) & (cost.busy <= 1)).all()
    assert not cost.transfer_s.diagonal().any()
    for seconds in (cost.transfer_s, cost.waiting_s):
        assert ((seconds >= 0) & (seconds <= 2 * CUT_DELAY_S)).all()
    if not nonsense >= 0 or np.isinf(nonsense):
        np.testing.assert_array_equal(cost.transfer_s, planned.transfer_s)
    slow = replace(conditions, delay_s=np.full_like(square, np.nan))
    assert (measured_cost(fixed, slow).transfer_s <= planned.transfer_s + CUT_DELAY_S).all()


async def test_small_changes_are_not_worth_an_engine() -> None:
    fixed = basis()
    async with planning(fixed) as (planner, applied):
        nearly = (fixed.plan.cluster.delay_s[0] * 1.05).tolist()
        planner.note(0, load_report(delay_s=nearly))
        twice = (fixed.plan.cluster.delay_s[1] * 2).tolist()
        assert len(applied) == 1
        planner.note(1, load_report(delay_s=twice))
        await until(lambda: len(applied) == 2)
        await asyncio.sleep(0.05)
        assert len(applied) == 2


async def test_measurements_wait_while_the_planner_rests_but_lost_servers_and_routes_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Following the load must not become the load."""
    monkeypatch.setattr(planner_module, "BUSY_SHARE", 1e-9)
    async with planning(basis()) as (planner, applied):
        planner.note(1, load_report(waiting_s=0.75))
        planner.look_ahead()
        await asyncio.sleep(0.1)
        assert len(applied) == 1
        planner.want_lost(frozenset({2}))
        await soon(planner.until_settled())
        assert len(applied) == 2
        # What was measured meanwhile comes along.
        assert applied[-1].engine.cost.waiting_s.tolist() == [0.0, 0.75, 0.0, 0.0]
        planner.want_route((3, 3, 0))
        await soon(planner.until_settled())
        assert len(applied) == 3


async def test_without_measuring_the_plan_stands() -> None:
    async with planning(basis(), changed_share=None) as (planner, applied):
        planner.note(0, load_report(delay_s=[None, 5.0, 5.0, 5.0], waiting_s=3.0))
        planner.want_lost(frozenset({3}))
        await until(lambda: len(applied) == 2)
        np.testing.assert_array_equal(
            applied[1].engine.cost.transfer_s, applied[0].engine.cost.transfer_s
        )
        assert not applied[1].engine.cost.waiting_s.any()


async def test_lost_servers_leave_the_hosts_and_the_routes() -> None:
    fixed = basis()
    async with planning(fixed) as (planner, applied):
        planner.want_lost(frozenset({1}))
        assert not planner.settled
        await soon(planner.until_settled())
        built = planner.in_force
        assert built is applied[-1]
        # The plan's rows stay what they are; the new routes come after them.
        np.testing.assert_array_equal(built.engine.routes[:SERVERS], fixed.plan.routes)
        assert set(built.detours) == {0}
        assert 1 not in built.route_of(0)
        assert built.route_of(2) == (2, 2, 2)
        assert built.route_of(0) in map(tuple, built.engine.routes.tolist())
        planner.want_lost(frozenset())
        await soon(planner.until_settled())
        assert planner.in_force.route_of(0) == (0, 1, 1)


async def test_rows_of_routes_keep_their_meaning_whatever_comes_and_goes() -> None:
    """Accounts are kept by row."""
    fixed = basis()
    crossing = replace(fixed.plan, routes=np.array([[a, 1, (a + 1) % 4] for a in range(4)]))
    fixed = Basis.of(crossing, fixed.profile, fixed.model, fixed.settings)
    async with planning(fixed) as (planner, applied):
        planner.want_route((3, 3, 2))
        for lost in ({1}, set(), {1, 2}, set(), {3}, set()):
            planner.want_lost(frozenset(lost))
            await soon(planner.until_settled())
            # Servers ask for detours in any order, also after they are needed.
            for route in sorted(planner.in_force.detours.values(), reverse=True):
                planner.want_route(route)
        rows = [built.engine.routes.tolist() for built in applied]
        assert len(rows[-1]) > SERVERS + 3
        for earlier, later in pairwise(rows):
            assert later[: len(earlier)] == earlier


async def test_a_server_that_was_gone_for_a_moment_keeps_nobody_waiting() -> None:
    """Its return is known before anything was built without it, and nothing is left to build."""
    async with planning(basis()) as (planner, applied):
        planner.want_lost(frozenset({1}))
        waiting = asyncio.create_task(planner.until_settled())
        await asyncio.sleep(0)
        planner.want_lost(frozenset())
        await soon(waiting)
        assert len(applied) == 1


async def test_mere_load_is_no_change() -> None:
    async with planning(basis(), changed_share=None) as (planner, _):
        waiting = asyncio.create_task(planner.next_change())
        await asyncio.sleep(0)
        planner.note(1, load_report(waiting_s=3.0))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        planner.want_lost(frozenset({1}))
        await soon(waiting)


async def test_there_is_an_end_to_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each makes the engine larger for good, and whoever reserves a place names one."""
    monkeypatch.setattr(planner_module, "MOST_ROUTES", 2)
    async with planning(basis()) as (planner, _):
        for route in ((3, 3, 0), (3, 3, 1), (3, 3, 0)):
            planner.want_route(route)
        with pytest.raises(MalformedMessage, match="too many routes"):
            planner.want_route((3, 3, 2))


async def test_a_route_that_comes_from_elsewhere_is_learnt_and_never_forgotten() -> None:
    async with planning(basis()) as (planner, applied):
        planner.want_route((3, 2, 1))
        await soon(planner.until_settled())
        row = applied[-1].engine.routes.tolist().index([3, 2, 1])
        planner.want_route((2, 3, 1))
        planner.want_lost(frozenset({0}))
        await soon(planner.until_settled())
        assert applied[-1].engine.routes.tolist().index([3, 2, 1]) == row
        assert [2, 3, 1] in applied[-1].engine.routes.tolist()


async def test_links_between_others_that_are_down_are_avoided_by_everybody() -> None:
    async with planning(basis()) as (planner, _):
        planner.note(1, load_report(unreachable=[2]))
        await soon(planner.until_settled())
        built = planner.in_force
        assert built.conditions.cut == {(1, 2)}
        assert built.engine.cost.transfer_s[1, 2] >= CUT_DELAY_S
        assert set(built.detours) == {1}
        planner.note(1, load_report())
        await soon(planner.until_settled())
        assert not planner.in_force.detours


async def test_tables_are_made_for_tokens_that_come_with_another_price() -> None:
    """Every server learns from its own users' tokens only, and decides about everybody's."""
    async with planning(basis("trimmoe")) as (planner, _):
        policy = planner.in_force.engine.policy
        assert isinstance(policy, TrimPolicy)
        assert policy.tables is not None
        far = next(weight for weight in (0.9, 0.1) if not policy.tables.has(rounded_weight(weight)))

        def has_it() -> bool:
            planner.look_ahead()  # As a server does now and then; after building it rests.
            now = planner.in_force.engine.policy
            assert isinstance(now, TrimPolicy)
            assert now.tables is not None
            return now.tables.has(rounded_weight(far))

        planner.note(1, load_report(loss_weights=[far]))
        await until(has_it)


def test_all_servers_come_to_the_same_detours_whatever_they_measure() -> None:
    fixed = basis()
    planned = Conditions.planned(SERVERS)
    lost = replace(planned, lost=frozenset({1}))
    measured = replace(lost, delay_s=np.full((SERVERS, SERVERS), 0.9), waiting_s=np.ones(SERVERS))
    assert detours(fixed, lost) == detours(fixed, measured) != {}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["trimmoe", "substitute-only", "exact"])
def test_experts_without_hosts_break_neither_tables_nor_routes(name: str) -> None:
    fixed = basis(name, density=0.0)
    for lost in range(SERVERS):
        conditions = replace(Conditions.planned(SERVERS), lost=frozenset({lost}))
        built = build(fixed, conditions, ())
        planner_module.prepared(built.engine, built.engine.start().feedback)
        assert all(lost not in route for route in built.detours.values())
        assert built.exact_hosts.orphans.any()


def test_changes_are_judged_against_what_is_decided_with() -> None:
    fixed = basis()
    then = Conditions.planned(SERVERS)
    slow = replace(then, waiting_s=np.full(SERVERS, 1.0))
    slower = replace(then, waiting_s=np.full(SERVERS, 1.2))
    assert changed_much(slow, then, fixed, 0.25)
    assert not changed_much(slower, slow, fixed, 0.25)
    assert not changed_much(then, then, fixed, 0.25)


def test_policies_that_no_real_system_can_run_are_refused() -> None:
    with pytest.raises(UserError, match="migrate"):
        basis("paper")


async def test_engines_are_built_beside_the_decisions(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is built under way is built by the planning thread; batches only ever swap."""
    builders: set[str] = set()
    original = planner_module.build

    def watched(*arguments):
        builders.add(threading.current_thread().name)
        return original(*arguments)

    monkeypatch.setattr(planner_module, "build", watched)
    profile, plan = world(tiny, servers=2, routes=staircase_routes(2))
    policy = PRESETS["trimmoe"]().but(budget=0.2, exit_risk=None)
    async with running(
        tiny, profile=profile, plan=plan, policy=policy, measures=True, report_every_s=0.05
    ) as cluster:
        for node in cluster.nodes.values():
            policy_tables = node.worker.engine.policy.tables  # type: ignore[attr-defined]
            assert not policy_tables.on_demand
        # The links in memory are far quicker than the plan says: that is noticed and used.
        await answers(cluster, [(0, request([3, 4, i], 20)) for i in range(4)])
        node = cluster.nodes[0]
        planned = cost_model(tiny.view.spec, plan.cluster).transfer_s[0, 1]
        await until(lambda: node.worker.engine.cost.transfer_s[0, 1] != planned)
        await answers(cluster, [(0, request([3, 4, i], 20)) for i in range(4)])
    assert builders
    assert all(name.startswith("trimmoe-plan") for name in builders)


def test_how_busy_servers_say_they_are_decides_how_bold_early_predictions_are() -> None:
    """However long their steps take beside what the plan says."""
    basis_ = basis("lossless")
    conditions = Conditions.planned(SERVERS)
    busy = np.array([0.2, 0.4, np.nan, 7.0])
    cost = measured_cost(basis_, replace(conditions, busy=busy, waiting_s=np.full(SERVERS, 9.0)))
    assert cost.busy is not None
    assert cost.busy.tolist() == [0.2, 0.4, 0.0, 1.0]
    rules = ExitRules(
        settings=basis_.settings,
        profile=basis_.profile,
        cost=cost,
        routes=basis_.planned.routes,
        reference_s=1.0,
    )
    on_routes = [[0.2, 0.4, 0.4], [0.4, 0.4, 0.0], [0.0] * 3, [1.0, 0.2, 1.0]]
    assert rules.busy[:SERVERS] == pytest.approx(np.mean(on_routes, axis=1))
    assert changed_much(replace(conditions, busy=np.full(SERVERS, 0.5)), conditions, basis_, 0.25)
    assert not changed_much(
        replace(conditions, busy=np.full(SERVERS, 0.2)), conditions, basis_, 0.25
    )


def test_servers_that_share_a_machine_without_a_probe_are_known_to() -> None:
    """Two of them on one machine with room for one: what they do adds up."""
    shared = replace(basis("auto"), machine=(0, 0, 1, 2), at_once=1.0)
    busy = np.array([0.4, 0.5, 0.3, 0.2])
    cost = measured_cost(shared, replace(Conditions.planned(SERVERS), busy=busy))
    assert cost.occupancy.tolist() == pytest.approx([0.9, 0.9, 0.3, 0.2])
    apart = measured_cost(basis("auto"), replace(Conditions.planned(SERVERS), busy=busy))
    assert apart.occupancy.tolist() == busy.tolist()
