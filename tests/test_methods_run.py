"""Every method that a command offers is what then runs, or is refused in one sentence.

Commands are run up to where a driver gets its engine, so that what is looked at is what decides.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from factories import random_cluster, random_profile
from launching import SERVERS, cluster_yaml
from synthetic import random_plan
from tiny import write_tiny_checkpoint
from trimmoe import cli
from trimmoe.core.errors import UserError
from trimmoe.core.plan import Plan, plan_header
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ModelSpec, Speeds, straight_times
from trimmoe.core.trace import load_trace, trace_header
from trimmoe.engine.step import Engine
from trimmoe.experiments import preparation, serve_cluster, serve_local, simulation
from trimmoe.experiments.method_engines import plan_for
from trimmoe.experiments.methods import METHODS, UNLIMITED, configured, find_method
from trimmoe.experiments.plan_vs_real import Asked, plan_vs_real
from trimmoe.models.load import open_model
from trimmoe.policy.base import Policy
from trimmoe.policy.baselines import LocalPrior, MaskedGating, MixtureOfDepths
from trimmoe.policy.build import deploy
from trimmoe.policy.presets import auto_within
from trimmoe.policy.trim import TrimPolicy
from trimmoe.runtime.launch.artifacts import Artifacts
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.job import Pieces
from trimmoe.runtime.local import LocalDriver
from trimmoe.runtime.node.watch.deployments import Basis, Conditions, build
from validation import Traffic, validate
from worlds import random_trace

BUDGET, CONFIDENCE = 0.07, 0.8
LETTER = {"paper", "paper-substitute-only"}
"""Move tokens without their KV cache, which servers do not."""
"""Are there to compare with; servers make no chunks of guesses."""
OWN = {
    "mixture-of-depths": MixtureOfDepths,
    "mixture-of-depths-matched": MixtureOfDepths,
    "local-prior": LocalPrior,
    "moe2": MaskedGating,
    "moe2-matched": MaskedGating,
}
"""Methods that are not the one policy with other settings."""
UP_TO = {"generate": 1, "compare": 1, "evaluate": 2, "serve-local": 1, "simulate": 1}
"""Commands that take any method, and which driver of theirs is the method's: `evaluate` has one of
exact execution first."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Files of a model, profile, plan and trace that fit one another, and what they hold."""

    folder: Path
    model: ModelSpec
    profile: Profile
    plan: Plan

    def options(self, command: str) -> list[str]:
        files = {name: str(self.folder / name) for name in ("toy", "profile", "plan", "trace")}
        model = ["--model", files["toy"], "--profile", files["profile"]]
        if command == "simulate":
            return [files["plan"], *model, "--trace", files["trace"], "--seeds", "1"]
        own = {
            "generate": ["Hello"],
            "compare": ["--text", str(self.folder / "text"), "--passages", "2"],
            "evaluate": ["--data", str(self.folder / "data"), "--tasks", "wikitext"],
            "serve-local": ["--port", "0"],
        }
        return [*own[command], *model, "--plan", files["plan"]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Three servers; the text is longer than what any command asks for."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "toy").mkdir()
    write_tiny_checkpoint(folder / "toy")
    model = open_model(folder / "toy", hashed=True).spec
    rng = np.random.default_rng(4)
    profile, cluster = random_profile(rng, model), random_cluster(rng, servers=3)
    hashes = {"model": model.model_hash, "profile": profile.hash}
    header = plan_header(cluster, settings={}, input_hashes=hashes, seed=0)
    plan = replace(random_plan(rng, model, cluster), header=header)
    trace = random_trace(rng, profile, sequences=3, length=6)
    whole = rng.dirichlet(np.ones(model.expert_count), trace.experts.shape[:2])
    trace = replace(
        trace,
        header=trace_header(settings={}, input_hashes=hashes, seed=0),
        probabilities=whole.astype(np.float16),
    )
    profile.save(folder / "profile")
    plan.save(folder / "plan")
    trace.save(folder / "trace")
    narrow = replace(trace, probabilities=None, home_wrong=None, home_confidence=None)
    narrow.save(folder / "narrow")
    (folder / "text").write_text("A quick brown fox. " * 100)
    (folder / "data" / "wikitext-2").mkdir(parents=True)
    (folder / "data" / "wikitext-2" / "wiki.test.tokens").write_text(" = Sea = \n\n It is . \n")
    return World(folder=folder, model=model, profile=profile, plan=plan)


class Stopped(Exception):
    """A driver got what it is to run."""

    def __init__(self, engine: Engine, remade: Policy | None = None) -> None:
        super().__init__()
        self.engine, self.remade = engine, remade


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Drivers of one process and the simulator stop; the one element is how many more may not."""
    left = [0]
    began = LocalDriver.__init__

    def begin(self: LocalDriver, view: Any, profile: Any, engine: Engine, **options: Any) -> None:
        left[0] -= 1
        if left[0] <= 0:
            raise Stopped(engine)
        began(self, view, profile, engine, **options)

    def simulate(engine: Engine, deployment: Any, *_: Any, policy_of: Any, **__: Any) -> None:
        raise Stopped(engine, policy_of(deployment) if policy_of else None)

    monkeypatch.setattr(LocalDriver, "__init__", begin)
    monkeypatch.setattr(simulation, "simulate", simulate)
    return left


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Stopped:
    monkeypatch.setattr(sys, "argv", ["trimmoe", *arguments])
    with pytest.raises(Stopped) as stopped:
        cli.main()
    return stopped.value


def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    monkeypatch.setattr(sys, "argv", ["trimmoe", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    said = capsys.readouterr().err
    assert left.value.code == 2, said
    assert said.startswith("trimmoe: ")
    assert said.strip().count("\n") == 0
    return said


def assert_is_own(name: str, engine: Engine, world: World, *, spends: bool = False) -> None:
    """The engine decides by the policy, settings, hosts and routes of the method `name`."""
    method = METHODS[name]
    if spends and name == "auto":
        # A budget is given, so that it may be spent.
        method = replace(method, settings=auto_within)
    wanted = configured(method, budget=BUDGET, confidence=CONFIDENCE)
    plan = plan_for(method, world.plan, world.profile, world.model)
    assert type(engine.policy) is OWN.get(name, TrimPolicy)
    assert engine.settings == wanted
    routes = deploy(plan, world.profile, world.model, wanted.accounting).routes
    np.testing.assert_array_equal(engine.routes, routes)
    np.testing.assert_array_equal(engine.hosts, plan.hosts)
    if isinstance(engine.policy, TrimPolicy):
        assert engine.policy.lookahead.space.levers == wanted.levers
        assert engine.policy.horizon == wanted.horizon
    else:
        assert wanted.budget == (BUDGET if method.matched else UNLIMITED)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("command", UP_TO)
def test_what_runs_is_the_method_that_was_asked_for(
    command: str, name: str, world: World, stopping: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping[0] = 1 if name == "exact" else UP_TO[command]
    quality = ["--budget", str(BUDGET), "--confidence", str(CONFIDENCE)]
    ran = run(monkeypatch, command, *world.options(command), "--method", name, *quality)
    assert_is_own(name, ran.engine, world, spends=command == "generate")
    if command == "simulate" and name in OWN:
        assert type(ran.remade) is OWN[name], "also once waiting times were measured"


def test_serve_runs_the_policies_it_offers_and_refuses_all_other_methods(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A policy reaches real servers as its settings, so it must be nothing but these."""
    seen = []
    monkeypatch.setattr(serve_cluster, "prepare", lambda *_, **__: None)
    monkeypatch.setattr(
        serve_cluster, "serve_local", lambda _, __, pieces, ___: seen.append(pieces)
    )
    options = ["serve", "--plan", str(world.folder / "plan"), "--port-base", "18400"]
    options += ["--budget", str(BUDGET), "--confidence", str(CONFIDENCE)]
    for name in serve_cluster.POLICIES:
        monkeypatch.setattr(sys, "argv", ["trimmoe", *options, "--policy", name])
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert not left.value.code
        method = METHODS[name]
        if name == "auto":
            # A budget is given, so that it may be spent.
            method = replace(method, settings=auto_within)
        assert seen.pop().policy == configured(method, budget=BUDGET, confidence=CONFIDENCE)
        assert (method.policy, method.seed, method.home) == (None, None, False)
    for name in METHODS.keys() - set(serve_cluster.POLICIES):
        assert name in refused(monkeypatch, capsys, *options, "--policy", name)
    assert not seen
    both = ["--policy", "exact", "--method", "exact"]
    assert "--method or --policy" in refused(monkeypatch, capsys, *options, *both)


@pytest.mark.parametrize("given", ["plan", "cluster"])
@pytest.mark.parametrize("name", sorted(METHODS.keys() - LETTER))
def test_serve_runs_any_method_on_its_own_placement_with_its_own_policy(
    name: str, given: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What every server gets, made into the engine that it starts with; a plan is searched for
    only where the method has none of its own."""
    seen: list[tuple[Artifacts, Pieces]] = []
    monkeypatch.setattr(
        serve_cluster, "serve_local", lambda _, found, pieces, __: seen.append((found, pieces))
    )
    monkeypatch.setattr(preparation, "_plan", lambda *_: world.plan)
    made = []
    monkeypatch.setattr(preparation, "_made", lambda *_: made.append(name) or world.plan)
    (world.folder / "cluster.yaml").write_text(cluster_yaml(SERVERS[:3]))
    folder = world.folder
    options = ["--model", str(folder / "toy"), "--profile", str(folder / "profile")]
    options += ["--plan", str(folder / "plan")] if given == "plan" else []
    options += ["--cluster", str(folder / "cluster.yaml")] if given == "cluster" else []
    options += ["--budget", str(BUDGET), "--confidence", str(CONFIDENCE)]
    options += ["--port-base", "18400"]
    monkeypatch.setattr(sys, "argv", ["trimmoe", "serve", "--method", name, *options])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code
    ((found, pieces),) = seen
    assert made == ([name] if given == "cluster" and METHODS[name].seed else [])
    basis = Basis.of(found.plan, found.profile, found.model, pieces.policy, pieces.maker)
    engine = build(basis, Conditions.planned(3), ()).engine
    assert_is_own(name, replace(engine, hosts=found.plan.hosts), world)


def test_serve_refuses_what_moves_tokens_without_their_cache(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["serve", "--plan", str(world.folder / "plan"), "--method"]
    assert "KV cache" in refused(monkeypatch, capsys, *options, "paper")
    assert "no method `nonesuch`" in refused(monkeypatch, capsys, *options, "nonesuch")


@pytest.mark.parametrize("name", [*OWN, *sorted(LETTER)])
def test_what_real_servers_cannot_run_is_not_compared_with_the_simulator(
    name: str, world: World
) -> None:
    traffic = Traffic(name="any", requests=1, prompt=2, output=2, streams=1)
    with pytest.raises(UserError, match=f"cannot run the method {name}"):
        validate(subject_of(world), name, traffic, seed=0)
    plan = replace(world.plan, cluster=replace(world.plan.cluster, speeds=nothing_measured(3)))
    found = Artifacts(profile=world.profile, plan=plan, model=world.model)
    trace = load_trace(world.folder / "trace")
    asked = Asked(prompts=((1,),), output_tokens=2, streams=(1,), requests=1)
    with pytest.raises(UserError, match=f"cannot run the method {name}"):
        plan_vs_real([name], ServeConfig(budget=BUDGET), found, trace, asked, say=print)


def nothing_measured(servers: int) -> Speeds:
    """Everything takes a second."""
    ones = np.ones(servers)
    return Speeds(
        dense_s=ones, expert_s=ones, head_s=ones, draft_s=ones, hop_s=ones, token_s=ones,
        machine=np.arange(servers), at_once=ones, batch_times=straight_times(0.5),
    )  # fmt: skip


def subject_of(world: World) -> Any:
    """As much of a `validation.Subject` as is looked at before anything starts."""

    class Subject:
        view, profile, plan = type("View", (), {"spec": world.model}), world.profile, world.plan
        budget, confidence = BUDGET, CONFIDENCE

    return Subject


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"exact"}))
def test_without_a_plan_serve_local_refuses_what_would_need_one(
    name: str, world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve_local, "serve", lambda *_: pytest.fail("the exact model is served"))
    model = ["--model", str(world.folder / "toy")]
    said = refused(monkeypatch, capsys, "serve-local", *model, "--method", name)
    assert f"The method {name} needs a profile and a plan" in said


@pytest.mark.parametrize("name", ["local-prior", "moe2", "moe2-matched"])
def test_routing_anew_needs_a_trace_of_whole_router_outputs(
    name: str, world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert find_method(name).reroutes
    narrow = ["--trace", str(world.folder / "narrow")]
    said = refused(
        monkeypatch, capsys, "simulate", *world.options("simulate"), *narrow, "--method", name
    )
    assert "trimmoe record" in said


@pytest.mark.parametrize(("name", "said"), [("moe2", "router"), ("speculative", "would guess")])
def test_what_cannot_be_simulated_is_refused_before_anything_is(
    name: str,
    said: str,
    world: World,
    stopping: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first method named would run."""
    options = world.options("simulate")
    options += ["--trace", str(world.folder / "narrow")]
    assert run(monkeypatch, "simulate", *options, "--method", "exact").engine
    named = ["--method", "exact", "--method", name]
    assert said in refused(monkeypatch, capsys, "simulate", *options, *named)


def test_no_command_offers_methods_unnoticed() -> None:
    """A new one is to be added above."""
    offering = {
        name
        for name, command in commands(typer.main.get_command(cli.app))
        if {"method", "policy"} & {parameter.name for parameter in command.params}
    }
    # `bench methods` and those of plans start `serve --method` for each, `chaos` starts `serve`.
    assert offering == {*UP_TO, "serve", "methods", "plan-vs-real", "plan-matrix", "chaos"}


def commands(group: Any) -> Iterator[tuple[str, Any]]:
    """All commands by name, those of groups included."""
    for name, command in getattr(group, "commands", {}).items():
        yield name, command
        yield from commands(command)
