"""What was measured of servers: kept, made into costs, and never trusted beyond reason."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from factories import random_cluster, random_model_spec, random_profile
from launching import SERVERS, write_files
from nodes import answers, read, request, running, tokens_of, world
from serving import Tiny
from synthetic import random_plan
from timed import timed_machines
from trimmoe.core.artifact import load_artifact, save_artifact
from trimmoe.core.errors import UserError
from trimmoe.core.machines import (
    BATCHES,
    SLOWEST_FACTOR,
    Work,
    load_machines,
    plausible,
)
from trimmoe.core.plan import PLAN_FORMAT, load_plan
from trimmoe.core.precision import Precision
from trimmoe.core.specs import ClusterSpec, ModelSpec, straight_times
from trimmoe.cost.guessing import guess_times_s
from trimmoe.cost.model import Accounting, cost_model
from trimmoe.experiments import measuring, overheads
from trimmoe.experiments.preparation import prepare
from trimmoe.experiments.probing import machines_tables
from trimmoe.runtime.launch.artifacts import Artifacts
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.machine_report import LinkReport, MachineReport
from wires import soon


@pytest.fixture
def cluster(rng: np.random.Generator) -> ClusterSpec:
    return random_cluster(rng, servers=3)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture
def model(rng: np.random.Generator) -> ModelSpec:
    return random_model_spec(rng, layers=4, experts=6, top_k=2)


def test_they_are_kept_as_they_are(cluster: ClusterSpec, model: ModelSpec, tmp_path: Path) -> None:
    made = timed_machines(cluster, model, hop_s=1e-3)
    made.save(tmp_path / "machines.trim")
    kept = load_machines(tmp_path / "machines.trim")
    assert kept.hash == made.hash
    assert kept.server_names == cluster.server_names


def test_what_a_draft_head_takes_is_kept_where_there_is_one(
    cluster: ClusterSpec, model: ModelSpec, tmp_path: Path
) -> None:
    without = timed_machines(cluster, model)
    made = replace(without, head_right=0.8, naming_s=1e-3 * np.arange(1, 4))
    made.save(tmp_path / "machines.trim")
    kept = load_machines(tmp_path / "machines.trim")
    assert (kept.hash, kept.head_right) == (made.hash, 0.8)
    priced = cost_model(model, kept.applied(cluster, model, Precision.NONE))
    assert priced.naming_s is not None
    assert priced.naming_s.tolist() == [1e-3, 2e-3, 3e-3]
    assert cost_model(model, without.applied(cluster, model, Precision.NONE)).naming_s is None


def test_a_token_costs_what_was_measured(cluster: ClusterSpec, model: ModelSpec) -> None:
    """By hand: a layer as its share of all, experts likewise, the head once, software for each
    message and, wherever its first layer is, on its user's server."""
    measured = timed_machines(cluster, model, hop_s=2e-3, token_s=5e-3)
    cost = cost_model(model, measured.applied(cluster, model, Precision.NONE))
    layer = model.layer_dense_flops / model.layer_dense_flops.mean()
    assert cost.dense_s[2, 1] == pytest.approx(3e-3 * layer[1])
    assert cost.dense_s[2, 0] == pytest.approx(3e-3 * layer[0])
    assert cost.dense_s[2, 3] == pytest.approx(3e-3 * layer[3] + 9e-3)
    share = model.expert_flops / model.expert_flops.mean()
    assert np.allclose(cost.expert_s[1], 2e-4 * share)
    nominal = cost_model(model, cluster)
    away = ~np.eye(3, dtype=bool)
    assert np.allclose(cost.transfer_s, nominal.transfer_s + 2e-3 * away)
    assert np.allclose(cost.token_transfer_s, nominal.token_transfer_s + 2e-3 * away)
    assert np.allclose(cost.enter_s, nominal.token_transfer_s + 2e-3 * away + 5e-3)
    assert np.array_equal(nominal.enter_s, nominal.token_transfer_s)
    assert cost.links.apart_s.tolist() == [2e-3] * 3
    assert nominal.links.apart_s.tolist() == [0.0] * 3
    assert guess_times_s(cost, model.top_k) == pytest.approx([0.02, 0.04, 0.06])
    assert cost.guess_ends_s == pytest.approx([3e-3, 6e-3, 9e-3]), "the output head"


