"""What a budget charges is bounded at every prefix, whatever flips."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from evaluating import Bench, make_bench
from trimmoe.cli import app
from trimmoe.core.errors import UserError
from trimmoe.core.ledger import Ledger
from trimmoe.evaluate.jobs import Forced
from trimmoe.evaluate.teacher import cut_passages
from trimmoe.experiments.budget_meaning import (
    MeaningSettings,
    meaning_json,
    meaning_table,
    measure_meaning,
    measure_policy,
)
from trimmoe.experiments.compare import access_servers
from trimmoe.experiments.readings import run_policy
from trimmoe.experiments.variants import base_policy

SETTINGS = MeaningSettings(budgets=(0.05, 0.5), confidence=0.6, passages=4, context=8, steps=12)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def texts() -> dict[str, list[int]]:
    rng = np.random.default_rng(5)
    return {name: rng.integers(0, 256, 200).tolist() for name in ("near", "far")}


def test_the_charge_never_exceeds_the_credit_of_any_prefix(bench: Bench, texts) -> None:
    measured = measure_meaning(bench.view, bench.profile, bench.plan, texts, SETTINGS)
    assert len(measured) == 2 * 2 * 2
    for one in measured:
        assert one.score.worst_prefix <= 1 + 1e-9
        assert one.score.ledger.loss <= one.policy.budget * one.score.tokens + 1e-9
        assert one.score.tokens == 4 * 12
        assert one.policy.confidence <= one.start_confidence
        assert one.start_confidence <= one.end_confidence
    assert max(one.score.worst_prefix for one in measured) > 0


def test_an_account_that_was_overdrawn_shows_for_good() -> None:
    """After two tokens, though all of them together were charged less than they were credited."""
    job = Forced(prompt=[1], answer=[2, 3, 4, 5, 6])
    empty = Ledger.empty(1, 1, 4)
    job.add(0, 0.0, None)
    for loss in (0.1, 0.7, 0.0, 0.0):
        job.add(0, 0.0, replace(empty, tokens=1, loss=loss, budget=0.25))
    assert job.worst_prefix == pytest.approx(0.8 / 0.5)
    assert job.ledger is not None
    assert job.ledger.loss < job.ledger.budget


def test_a_point_is_what_decoding_the_same_passages_gives(bench: Bench, texts) -> None:
    measured = measure_meaning(
        bench.view, bench.profile, bench.plan, {"near": texts["near"]}, SETTINGS
    )
    passages = cut_passages(bench.view, texts["near"], count=4, context=8, steps=12)
    access = access_servers(bench.plan, 4, 0)
    policy = base_policy(budget=0.5, confidence=0.6)
    again = run_policy(
        bench.view, bench.profile, bench.plan, passages, access, policy, label="", seed=0
    )
    (point,) = [one for one in measured if one.policy == policy]
    assert (point.score.flips, point.score.nll) == (again.flips, again.nll)
    assert point.exact_perplexity == pytest.approx(np.exp(passages.exact_nll.mean()))


def test_audits_are_counted_and_pull_p_up(bench: Bench, texts) -> None:
    """A profile that swears exits are harmless, a random model, and every exit audited."""
    passages = cut_passages(bench.view, texts["near"], count=4, context=8, steps=40)
    harmless = np.zeros_like(bench.profile.exit_error_upper)
    sworn = replace(bench.profile, exit_error_upper=harmless, exit_echo=np.zeros(2))
    policy = base_policy(budget=0.9, confidence=0.0).but(
        draft_confidence=None,
        exit_risk=0.0, exits_charged=False, audit_share=1.0, window_tokens=16,
    )  # fmt: skip
    one = measure_policy(bench.view, sworn, bench.plan, "near", passages, policy, seed=0)
    assert one.false_exits > 0
    assert one.audits >= one.false_exits
    assert one.audits == one.score.ledger.audits
    assert one.end_confidence > one.start_confidence


def test_the_table_and_the_figures_show_every_point(bench: Bench, texts) -> None:
    measured = measure_meaning(bench.view, bench.profile, bench.plan, texts, SETTINGS)
    content = meaning_json(SETTINGS, measured, {"plan": "x"})
    assert [(p["domain"], p["policy"], p["budget"]) for p in content["points"]] == [
        (domain, policy, budget)
        for domain in texts
        for policy in ("trimmoe", "paper")
        for budget in SETTINGS.budgets
    ]
    for point in content["points"]:
        assert point["flip_rate_low_95"] <= point["flip_rate"] <= point["flip_rate_high_95"]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(meaning_table(content))
    shown = console.export_text()
    assert "near" in shown
    assert "50.0%" in shown


def test_a_short_text_is_named(bench: Bench) -> None:
    with pytest.raises(UserError, match="The text far is too short"):
        measure_meaning(bench.view, bench.profile, bench.plan, {"far": [1, 2, 3]}, SETTINGS)


def test_texts_are_named_and_differ(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("some text")
    for given in (["plain.txt"], [f"a={file}", f"a={file}"]):
        options = [part for each in given for part in ("--text", each)]
        done = CliRunner().invoke(
            app,
            ["experiment", "budget-meaning", *options, "--profile", "p", "--plan", "q"],
        )
        assert isinstance(done.exception, UserError)
        assert "NAME=FILE" in str(done.exception)
