"""Figures of servers that serve drift: the plan changes for what lasts, and for nothing else."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from factories import random_cluster, random_model_spec, random_profile
from timed import timed_machines
from trimmoe.core.machines import Work
from trimmoe.core.plan import Plan
from trimmoe.core.precision import Precision
from trimmoe.core.specs import ClusterSpec
from trimmoe.experiments.drifting import Drift, refreshed
from trimmoe.placement.make import make_plan
from trimmoe.runtime.launch.artifacts import Artifacts
from trimmoe.runtime.launch.deployment import Report
from trimmoe.runtime.launch.handles import ServerGone
from trimmoe.runtime.launch.lookout import TIMED_EVERY, Glance, Lookout
from trimmoe.runtime.launch.status import Phase, ServerStatus
from trimmoe.runtime.machine_report import LinkReport, MachineReport

MOVING_S = 20.0


@dataclass
class Scene:
    """Three servers as they were measured, and the plan made for that."""

    def __post_init__(self) -> None:
        rng = np.random.default_rng(5)
        self.model = random_model_spec(rng, layers=4, experts=6, top_k=2)
        self.profile = random_profile(rng, self.model)
        # Each could hold all experts.
        cluster = random_cluster(rng, servers=3)
        room = np.full(3, 2 * (self.model.total_expert_bytes + self.model.dense_bytes))
        self.cluster = replace(cluster, memory_bytes=room.astype(np.int64), memory_ratio=None)
        made = timed_machines(self.cluster, self.model, hop_s=1e-4)
        alike = np.broadcast_to(made.work_s[:1], made.work_s.shape).copy()
        self.machines = replace(made, work_s=alike, low_s=0.99 * alike, high_s=1.01 * alike)
        self.drift = Drift(
            profile=self.profile,
            model=self.model,
            precision=Precision.NONE,
            nominal=self.cluster,
            machines=self.machines,
        )
        self.plan = self.plan_for(self.machines.applied(self.cluster, self.model, Precision.NONE))
        self.planned = 0

    def plan_for(self, cluster: ClusterSpec) -> Plan:
        self.planned = getattr(self, "planned", 0) + 1
        return make_plan(self.profile, self.model, cluster, cluster_hash="")

    def told(self, slower: list[float]) -> list[Glance]:
        """Server m takes so many times what it took."""
        return [Glance(report=self.report(at, factor)) for at, factor in enumerate(slower)]

    def report(self, server: int, factor: float) -> MachineReport:
        before = self.machines
        quantiles = [getattr(before, name)[server] for name in ("low_s", "work_s", "high_s")]
        return MachineReport(
            server=self.cluster.server_names[server], machine="a", device="cpu", threads=1,
            free_bytes=1, software_s=float(before.software_s[server]) * factor,
            work_s=np.stack(quantiles) * factor, links=(),
        )  # fmt: skip

    def look(self, slower: list[float]) -> Plan | None:
        return self.drift.look(self.plan, self.told(slower), MOVING_S, self.plan_for)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def _fullest(plan: Plan) -> int:
    """The server that most layers of all routes are on."""
    return int(np.bincount(plan.routes.ravel(), minlength=3).argmax())


def test_a_server_that_stays_slow_is_planned_around_on_the_third_look(scene: Scene) -> None:
    slow = [1.0, 1.0, 1.0]
    slow[_fullest(scene.plan)] = 20.0
    assert [scene.look(slow) is None for _ in range(2)] == [True, True]
    assert scene.drift.wavers
    moved = scene.look(slow)
    assert moved is not None
    at = _fullest(scene.plan)
    assert (moved.routes == at).sum() < (scene.plan.routes == at).sum()
    # Now it is the plan to beat, and nothing moves any more.
    scene.plan = moved
    assert [scene.look(slow) for _ in range(5)] == [None] * 5


def test_one_slow_look_moves_nothing(scene: Scene) -> None:
    """As a server looks while something else runs on its machine."""
    slow = [1.0, 1.0, 1.0]
    slow[_fullest(scene.plan)] = 20.0
    for _ in range(4):
        assert scene.look(slow) is None
        assert scene.look([1.0, 1.0, 1.0]) is None


def test_noise_does_not_even_make_plans(scene: Scene) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        assert scene.look(list(rng.uniform(0.95, 1.05, 3))) is None
    assert scene.planned == 0


@pytest.mark.parametrize("nonsense", [np.nan, np.inf, -1.0, 0.0, 1e9, 1e-9])
def test_nonsense_leaves_what_is_known(scene: Scene, nonsense: float) -> None:
    for _ in range(5):
        assert scene.look([nonsense, 1.0, 1.0]) is None
    seen = refreshed(scene.machines, scene.told([nonsense, 1.0, 1.0]))
    for name in ("work_s", "hop_s", "token_s", "software_s"):
        assert np.array_equal(getattr(seen, name), getattr(scene.machines, name)), name


@pytest.mark.parametrize("lie", [0.1, 10.0])
def test_a_server_that_lies_by_ten_times_costs_speed_only(scene: Scene, lie: float) -> None:
    """Whatever it brings about is a plan with all experts and whole routes."""
    for _ in range(4):
        moved = scene.look([lie, 1.0, 1.0])
        if moved is not None:
            assert moved.hosts.any(axis=0).all()
            assert ((moved.routes >= 0) & (moved.routes < 3)).all()
            scene.plan = moved


def test_links_drift_under_load_too(scene: Scene) -> None:
    """A link that takes ten times as long is seen without a server timing itself."""
    names = scene.cluster.server_names
    slow = LinkReport(peer=names[1], delay_s=0.5, bandwidth_bytes_per_s=None, jitter_s=None)
    stranger = replace(slow, peer="nobody")
    told = [Glance(links=(slow, stranger)), Glance(), Glance()]
    seen = refreshed(scene.machines, told)
    expected = scene.machines.delay_s.copy()
    expected[0, 1] = 0.5
    assert np.array_equal(seen.delay_s, expected)
    assert np.array_equal(seen.work_s[:, Work.DENSE], scene.machines.work_s[:, Work.DENSE])


@dataclass
class _Server:
    """A fake one."""

    running: int = 0
    gone: bool = False
    timed: int = 0

    def status(self, patience_s: float) -> ServerStatus | None:
        if self.gone:
            raise ServerGone("away")
        return ServerStatus(phase=Phase.SERVING, pid=0, healthy=True, running=self.running)

    def begin_measuring(self) -> None:
        self.timed += 1

    def measured(self, patience_s: float) -> MachineReport | None:
        return None


@dataclass
class _Judge:
    verdict: Artifacts | None = None
    wavers: bool = False
    heard: list[list[Glance]] = field(default_factory=list)

    def drifted(self, now: Artifacts, told: list[Glance], moving_s: float) -> Artifacts | None:
        self.heard.append(told)
        return self.verdict


def _lookout(
    servers: list[_Server], judge: _Judge, scene: Scene
) -> tuple[Lookout, threading.Event]:
    now = Artifacts(profile=scene.profile, plan=scene.plan, model=scene.model)
    leaving = threading.Event()
    return Lookout(servers, judge, now, MOVING_S, leaving, print), leaving  # type: ignore[arg-type]


def test_servers_time_themselves_only_while_nobody_waits(scene: Scene) -> None:
    servers, judge = [_Server(), _Server(running=1)], _Judge()
    lookout, leaving = _lookout(servers, judge, scene)
    for _ in range(TIMED_EVERY + 5):
        lookout.look()
    assert [each.timed for each in servers] == [0, 0]
    servers[1].running = 0
    lookout.look()
    assert [each.timed for each in servers] == [1, 1]
    lookout.look()
    assert [each.timed for each in servers] == [1, 1]
    judge.wavers = True
    lookout.look()
    assert [each.timed for each in servers] == [2, 2]
    assert not leaving.is_set()


def test_nobody_judges_by_servers_that_are_away(scene: Scene) -> None:
    servers, judge = [_Server(), _Server(gone=True)], _Judge()
    lookout, leaving = _lookout(servers, judge, scene)
    lookout.look()
    assert judge.heard == []
    servers[1].gone = False
    judge.verdict = Artifacts(profile=scene.profile, plan=scene.plan, model=scene.model)
    lookout.look()
    assert leaving.is_set()
    assert lookout.found is judge.verdict


def test_members_tell_what_a_look_needs() -> None:
    link = LinkReport(peer="attic", delay_s=0.01, bandwidth_bytes_per_s=None, jitter_s=0.0)
    status = ServerStatus(phase=Phase.SERVING, pid=1, running=2, waiting=1, links=(link,))
    told = Report.of("d", "desk", status).status
    assert told is not None
    assert (told.running + told.waiting, told.links) == (3, (link,))
