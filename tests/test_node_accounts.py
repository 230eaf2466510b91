"""What an answer is opened with where it starts over after a server was lost, and what it leaves
behind where it is put off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trimmoe.policy.presets import PRESETS
from trimmoe.policy.readings import BudgetRule
from trimmoe.runtime.node.front.answers import Answers
from trimmoe.runtime.node.front.jobs import Attempt, Begun, Job
from trimmoe.runtime.node.front.memory import Memory
from trimmoe.runtime.node.front.speculation import Speculation
from trimmoe.runtime.node.records.messages import Prefix
from trimmoe.runtime.service import GenerationRequest


@pytest.mark.parametrize(
    ("rule", "credit", "balance"),
    [
        (BudgetRule.BUCKET, 0.25, 0.25),
        (BudgetRule.BUCKET, -1e-17, 0.0),
        (BudgetRule.EVEN, 0.25, 0.0),
    ],
)
def test_it_brings_along_what_its_tokens_left_unless_budgets_are_even(
    rule: BudgetRule, credit: float, balance: float
) -> None:
    """(33): of an even budget nothing is left; a bucket has no less than nothing in it."""
    settings = PRESETS["final-exits"]().but(budget=0.5, confidence=0.75, budget_rule=rule)
    engine = SimpleNamespace(copied_bits=None)
    planner = SimpleNamespace(
        settings=settings, profile=None, in_force=SimpleNamespace(engine=engine)
    )
    room: Any = SimpleNamespace(server=1, planner=planner)
    attempt: Any = SimpleNamespace(sequence=7)
    request = GenerationRequest(request_id="a", prompt_ids=(1,), max_new_tokens=2)
    answers = Answers(
        room, Memory(room), Speculation(room, lambda _: None), lambda _: None, lambda _: None
    )
    opened = answers.opened(Job(request=request, credit=credit), attempt)
    assert (opened.sequence, opened.access, opened.balance) == (7, 1, balance)
    assert (opened.budget, opened.confidence) == (0.5, 0.75)


@pytest.mark.parametrize("moves", [True, False])
def test_who_is_put_off_leaves_nothing_of_what_it_was_to_take_over(moves: bool) -> None:
    """Its own server may lack that, and say so before the prompt has set out."""
    closed: list[int] = []
    retired: list[int] = []
    context: Any = SimpleNamespace(
        control=lambda work: work(),
        close_account=closed.append,
        retire=lambda sequence, *_: retired.append(sequence),
        post=lambda _: None,
    )
    begun = Begun(prefix=Prefix(sequence=3, length=20, moves=moves), read=0)
    trouble: Any = None
    attempt = Attempt(sequence=7, route=(0, 1), trouble=trouble, begun=begun)
    assert Memory(context).put_off(attempt).prefix == Prefix(sequence=7, length=20, moves=True)
    assert retired == [7]
    assert closed == ([3] if moves else [])