def test_the_letter_knows_flops_only(cluster: ClusterSpec, model: ModelSpec) -> None:
    """(15) under `migrate`, whatever was measured but the relation of speeds."""
    measured = timed_machines(cluster, model, hop_s=2e-3).applied(cluster, model, Precision.NONE)
    cost = cost_model(model, measured, Accounting.MIGRATE)
    assert (cost.dense_s == 0).all()
    assert np.allclose(cost.expert_s * measured.flops_per_s[:, None, None], model.expert_flops)
    assert cost.guess_s is None


def test_a_batch_takes_what_layers_took_with_as_many_rows(
    cluster: ClusterSpec, model: ModelSpec
) -> None:
    """Over all servers, and no less than a smaller one."""
    measured = timed_machines(cluster, model)
    assert measured.batch_times() == pytest.approx(straight_times(0.75))
    work_s = measured.work_s.copy()
    work_s[0, Work.DENSE, 1] += 1e-3
    work_s[:, Work.HEAD] *= 2.0
    layers_s = work_s[:, [Work.DENSE, Work.EXPERT]].sum(axis=(0, 1))
    times = replace(measured, work_s=work_s).batch_times()
    assert times == pytest.approx(layers_s / layers_s[0])
    work_s[:, :, 1] *= 100.0
    times = replace(measured, work_s=work_s).batch_times()
    assert times[1] == times[2] == times[3] > times[0] == 1.0


def test_links_are_what_was_measured_unless_that_is_what_was_said(
    cluster: ClusterSpec, model: ModelSpec
) -> None:
    delay_s = cluster.delay_s * 1.1
    delay_s[0, 1] = 3 * cluster.delay_s[0, 1] + 0.01
    delay_s[1, 0] = np.nan
    made = replace(timed_machines(cluster, model), delay_s=delay_s)
    applied = made.applied(cluster, model, Precision.NONE)
    expected = cluster.delay_s.copy()
    expected[0, 1] = delay_s[0, 1]
    assert np.array_equal(applied.delay_s, expected)


def test_emulated_machines_keep_to_what_was_said_of_them(
    cluster: ClusterSpec, model: ModelSpec, rng: np.random.Generator, tmp_path: Path
) -> None:
    """However often they are measured, and when a server has left."""
    said = replace(cluster, flops_per_s=np.array([4e13, 1e13, 4e13]))
    once = timed_machines(said, model).applied(said, model, Precision.NONE)
    twice = timed_machines(once, model).applied(once, model, Precision.NONE)
    random_plan(rng, model, twice).save(tmp_path / "plan.trim")
    kept = load_plan(tmp_path / "plan.trim").cluster
    assert not np.array_equal(kept.flops_per_s, said.flops_per_s)
    for each in (said, once, twice, kept):
        assert each.slowdown.tolist() == [1.0, 4.0, 1.0]
    assert kept.among(kept.server_names[1:]).slowdown.tolist() == [4.0, 1.0]


def test_others_are_refused_in_a_sentence(cluster: ClusterSpec, model: ModelSpec) -> None:
    made = timed_machines(cluster, model)
    with pytest.raises(UserError, match="run `trimmoe probe` with this cluster file"):
        made.applied(replace(cluster, server_names=("x", "y", "z")), model, Precision.NONE)
    with pytest.raises(UserError, match="another model or precision"):
        made.applied(cluster, model, Precision.INT8)


def test_plans_keep_what_was_measured(
    cluster: ClusterSpec, model: ModelSpec, rng: np.random.Generator, tmp_path: Path
) -> None:
    timed = replace(timed_machines(cluster, model, hop_s=1e-3), naming_s=1e-3 * np.arange(1, 4))
    measured = timed.applied(cluster, model, Precision.NONE)
    plan = random_plan(rng, model, measured)
    plan.save(tmp_path / "plan.trim")
    kept = load_plan(tmp_path / "plan.trim")
    assert kept.hash == plan.hash
    assert kept.cluster.speeds is not None
    assert measured.speeds is not None
    assert kept.cluster.speeds.batch_times == measured.speeds.batch_times
    assert kept.cluster.speeds.batch_times == pytest.approx(straight_times(0.75))
    for name, array in measured.speeds.arrays().items():
        assert np.array_equal(kept.cluster.speeds.arrays()[name], array)


