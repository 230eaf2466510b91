"""What presets bundle: the paper's letter, field by field, and what the others change of it."""

from __future__ import annotations

from dataclasses import fields

import pytest

from trimmoe.core.exit_states import ExitState
from trimmoe.cost.actions import Levers
from trimmoe.cost.model import Accounting
from trimmoe.policy.presets import PRESETS, paper_substitute_only, ring
from trimmoe.policy.settings import BudgetRule, ExitRule, PolicySettings, WeightRule

NOTHING = Levers(substitute=False, drop_slots=False, skip=False, exit=False)


def differs(one: PolicySettings, other: PolicySettings) -> set[str]:
    names = [item.name for item in fields(PolicySettings) if item.name != "name"]
    return {name for name in names if getattr(one, name) != getattr(other, name)}


def test_presets_are_found_by_their_names() -> None:
    assert {name: made().name for name, made in PRESETS.items()} == {name: name for name in PRESETS}


def test_the_papers_letter() -> None:
    paper = PRESETS["paper"]()
    assert paper.accounting is Accounting.MIGRATE, "(12), (13)"
    assert paper.levers == Levers(drop_slots=False), "(34): a layer runs, or is skipped"
    assert paper.importance_gate, "(24)"
    assert paper.budget_rule is BudgetRule.EVEN, "(33)"
    assert paper.horizon == 3, "(40)"
    assert (paper.budget, paper.confidence) == (0.02, 0.9), "section VI"
    assert paper.exit_rule is ExitRule.PAPER, "(37)"
    assert paper.weight_rule is WeightRule.PAPER, "(43)"
    assert paper.loss_weight_range == (0.0, 1.0), "(43)"
    assert paper.exit_state is ExitState.FROZEN
    assert (paper.exit_risk, paper.draft_confidence, paper.audit_share) == (None, None, 0.0)
    on = ("one_expert", "target_transitions", "target_importance", "mean_losses")
    for name in (*on, "user_references", "user_exits", "workload_limit", "prompts_trimmed"):
        assert getattr(paper, name), name
    off = ("inflate", "echoes_charged", "exits_charged", "exits_weighed", "steadiness")
    for name in (*off, "slot_ranks", "hazards", "price_start"):
        assert not getattr(paper, name), name


@pytest.mark.parametrize(
    ("preset", "base", "changed"),
    [
        ("final-exits", "trimmoe", {"draft_confidence"}),
        ("trimming", "trimmoe", {"draft_confidence", "levers"}),
        ("guessing", "trimming", {"guesses"}),
        ("substitute-only", "final-exits", {"levers"}),
        ("lossless", "exact", {"draft_confidence", "levers", "horizon"}),
        ("speculative", "exact", {"guesses"}),
        ("auto", "speculative", {"guess_below"}),
    ],
)
def test_presets_that_differ_from_another_only_in_some_settings(
    preset: str, base: str, changed: set[str]
) -> None:
    assert differs(PRESETS[preset](), PRESETS[base]()) == changed


def test_the_papers_predecessor_substitutes_and_looks_no_further() -> None:
    before = paper_substitute_only()
    assert differs(before, PRESETS["paper"]()) == {"levers", "horizon"}
    assert before.levers == Levers(drop_slots=False, skip=False, exit=False)
    assert before.horizon == 1


def test_exits_may_flip_a_hundredth_of_the_tokens() -> None:
    assert PRESETS["final-exits"]().exit_risk == 0.01


def test_what_is_exact_has_nothing_to_choose_nor_to_spend_nor_to_learn() -> None:
    exact = PRESETS["exact"]()
    assert exact.levers == NOTHING
    assert (exact.budget, exact.audit_share, exact.guesses) == (0.0, 0.0, 0)
    assert (exact.weight_rule, exact.exit_rule) == (WeightRule.FIXED, ExitRule.FIXED)
    assert not exact.price_start
    assert (PRESETS["speculative"]().guesses, PRESETS["guessing"]().guesses) == (16, 16)
    only = PRESETS["substitute-only"]().levers
    assert only == Levers(drop_slots=False, skip=False, exit=False)
    assert PRESETS["lossless"]().levers == Levers(
        substitute=False, drop_slots=False, skip=False, exit=True
    )


def test_a_ring_drafts_four_tokens_at_a_time_however_improbable() -> None:
    drafting = ring()
    changed = {"guesses", "guess_chunks", "guess_chance", "guess_confidence"}
    assert differs(drafting, PRESETS["exact"]()) == changed
    assert (drafting.guesses, drafting.guess_chunks) == (4, True)
    assert (drafting.guess_chance, drafting.guess_confidence) == (0.0, 0.0)
    assert ring(7).guesses == 7


def test_tokens_are_withdrawn_where_some_set_out_on_drafts_or_guesses() -> None:
    assert {name for name, made in PRESETS.items() if made().withdraws} == {
        "trimmoe", "lossless", "speculative", "auto", "guessing",
    }  # fmt: skip


def test_where_tokens_move_for_free_exits_are_final() -> None:
    """Nothing would say what checking a draft costs."""
    drafts = PRESETS["trimmoe"]()
    assert differs(drafts.under(Accounting.MIGRATE), drafts) == {"accounting", "draft_confidence"}
    moving = drafts.under(Accounting.MIGRATE)
    assert (moving.accounting, moving.draft_confidence) == (Accounting.MIGRATE, None)
    assert differs(drafts.under(Accounting.HOME), drafts) == {"accounting"}
