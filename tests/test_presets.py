"""What presets bundle: the paper's letter, field by field, and what the others change of it."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from trimmoe.core.exit_states import ExitState
from trimmoe.cost.actions import Levers
from trimmoe.cost.model import Accounting
from trimmoe.policy.presets import PRESETS, paper_substitute_only, ring
from trimmoe.policy.readings import BudgetRule, ExitRule, Readings, WeightRule
from trimmoe.policy.settings import PolicySettings

NOTHING = Levers(substitute=False, drop_slots=False, skip=False, exit=False)


def differs(one: PolicySettings, other: PolicySettings) -> set[str]:
    theirs = other.described()
    return {name for name, value in one.described().items() if value != theirs[name]} - {"name"}


def test_presets_are_found_by_their_names() -> None:
    assert {name: made().name for name, made in PRESETS.items()} == {name: name for name in PRESETS}


def test_the_papers_letter() -> None:
    paper = PRESETS["paper"]()
    letter = paper.readings
    assert paper.accounting is Accounting.MIGRATE, "(12), (13)"
    assert paper.levers == Levers(drop_slots=False), "(34): a layer runs, or is skipped"
    assert letter.importance_gate, "(24)"
    assert letter.budget_rule is BudgetRule.EVEN, "(33)"
    assert paper.horizon == 3, "(40)"
    assert (paper.budget, paper.confidence) == (0.02, 0.9), "section VI"
    assert letter.exit_rule is ExitRule.PAPER, "(37)"
    assert letter.weight_rule is WeightRule.PAPER, "(43)"
    assert letter.loss_weight_range == (0.0, 1.0), "(43)"
    assert letter.exit_state is ExitState.FROZEN
    assert (letter.exit_risk, paper.draft_confidence, letter.audit_share) == (None, None, 0.0)
    on = ("one_expert", "target_transitions", "target_importance", "mean_losses")
    for name in (*on, "user_references", "user_exits", "workload_limit", "prompts_trimmed"):
        assert getattr(letter, name), name
    off = ("inflate", "echoes_charged", "exits_charged", "exits_weighed", "steadiness")
    for name in (*off, "slot_ranks", "hazards", "price_start"):
        assert not getattr(letter, name), name


def test_every_reading_has_a_letter_of_its_own() -> None:
    ours, letter = Readings(), Readings.letter()
    for each in fields(Readings):
        assert getattr(ours, each.name) != getattr(letter, each.name), each.name


def test_the_papers_preset_is_its_letter_with_its_actions_horizon_and_accounting() -> None:
    ours, paper = PRESETS["trimmoe"](), PRESETS["paper"]()
    assert paper.readings == Readings.letter()
    read = {each.name for each in fields(Readings)}
    assert differs(paper, ours) - read == {"levers", "horizon", "accounting", "draft_confidence"}


def test_options_are_changed_by_name_those_of_readings_too() -> None:
    ours = PRESETS["final-exits"]()
    changed = ours.but(horizon=2, exit_risk=None)
    assert differs(changed, ours) == {"horizon", "exit_risk"}
    assert (changed.horizon, changed.readings) == (2, replace(ours.readings, exit_risk=None))
    read = ours.but(readings=Readings.letter(), exit_risk=0.5).readings
    assert read == replace(Readings.letter(), exit_risk=0.5)
    with pytest.raises(TypeError, match="no_such"):
        ours.but(no_such=1)


def test_results_name_every_option_once() -> None:
    """As they did before readings were a type of their own."""
    told = PRESETS["paper"]().described()
    names = [each.name for kind in (PolicySettings, Readings) for each in fields(kind)]
    assert sorted(told) == sorted(name for name in names if name != "readings")
    assert (told["budget_rule"], told["levers"]["drop_slots"]) == ("even", False)


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
        ("relaxed", "speculative", {"relaxed", "budget"}),
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
    assert PRESETS["final-exits"]().readings.exit_risk == 0.01


def test_what_is_exact_has_nothing_to_choose_nor_to_spend_nor_to_learn() -> None:
    exact = PRESETS["exact"]()
    assert exact.levers == NOTHING
    assert (exact.budget, exact.readings.audit_share, exact.guesses) == (0.0, 0.0, 0)
    learnt = exact.readings
    assert (learnt.weight_rule, learnt.exit_rule) == (WeightRule.FIXED, ExitRule.FIXED)
    assert not learnt.price_start
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
        "trimmoe", "lossless", "speculative", "relaxed", "auto", "guessing",
    }  # fmt: skip


def test_where_tokens_move_for_free_exits_are_final() -> None:
    """Nothing would say what checking a draft costs."""
    drafts = PRESETS["trimmoe"]()
    assert differs(drafts.under(Accounting.MIGRATE), drafts) == {"accounting", "draft_confidence"}
    moving = drafts.under(Accounting.MIGRATE)
    assert (moving.accounting, moving.draft_confidence) == (Accounting.MIGRATE, None)
    assert differs(drafts.under(Accounting.HOME), drafts) == {"accounting"}
