from __future__ import annotations

import io
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from factories import random_cluster, random_model_spec, random_profile
from trimmoe.core.errors import UserError
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ModelSpec
from trimmoe.cost.expected import expected_layer_delay_s
from trimmoe.cost.model import cost_model
from trimmoe.experiments.explain import (
    explain_plan,
    hosts_text,
    plan_figures,
    route_text,
)
from trimmoe.experiments.plots import plot_plan
from trimmoe.experiments.reasons import plan_reasons
from trimmoe.placement.alternatives import other_routes
from trimmoe.placement.make import make_plan
from trimmoe.placement.optimise import SearchSettings, optimise_plan
from trimmoe.placement.routes import route_delay_s


@pytest.fixture(scope="module")
def made() -> tuple[Plan, Profile, ModelSpec]:
    rng = np.random.default_rng(0)
    model = random_model_spec(rng, layers=6, experts=6, top_k=2)
    profile = random_profile(rng, model)
    return make_plan(profile, model, random_cluster(rng), cluster_hash="c"), profile, model


def test_figures_agree_with_the_plan(made: tuple[Plan, Profile, ModelSpec]) -> None:
    plan, profile, model = made
    figures = plan_figures(plan, profile, model)
    expected = plan.cluster.access_share @ figures.route_s
    assert expected == pytest.approx(plan.header.settings["expected_s"])
    assert figures.executions.sum() == pytest.approx(1.0)
    assert (figures.route_s <= figures.home_s * (1 + 1e-12)).all()
    assert figures.pipeline_s is not None
    assert expected <= plan.cluster.access_share @ figures.pipeline_s
    assert 0 < figures.reference_layer_s <= expected / model.layer_count


def test_everything_is_printed(made: tuple[Plan, Profile, ModelSpec]) -> None:
    plan, profile, model = made
    console = Console(file=io.StringIO(), width=140)
    explain_plan(plan, profile, model, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for name in plan.cluster.server_names:
        assert text.count(name) >= 3
    for word in (
        "Servers",
        "more saves",
        "Experts held",
        "Hosts by layer",
        "Routes",
        "Why these routes",
        "one switch",
        "simple route",
        "ms expected per token",
    ):
        assert word in text
    assert route_text(plan.routes[0], plan.cluster.server_names) in text


def test_names_are_not_taken_for_markup(made: tuple[Plan, Profile, ModelSpec]) -> None:
    plan, profile, model = made
    names = ("[red]", "[/]", "s2", "s3")
    plan = replace(plan, cluster=replace(plan.cluster, server_names=names))
    console = Console(file=io.StringIO(), width=140)
    explain_plan(plan, profile, model, console)
    assert "[red]" in console.file.getvalue()  # type: ignore[attr-defined]


def test_route_text() -> None:
    assert route_text(np.array([0, 0, 2, 0]), ("a", "b", "c")) == "a x2 > c x1 > a x1"


def test_another_model_is_refused(made: tuple[Plan, Profile, ModelSpec]) -> None:
    plan, profile, model = made
    with pytest.raises(UserError, match="plan again"):
        plan_figures(plan, profile, replace(model, model_hash="0"))


def test_the_heat_map_is_written_whole(
    made: tuple[Plan, Profile, ModelSpec], tmp_path: Path
) -> None:
    plot_plan(made[0], tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.png"]
    with pytest.raises(UserError, match="folder"):
        plot_plan(made[0], tmp_path / "nowhere" / "plan.png")


def test_the_reasons_add_up(made: tuple[Plan, Profile, ModelSpec]) -> None:
    plan, profile, model = made
    figures, reasons = plan_figures(plan, profile, model), plan_reasons(plan, profile, model)
    parts = reasons.parts
    whole = parts.moves_s + parts.dense_s + parts.experts_s
    np.testing.assert_allclose(whole, figures.route_s)
    assert (parts.experts_s > 0).all()
    others = reasons.others_s
    np.testing.assert_allclose(others["home"], figures.home_s)
    for less, more in pairwise(("best", "one switch", "one server", "home")):
        assert (others[less] <= others[more] * (1 + 1e-12)).all()
    np.testing.assert_allclose(figures.route_s, others["best"])


def test_simple_routes_by_trying_them_all(made: tuple[Plan, Profile, ModelSpec]) -> None:
    plan, profile, model = made
    cost = cost_model(model, plan.cluster)
    tables = expected_layer_delay_s(cost, plan.hosts, profile)
    servers, layers = plan.routes.shape
    tried = []
    for first, second in product(range(servers), repeat=2):
        for switch in range(1, layers + 1):
            route = np.where(np.arange(layers) < switch, first, second)
            tried.append(route_delay_s(cost, tables, np.tile(route, (servers, 1))))
    np.testing.assert_allclose(other_routes(cost, tables)["one switch"], np.min(tried, axis=0))
    alone = [route_delay_s(cost, tables, np.full((servers, layers), m)) for m in range(servers)]
    np.testing.assert_allclose(other_routes(cost, tables)["one server"], np.min(alone, axis=0))


def test_more_memory_saves_where_it_was_short() -> None:
    rng = np.random.default_rng(2)
    model = random_model_spec(rng, layers=4, experts=4, top_k=2)
    cluster = random_cluster(rng, memory_ratio=1.4)
    profile = random_profile(rng, model)
    plan = make_plan(profile, model, cluster, cluster_hash="c")
    reasons = plan_reasons(plan, profile, model)
    assert (reasons.gain_s >= 0).all()
    assert reasons.gain_s.max() > 0
    plenty = replace(plan, expert_capacity_bytes=np.full(4, 10 * model.total_expert_bytes))
    assert plan_reasons(plenty, profile, model).gain_s.max() == 0.0
    none = plan_reasons(plan, profile, model, keep_going=lambda: False)
    assert np.isnan(none.gain_s).all()


def test_hosts_text() -> None:
    held = np.array([[1, 1, 1], [0, 0, 0], [1, 0, 1]], dtype=bool)
    assert hosts_text(held, ("a", "b", "c")) == "a; c: 0 2"
    many = np.isin(np.arange(9), [0, 1, 3, 4, 5, 8])[None]
    assert hosts_text(many, ("a",)) == "a: 0 1 3-5 8"


def test_an_optimised_plan_says_how_near_the_optimum_it_is() -> None:
    rng = np.random.default_rng(0)
    model = random_model_spec(rng, layers=2, experts=2, top_k=1)
    profile = random_profile(rng, model)
    search = SearchSettings(iterations=200, bound_seconds=30.0)
    plan = optimise_plan(
        profile, model, random_cluster(rng, servers=2, memory_ratio=1.6), search, cluster_hash="c"
    )
    bound = plan.header.settings["bound"]
    assert bound["optimal"]
    assert bound["gap"] == pytest.approx(0.0, abs=1e-5)
    console = Console(file=io.StringIO(), width=140)
    explain_plan(plan, profile, model, console)
    text = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "optimum" in text
    assert "200 iterations" in text
