"""`import trimmoe`: what it offers, on a tiny model; its documentation's examples on the model that
ships."""

from __future__ import annotations

import doctest
import json
import sys
from dataclasses import FrozenInstanceError, dataclass, replace
from importlib import import_module
from itertools import accumulate
from pathlib import Path

import pytest

import trimmoe
from launching import Files, write_files
from trimmoe import cli

PROMPT = "What is an operator"
EXAMPLES = ("core.choice", "facade.names", "facade.token", "facade.model", "facade.simulation")


@dataclass(frozen=True, kw_only=True)
class Made:
    files: Files
    model: trimmoe.Model
    plan: trimmoe.Plan


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    files = write_files(tmp_path_factory.mktemp("facade"))
    model = trimmoe.load(files.model)
    plan = model.load_plan(files.plan, profile=files.profile)
    return Made(files=files, model=model, plan=plan)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRIMMOE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_every_name_is_there_and_no_other() -> None:
    assert set(trimmoe.__all__) <= set(dir(trimmoe))
    for name in trimmoe.__all__:
        assert getattr(trimmoe, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'train'"):
        _ = trimmoe.train  # type: ignore[attr-defined]


def test_a_plan_is_made_once_and_found_again(made: Made, cache: Path) -> None:
    first = made.model.plan(made.files.cluster, profile=made.files.profile)
    (kept,) = (cache / "plans").iterdir()
    written = kept.stat().st_mtime_ns
    again = made.model.plan(made.files.cluster, profile=made.files.profile)
    assert again.placed.hash == first.placed.hash
    assert kept.stat().st_mtime_ns == written
    assert first.servers == made.plan.servers
    assert all(0 < each < 1 for each in first.expected_s.values())


def test_answers_without_a_budget_are_the_exact_models(made: Made) -> None:
    alone = list(made.model.generate(PROMPT, max_tokens=12))
    planned = list(made.model.generate(PROMPT, plan=made.plan, max_tokens=12))
    assert [token.id for token in planned] == [token.id for token in alone]
    assert "".join(map(str, planned)) == "".join(map(str, alone))
    assert sum(token.spent for token in planned) == 0
    assert sum(token.hops for token in alone) == 0
    layers = made.model.spec.layer_count
    assert not planned[0].layers
    assert all(token.executed == len(token.layers) == layers for token in planned[1:])
    with pytest.raises(FrozenInstanceError):
        planned[0].text = "other"  # type: ignore[misc]


def test_a_budget_is_spent_and_holds_at_every_token(made: Made) -> None:
    budget = 0.3
    options = {"plan": made.plan, "method": "final-exits", "max_tokens": 16}
    tokens = list(made.model.generate(PROMPT, **options, budget=budget))
    spent = list(accumulate(token.spent for token in tokens[1:]))
    assert spent[-1] > 0
    assert all(sum_ <= budget * count + 1e-9 for count, sum_ in enumerate(spent, 1))
    assert sum(token.exited for token in tokens) > 0
    assert list(made.model.generate(PROMPT, **options, budget=budget)) == tokens


def test_what_was_chosen_holds_where_an_answer_is_told_nothing_else(made: Made) -> None:
    choice = trimmoe.Choice(method="final-exits", budget=0.3)
    model = replace(made.model, choice=choice)
    options = {"plan": made.plan, "max_tokens": 8}
    said = list(made.model.generate(PROMPT, **options, method="final-exits", budget=0.3))
    assert list(model.generate(PROMPT, **options)) == said
    plain = list(made.model.generate(PROMPT, **options, method="exact"))
    assert list(model.generate(PROMPT, **options, method="exact")) == plain != said
    with pytest.raises(trimmoe.UserError, match="give one"):
        model.generate(PROMPT)


def test_weights_are_held_as_chosen(made: Made) -> None:
    chosen = trimmoe.Choice(budget=0.1, quantise=trimmoe.Precision.INT8)
    assert trimmoe.load(made.files.model, choice=chosen).choice == chosen
    exact = trimmoe.load(made.files.model, choice=chosen, quantise="none").choice
    assert exact == trimmoe.Choice(budget=0.1)
    assert trimmoe.load(made.files.model).choice == trimmoe.Choice()


def test_who_asks_and_where_matters(made: Made) -> None:
    last = made.plan.servers[-1]
    options = {"plan": made.plan, "max_tokens": 6, "temperature": 1.0}
    there = list(made.model.generate(PROMPT, **options, seed=1, access=last))
    same = list(made.model.generate(PROMPT, **options, seed=1, access=last))
    other = list(made.model.generate(PROMPT, **options, seed=2, access=last))
    assert there == same
    assert [token.id for token in there] != [token.id for token in other]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budget": 0.1}, "give one"),
        ({"method": "trimmoe"}, "give one"),
        ({"max_tokens": 0}, "at least 1 token"),
        ({"prompt": " "}, "empty"),
    ],
)
def test_what_cannot_be_answered_is_refused(made: Made, options: dict, says: str) -> None:
    with pytest.raises(trimmoe.UserError, match=says):
        made.model.generate(**{"prompt": PROMPT, **options})


def test_names_that_do_not_exist_are_refused(made: Made, cache: Path) -> None:
    with pytest.raises(trimmoe.UserError, match="int9"):
        trimmoe.load(made.files.model, quantise="int9")
    with pytest.raises(trimmoe.UserError, match="choose auto"):
        trimmoe.load(made.files.model, dtype="float8")
    with pytest.raises(trimmoe.UserError, match="moon"):
        made.model.plan("moon", profile=made.files.profile)
    with pytest.raises(trimmoe.UserError, match="magic"):
        made.model.generate(PROMPT, plan=made.plan, method="magic")
    with pytest.raises(trimmoe.UserError, match="mars"):
        made.model.generate(PROMPT, plan=made.plan, access="mars")


def test_a_simulation_is_that_of_the_command_and_drawn(
    made: Made, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = made.plan.record(tokens=256)
    assert made.plan.record(tokens=256).hash == trace.hash
    assert len(list((cache / "traces").iterdir())) == 1
    seen = trimmoe.simulate(
        made.plan, rate=5, methods=["exact", "auto"], duration_s=2, warm_up_s=1, trace=trace
    )
    trace.save(tmp_path / "trace.trim")
    command = [
        "simulate", made.files.plan, "--profile", made.files.profile, "--model", made.files.model,
        "--trace", tmp_path / "trace.trim", "--rate", 5, "--method", "exact", "--method", "auto",
        "--duration", 2, "--warm-up", 1, "--seeds", 1, "--json", tmp_path / "seen.json",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["trimmoe", *map(str, command)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code
    written = json.loads((tmp_path / "seen.json").read_text())
    for row in written["methods"]:
        figures = {name: each["mean"] for name, each in row["figures"].items()}
        assert seen.figures[row["method"]] == pytest.approx(figures, nan_ok=True)
    assert "exact nearest" in str(seen)
    assert max(map(len, str(seen).splitlines())) <= 80
    for name, drawn in (("load.png", seen.plot), ("plan.png", made.plan.plot)):
        assert drawn(tmp_path / name).axes
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_it_has_examples_in_its_documentation() -> None:
    found = doctest.DocTestFinder()
    for name in EXAMPLES:
        module = import_module(f"trimmoe.{name}")
        assert any(test.examples for test in found.find(module)), name


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_in_its_documentation_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = import_module(f"trimmoe.{name}")
    assert doctest.testmod(module).failed == 0
