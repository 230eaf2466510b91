"""Prompts that are trimmed too: the same budget for each of their tokens, in every driver."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

import byhand
from nodes import answers, hybrid_routes, ledgers_of, request, running, tokens_of, world
from serving import Tiny
from simulated import world as simulated_world
from trimmoe.core.events import Routed, SequenceOpened
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.cost.actions import Levers
from trimmoe.cost.model import Accounting
from trimmoe.engine.prompts import decided, entered
from trimmoe.experiments.method_engines import make_engine
from trimmoe.models.base import MoEView
from trimmoe.models.exact import exact_logits
from trimmoe.policy.presets import paper
from trimmoe.policy.readings import BudgetRule, WeightRule
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.local import LocalDriver
from trimmoe.simulator.settings import Load

BUDGET = 0.5
PROMPTS = [list(range(3, 40)), [5, 9, 77, 31, 200], [7] * 19]
ACCOUNTINGS = (Accounting.PINNED, Accounting.MIGRATE)


def letter(accounting: Accounting = Accounting.PINNED, **changes: object) -> PolicySettings:
    """The paper's, with prompts; nothing is worth more than a millisecond, and nobody learns."""
    chosen = {
        "prompts_trimmed": True,
        "budget": BUDGET,
        "loss_weight": 0.05,
        "weight_rule": WeightRule.FIXED,
        "importance_gate": False,
        "levers": Levers(drop_slots=False, exit=False),
    }
    return paper().under(accounting).but(**(chosen | changes))


def driver(view: MoEView, profile: Profile, plan: Plan, settings: PolicySettings) -> LocalDriver:
    engine = make_engine(plan, profile, view.spec, settings)
    return LocalDriver(view, profile, engine, slots=len(PROMPTS), prefix_cache=True)