def test_a_few_rows_take_longer_by_the_side_of_other_servers(
    cluster: ClusterSpec, model: ModelSpec, tmp_path: Path
) -> None:
    """Of dense layers, and of rows that are a few; that is kept, and what plans are made with."""
    alone = timed_machines(cluster, model)
    cold = np.ones_like(alone.work_s)
    cold[:, Work.DENSE, :2] = 1.5
    cold[:, Work.DRAFT, 0] = 2.0
    made = replace(alone, cold=cold)
    made.save(tmp_path / "machines.trim")
    kept = load_machines(tmp_path / "machines.trim")
    assert kept.hash == made.hash != alone.hash
    before, after = alone.speeds(), kept.speeds()
    assert after.dense_s == pytest.approx(1.5 * before.dense_s)
    assert after.draft_s == pytest.approx(2.0 * before.draft_s)
    assert np.array_equal(after.expert_s, before.expert_s)
    assert after.batch_times[0] == 1.0
    large_s = [each.batch_times[-1] * (each.dense_s + each.expert_s) for each in (before, after)]
    assert large_s[0] == pytest.approx(large_s[1]), "many rows take what they took"


def test_how_much_longer_is_what_all_take_at_once_beyond_waiting_for_a_core() -> None:
    """Three servers of one machine with a core and a half, and one by itself. The middle one of
    theirs counts, and no further row takes longer than fewer do."""
    work_s = np.ones((4, len(Work), len(BATCHES)))
    ratio = np.array([2.0, 2.0, 2.0, 1.0])
    longer = np.array([3.0, 5.0, 2.5, 2.0, 2.0, 2.0])
    told = [longer, 10 * longer, np.full(longer.size, np.nan), 7 * longer]
    reports = [
        MachineReport(
            server="one", machine="here", device="cpu", threads=1, free_bytes=1, software_s=1.0,
            work_s=np.tile(each, (3, len(Work), 1)), links=(),
        )
        for each in told
    ]  # fmt: skip
    found = measuring._cold(work_s, reports, ratio, np.array([0, 0, 0, 1]))
    assert found[0, 0].tolist() == [1.5, 1.5, 1.25, 1.0, 1.0, 1.0]
    assert np.array_equal(found[0], found[1])
    assert (found[3] == 1.0).all(), "nobody's weights are in its caches"
    assert (measuring._cold(work_s, [None] * 4, ratio, np.zeros(4, dtype=int)) == 1.0).all()


@given(
    st.lists(st.floats(1e-6, 10.0), min_size=2, max_size=6),
    st.sampled_from([np.nan, np.inf, -1.0, 0.0]),
)
def test_nonsense_is_taken_at_its_slowest_plausible(good: list[float], nonsense: float) -> None:
    """Never faster than anybody who makes sense; who does is left alone."""
    found = plausible(np.array([*good, nonsense]), np.ones(len(good) + 1, dtype=bool))
    assert found[:-1].tolist() == good
    assert found[-1] == pytest.approx(SLOWEST_FACTOR * max(good))


def test_nobody_is_an_error() -> None:
    with pytest.raises(UserError, match="No server could be measured"):
        plausible(np.array([np.nan, np.nan]), np.ones(2, dtype=bool))


@pytest.fixture
def measured_world(rng: np.random.Generator) -> Artifacts:
    """Four servers whose users have unlike numbers of messages on their way."""
    model = random_model_spec(rng, layers=6, experts=4, top_k=2)
    profile, cluster = random_profile(rng, model), random_cluster(rng, servers=4)
    plan = random_plan(rng, model, cluster)
    routes = np.array([[0] * 6, [0, 1] * 3, [2, 3, 0, 1, 2, 3], [3] * 6])
    plan = replace(plan, hosts=np.ones_like(plan.hosts), routes=routes)
    return Artifacts(profile=profile, plan=plan, model=model)


@pytest.mark.parametrize("each_ms", [1.5, 2.5, 4.0])
def test_what_software_costs_is_found_in_the_clock(
    measured_world: Artifacts, each_ms: float
) -> None:
    """Answers that take what the cost model says with this cost of a message and of a token give it
    back."""
    bare = timed_machines(measured_world.plan.cluster, measured_world.model)
    known = replace(bare, hop_s=bare.hop_s + each_ms * 1e-3, token_s=bare.token_s + each_ms * 1e-3)
    clock_s = overheads.exact_s(known, measured_world)
    found = overheads.with_overheads(bare, measured_world, clock_s)
    assert found.hop_s * 1e3 == pytest.approx([each_ms] * 4, rel=0.1)
    assert found.token_s * 1e3 == pytest.approx([each_ms] * 4, rel=0.1)


