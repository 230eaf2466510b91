"""What a user chooses, and the policies that follow."""

from __future__ import annotations

import pytest

from trimmoe.core.choice import DEFAULT_BUDGET, Choice
from trimmoe.core.errors import UserError
from trimmoe.core.precision import Precision
from trimmoe.experiments.methods import chosen, named, replayed, served
from trimmoe.policy.presets import auto, auto_within, final_exits
from trimmoe.runtime.launch.config import ServeConfig


def test_without_a_budget_methods_that_trim_have_the_default_one() -> None:
    assert Choice().allowed == DEFAULT_BUDGET
    assert Choice(budget=0.0).allowed == 0.0


def test_what_is_not_given_stays_as_chosen() -> None:
    choice = Choice(method="trimmoe", budget=0.1, quantise=Precision.INT4)
    assert choice.overridden(budget=None, confidence=0.5) == Choice(
        method="trimmoe", budget=0.1, confidence=0.5, quantise=Precision.INT4
    )
    assert choice.overridden() == choice


def test_what_is_chosen_reaches_the_policy() -> None:
    choice = Choice(method="final-exits", budget=0.1, confidence=0.8)
    wanted = final_exits().but(budget=0.1, confidence=0.8, exit_risk=0.05)
    assert named(choice)[1] == chosen(choice)[1] == served(choice) == replayed(choice) == wanted


def test_auto_spends_a_budget_where_one_is_given() -> None:
    assert chosen(Choice())[1] == auto()
    assert chosen(Choice(budget=0.1))[1] == auto_within().but(budget=0.1, exit_risk=0.05)
    assert named(Choice(budget=0.1))[1] == auto()


@pytest.mark.parametrize("ask", [named, chosen, served, replayed])
def test_an_unknown_method_is_refused(ask) -> None:
    with pytest.raises(UserError, match="no method `magic`"):
        ask(Choice(method="magic"))


def test_what_moves_without_its_cache_is_not_served() -> None:
    with pytest.raises(UserError, match="without their KV cache"):
        served(Choice(method="paper"))


def test_a_policy_of_its_own_is_not_replayed() -> None:
    with pytest.raises(UserError, match="a policy of its own"):
        replayed(Choice(method="moe2"))


@pytest.mark.parametrize(
    ("given", "method"),
    [({}, "auto"), ({"policy": "exact"}, "exact"), ({"method": "moe2"}, "moe2")],
)
def test_the_operators_choice_is_that_of_the_settings(given: dict, method: str) -> None:
    config = ServeConfig(**given, budget=0.1, confidence=0.8, quantise=Precision.INT8)
    assert config.choice == Choice(
        method=method, budget=0.1, confidence=0.8, quantise=Precision.INT8
    )
    assert ServeConfig(**given).choice == Choice(method=method)
