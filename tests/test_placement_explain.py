from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from factories import random_cluster, random_model_spec, random_profile
from trimmoe.core.errors import UserError
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ModelSpec
from trimmoe.experiments.explain import explain_plan, plan_figures, plot_plan, route_text
from trimmoe.placement.make import make_plan


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
    for word in ("Servers", "Experts held", "Routes", "ms expected per token"):
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