def test_software_is_slower_on_slow_servers(measured_world: Artifacts) -> None:
    """Twice as slow in the interpreter: a message and a token cost twice as much there."""
    slower = np.array([1.0, 1.0, 2.0, 1.0])
    bare = timed_machines(measured_world.plan.cluster, measured_world.model)
    bare = replace(bare, software_s=1e-3 * slower)
    known = replace(bare, hop_s=1.5e-3 * slower, token_s=1.5e-3 * slower)
    clock_s = overheads.exact_s(known, measured_world)
    found = overheads.with_overheads(bare, measured_world, clock_s)
    assert found.hop_s == pytest.approx(known.hop_s, rel=0.05)
    assert found.token_s == pytest.approx(known.token_s, rel=0.05)


@pytest.mark.parametrize("beyond_ms", [-20.0, 0.0, 0.1])
def test_messages_are_never_free(measured_world: Artifacts, beyond_ms: float) -> None:
    """Weights of large layers take longer than software does, and vary by more than that."""
    slower = np.array([1.0, 1.0, 2.0, 1.0])
    bare = timed_machines(measured_world.plan.cluster, measured_world.model)
    bare = replace(bare, software_s=1e-3 * slower)
    clock_s = overheads.exact_s(bare, measured_world) + beyond_ms * 1e-3
    found = overheads.with_overheads(bare, measured_world, clock_s)
    assert found.hop_s == pytest.approx(0.5e-3 * slower)
    assert found.token_s == pytest.approx(0.5e-3 * slower)


@pytest.mark.parametrize(("true", "each_ms"), [(1.0, 0.5), (1.2, 0.5), (1.5, 0.5), (1.5, 2.0)])
def test_rows_among_others_take_no_longer_than_the_clock_says(
    measured_world: Artifacts, true: float, each_ms: float
) -> None:
    """Half as long again as alone, when all were timed at once; `true` times as long in answers."""
    bare = timed_machines(measured_world.plan.cluster, measured_world.model)
    shape, each_s = bare.work_s.shape, bare.hop_s + each_ms * 1e-3
    known = replace(bare, cold=np.full(shape, true), hop_s=each_s, token_s=each_s)
    clock_s = overheads.exact_s(known, measured_world)
    timed = replace(bare, cold=np.full(shape, 1.5))
    found = overheads.with_overheads(timed, measured_world, clock_s)
    assert found.cold == pytest.approx(known.cold, rel=1e-3)
    assert found.hop_s == pytest.approx(each_s, rel=0.1)
    assert overheads.exact_s(found, measured_world) == pytest.approx(clock_s, rel=0.02)


def test_what_a_slow_server_takes_is_not_put_on_every_token(measured_world: Artifacts) -> None:
    """All routes cross a server that is ten times slower. Its own users' tokens come back to it
    quicker than a message costs there, so that nothing fits; with 1.5 ms each for the others, a
    plan without that server must not be expected to take much longer than it does."""
    routes = np.array([[0, 0, 2, 2, 1, 1], [1, 1, 2, 2, 3, 3], [1, 1, 2, 2, 3, 3], [3] * 6])
    routes[3, 2:4] = 2
    plan = replace(measured_world.plan, routes=routes)
    world = replace(measured_world, plan=plan)
    slower = np.array([1.0, 1.0, 10.0, 1.0])
    bare = replace(timed_machines(plan.cluster, world.model), software_s=1e-3 * slower)
    known = replace(bare, hop_s=1.5e-3 * slower, token_s=bare.token_s + 1.5e-3)
    clock_s = overheads.exact_s(known, world)
    clock_s[2] -= 0.012
    found = overheads.with_overheads(bare, world, clock_s)
    assert 1.0 < found.hop_s[0] * 1e3 < 2.0
    assert 1.0 < found.token_s[0] * 1e3 < 2.0


def machine_report(server: str, *, machine: str = "one", **more: Any) -> MachineReport:
    """Of a server whose layers take a millisecond each, unless it says otherwise."""
    given: dict[str, Any] = {
        "device": "cpu",
        "threads": 1,
        "free_bytes": 1,
        "software_s": 1e-3,
        "work_s": np.full((3, len(Work), len(BATCHES)), 1e-3),
        "naming_s": 0.0,
        "links": (),
    }
    return MachineReport(server=server, machine=machine, **given | more)