def opened(
    one: LocalDriver, *, budget: float = BUDGET, answered: Sequence[int] = ()
) -> list[Tensor]:
    """Logits [V] after each of the prompts, with what is `answered` behind it."""
    return [
        one.open(
            sequence, prompt, access=sequence, budget=budget, confidence=0.9, answered=answered
        )
        for sequence, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("accounting", ACCOUNTINGS)
def test_prompts_spend_their_budget_and_no_more(tiny: Tiny, accounting: Accounting) -> None:
    profile, plan = world(tiny, servers=3)
    one = driver(tiny.view, profile, plan, letter(accounting))
    logits, exact = opened(one), exact_logits(tiny.view, PROMPTS)
    spent = [one.spent(sequence) for sequence in range(len(PROMPTS))]
    assert sum(each.loss for each in spent if each is not None) > 0
    for each, prompt in zip(spent, PROMPTS, strict=True):
        assert each is not None
        assert each.tokens == 0
        assert 0 <= each.loss <= each.budget + 1e-9
        assert each.budget <= BUDGET * len(prompt) + 1e-9
    assert any(
        not torch.allclose(ours, theirs[-1], atol=1e-3)
        for ours, theirs in zip(logits, exact, strict=True)
    )


@pytest.mark.parametrize(("trimmed", "budget"), [(False, BUDGET), (True, 0.0)], ids=["off", "none"])
def test_prompts_are_exact_unless_asked_or_without_a_budget(
    tiny: Tiny, trimmed: bool, budget: float
) -> None:
    profile, plan = world(tiny, servers=3)
    one = driver(tiny.view, profile, plan, letter(prompts_trimmed=trimmed))
    logits = opened(one, budget=budget)
    for ours, theirs in zip(logits, exact_logits(tiny.view, PROMPTS), strict=True):
        torch.testing.assert_close(ours, theirs[-1], atol=1e-5, rtol=1e-4)
    assert [one.spent(sequence) for sequence in range(len(PROMPTS))] == [None] * len(PROMPTS)


def test_what_there_is_of_an_answer_spends_nothing_again(tiny: Tiny) -> None:
    profile, plan = world(tiny, servers=3)
    first, again = (driver(tiny.view, profile, plan, letter()) for _ in range(2))
    opened(first)
    opened(again, answered=[8, 9, 10, 11] * 3)
    for sequence in range(len(PROMPTS)):
        before, after = first.spent(sequence), again.spent(sequence)
        assert before is not None
        assert after is not None
        assert after.loss == pytest.approx(before.loss)


@pytest.mark.parametrize("rule", list(BudgetRule))
def test_what_an_answers_tokens_have_left_is_not_the_prompts_to_spend(rule: BudgetRule) -> None:
    """(33): each token of a prompt may spend 8 units, whatever the balance of its sequence, read
    again after a failure; and those that are not trimmed nothing."""
    made = byhand.world(byhand.hosting([[0, 1]]), [[0]])
    engine = made.engine(byhand.PLAIN.but(budget_rule=rule, prompts_trimmed=True))
    again = SequenceOpened(
        sequence=7, access=0, budget=8 * byhand.UNIT, confidence=0.9, balance=5 * byhand.UNIT
    )
    state, _ = entered(
        engine,
        engine.start().feedback,
        [again],
        np.array([0, 0, 0]),
        np.array([True, False, True]),
        wave=3,
    )
    assert (state.waves[3].allowance / byhand.UNIT).tolist() == [8.0, 0.0, 8.0]


def test_no_token_of_a_prompt_is_predicted_to_exit() -> None:
    """As with the first layer of other tokens: both layers are 10 ms away, and the first may be
    skipped for 4 units. Who was thought to be done after it would run it."""
    made = byhand.world(
        byhand.hosting([[], []], [[0, 1], [0, 1]]),
        [[0, 10], [10, 0]],
        skip=byhand.one_bin([4, 128]),
    )
    engine = made.engine(byhand.PLAIN.but(horizon=None, prompts_trimmed=True))
    decision = decided(
        engine,
        engine.start(),
        layer=0,
        route=0,
        access=0,
        server=0,
        routed=Routed(
            wave=1,
            experts=np.array([[0]]),
            masses=np.array([[0.5]]),
            importance=np.array([0.5]),
            steadiness=np.array([0]),
        ),
        allowance=np.array([8 * byhand.UNIT]),
    )
    assert byhand.skips(decision)


def test_what_was_trimmed_begins_no_other_sequence(tiny: Tiny) -> None:
    profile, plan = world(tiny, servers=3)
    one = driver(tiny.view, profile, plan, letter())
    opened(one)
    one.close(0)
    one.open(7, PROMPTS[0], access=0, budget=BUDGET, confidence=0.9)
    assert one.kept(7) == 0


async def test_servers_trim_prompts_as_one_process_does(tiny: Tiny) -> None:
    """In chunks, on routes that leave and return; twice, so that nothing is kept of it."""
    profile, plan = world(tiny, servers=3, routes=hybrid_routes(3))
    settings = letter()
    alone = driver(tiny.view, profile, plan, settings)
    expected = [int(logits.argmax()) for logits in opened(alone)]
    asked = [(access, request(prompt, 1)) for access, prompt in enumerate(PROMPTS)]
    exact = [(access, request(prompt, 1, exact=True)) for access, prompt in enumerate(PROMPTS)]
    async with running(
        tiny, profile=profile, plan=plan, policy=settings, kv_slots=8, prefill_chunk=8
    ) as servers:
        for _ in range(2):
            made = await answers(servers, asked)
            assert [tokens_of(events)[0] for events in made] == expected
            for sequence, events in enumerate(made):
                spent = alone.spent(sequence)
                assert spent is not None
                (ledger,) = ledgers_of(events)
                assert ledger.loss == pytest.approx(spent.loss)
                assert ledger.budget == pytest.approx(spent.budget)
                assert events[0].cached_tokens == 0
        whole = await answers(servers, exact)
        assert all(not ledgers_of(events) for events in whole)
        await servers.all_free()


@pytest.mark.parametrize("trims", [False, True])
def test_simulated_prompts_spend_what_each_token_is_credited(trims: bool) -> None:
    one = simulated_world(
        "final-exits", budget=0.1, loss_weight=0.05, prompts_trimmed=trims, price_start=False
    )
    load = Load(rate_per_s=5.0, requests=30, output_tokens=3, prompt_tokens=9, prefill_chunk=4)
    sample = one.run(load, duration_s=60.0)
    log = sample.all_units
    spent = log.loss[~log.decoded]
    assert spent.any() == trims
    assert (spent <= 4 * 0.1 + 1e-9).all()
    np.testing.assert_array_equal(sample.after.sent[0], sample.all_ledger.messages)
    assert sample.after.in_flight == 0