@pytest.fixture
def asked(tmp_path: Path) -> tuple[Artifacts, ServeConfig]:
    """What four servers are measured with."""
    files = write_files(tmp_path)
    config = ServeConfig.model_validate(
        {"cluster": files.cluster, "model": str(files.model), "profile": files.profile,
         "plan": files.plan, "emulate_machines": False}
    )  # fmt: skip
    return prepare(config, sample=str, say=lambda _: None, cache_dir=tmp_path), config


def test_a_server_that_lies_costs_speed_only(asked: tuple[Artifacts, ServeConfig]) -> None:
    """What three say is taken, of the fourth nothing makes sense; a plan can be made with it."""
    artifacts, config = asked
    nonsense = np.full((3, len(Work), len(BATCHES)), -np.inf)
    link = LinkReport(peer=SERVERS[0], delay_s=-1.0, bandwidth_bytes_per_s=None, jitter_s=None)
    reports = [
        machine_report(SERVERS[0], work_s=nonsense, naming_s=math.nan),
        machine_report(SERVERS[1], naming_s=1e-3, links=(link,)),
        machine_report(SERVERS[2], naming_s=3e-3),
        machine_report(SERVERS[3], naming_s=2e-3),
    ]
    made = measuring.machines_of(artifacts, config, [*reports[:3], None], reports)
    assert (made.work_s[1:3] == 1e-3).all()
    assert (made.work_s[[0, 3]] == 1e-2).all()
    assert made.naming_s is not None
    assert made.naming_s.tolist() == pytest.approx([3e-2, 1e-3, 3e-3, 3e-2])
    applied = made.applied(artifacts.plan.cluster, artifacts.model, Precision.NONE)
    assert (applied.delay_s >= 0).all()
    assert np.isfinite(cost_model(artifacts.model, applied).transfer_s).all()
    assert len(machines_tables(made)) == 3


def test_software_takes_as_long_on_all_servers_of_a_machine_that_compute_as_fast(
    asked: tuple[Artifacts, ServeConfig],
) -> None:
    """One was kept from its core, one is emulated as ten times slower, one is elsewhere."""
    slow = np.full((3, len(Work), len(BATCHES)), 1e-2)
    reports = [
        machine_report(SERVERS[0], software_s=1.2e-3),
        machine_report(SERVERS[1], software_s=2.4e-3),
        machine_report(SERVERS[2], software_s=1.3e-2, work_s=slow),
        machine_report(SERVERS[3], software_s=1.5e-3, machine="other"),
    ]
    made = measuring.machines_of(*asked, reports, reports)
    assert made.software_s.tolist() == [1.2e-3, 1.2e-3, 1.3e-2, 1.5e-3]


async def test_a_server_times_itself_while_its_users_wait(tiny: Tiny) -> None:
    """Everything is timed, more rows never take less than a tenth of their time, links are told,
    and an answer that was asked for meanwhile is what it would have been."""
    profile, plan = world(tiny, servers=2)
    async with running(tiny, profile=profile, plan=plan) as cluster:
        before = await answers(cluster, [(0, request([1, 2, 3]))])
        measuring = cluster.nodes[0].measure()
        stream = cluster.nodes[0].service.submit(request([1, 2, 3]))
        report = await soon(measuring)
        after = await read(stream)
    assert tokens_of(after) == tokens_of(before[0])
    assert report.work_s.shape == (3, len(Work), len(BATCHES))
    assert (report.work_s > 0).all()
    assert (report.work_s[0] <= report.work_s[2]).all()
    assert report.work_s[1, Work.HEAD, -1] > report.work_s[1, Work.HEAD, 0]
    assert [link.peer for link in report.links] == [cluster.names[1]]


def test_plans_of_earlier_versions_say_what_share_a_batch_needs_once(
    cluster: ClusterSpec, model: ModelSpec, rng: np.random.Generator, tmp_path: Path
) -> None:
    measured = timed_machines(cluster, model).applied(cluster, model, Precision.NONE)
    path = tmp_path / "plan.trim"
    random_plan(rng, model, measured).save(path)
    header, arrays = load_artifact(path, kind="plan", format_version=PLAN_FORMAT)
    times = arrays.pop("cluster.speeds.batch_times")
    save_artifact(path, header, {**arrays, "cluster.speeds.batch_share": np.array([0.6])})
    speeds = load_plan(path).cluster.speeds
    assert speeds is not None
    assert speeds.batch_times == pytest.approx(straight_times(0.6))
    save_artifact(path, header, {**arrays, "cluster.speeds.batch_times": times[:-1]})
    with pytest.raises(UserError, match="is damaged"):
        load_plan(path)
