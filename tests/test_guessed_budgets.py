"""Tokens of one answer that are under way at once share its budget without spending any twice."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from factories import clusters, models_with_profiles
from synthetic import random_plan
from trimmoe.core.events import (
    Attend,
    Complete,
    Depart,
    Event,
    Execute,
    Executed,
    Receipt,
    Routed,
    SequenceOpened,
    Settled,
    TokensArrived,
    TokensExported,
    TokensImported,
)
from trimmoe.core.wave import Wave
from trimmoe.engine.state import EngineState
from trimmoe.engine.step import Engine
from trimmoe.experiments.method_engines import make_engine
from trimmoe.policy.presets import guessing

SEQUENCE = 0


class Answer:
    """One answer, whose tokens set out when they are told to and pass the layers elsewhere."""

    def __init__(self, engine: Engine, rng: np.random.Generator, budget: float) -> None:
        self.engine, self.rng, self.budget = engine, rng, budget
        opened = SequenceOpened(sequence=SEQUENCE, access=0, budget=budget, confidence=0.9)
        self.state, _ = engine.step(engine.start(), opened)
        self.under_way: list[Wave] = []
        self.losses: list[float] = []

    @property
    def balance(self) -> float:
        return self.state.accounts[SEQUENCE].balance

    def set_out(self, *, guessed: bool) -> None:
        arrived = TokensArrived(
            wave=1, sequences=(SEQUENCE,), draws=np.ones(1), guessed=np.array([guessed])
        )
        state, _ = self.engine.step(self.state, arrived)
        left = TokensExported(wave=1, rows=np.arange(1))
        self.state, (depart,) = self.engine.step(state, left)
        assert isinstance(depart, Depart)
        self.under_way.append(depart.tokens)

    def all_come_back(self, order: list[int]) -> None:
        """What is under way passes its layers; word of it comes in this order."""
        receipts = [self._through(tokens) for tokens in self.under_way]
        self.losses += [receipt.loss for receipt in receipts]
        for at in order:
            settled = Settled(receipts=(receipts[at],))
            self.state, _ = self.engine.step(self.state, settled)
        self.under_way = []

    def _through(self, tokens: Wave) -> Receipt:
        """The receipt of one token, from an engine that knows no account."""
        state = EngineState(feedback=self.state.feedback)
        event: Event = TokensImported(wave=1, tokens=tokens, executing=False)
        while True:
            state, (command,) = self.engine.step(state, event)
            match command:
                case Attend():
                    event = self._routed()
                case Execute():
                    event = Executed(
                        wave=1,
                        confidence=np.zeros(1),
                        exit_at=np.array([self.engine.cost.layer_count]),
                    )
                case Complete(receipts=(receipt,)):
                    return receipt
                case _:
                    raise AssertionError(command)

    def _routed(self) -> Routed:
        profile = self.engine.profile
        probabilities = self.rng.dirichlet(np.full(profile.expert_count, 0.5))
        chosen = np.argsort(-probabilities)[None, : profile.top_k]
        masses = probabilities[chosen]
        return Routed(
            wave=1,
            experts=chosen,
            masses=masses,
            importance=np.minimum(masses.sum(1), 1.0),
            steadiness=self.rng.integers(profile.class_count, size=1),
        )


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    model, profile = draw(models_with_profiles(max_layers=4, max_experts=8, min_experts=1))
    cluster = draw(clusters(max_servers=4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    budget = draw(st.sampled_from([0.0, 0.02, 0.1, 1.0]))
    # Whatever is saved is worth any quality, so that all there is gets spent.
    policy = guessing().but(budget=budget, loss_weight=0.05, price_start=False)
    plan = random_plan(rng, model, cluster)
    return Answer(make_engine(plan, profile, model, policy), rng, budget)


@settings(deadline=None, max_examples=80)
@given(answers(), st.lists(st.integers(0, 4), min_size=1, max_size=6), st.randoms())
def test_no_prefix_spends_more_than_it_was_credited(answer: Answer, ahead, random) -> None:
    """A token that nothing is ahead of, so many guessed behind it; then word of all of them, in any
    order; and so on."""
    for guesses in ahead:
        answer.set_out(guessed=False)
        for _ in range(guesses):
            answer.set_out(guessed=True)
        order = list(range(guesses + 1))
        random.shuffle(order)
        answer.all_come_back(order)
        credited = answer.budget * len(answer.losses)
        assert abs(answer.balance - (credited - sum(answer.losses))) < 1e-9
    spent = np.cumsum(answer.losses)
    assert (spent <= answer.budget * np.arange(1, spent.size + 1) + 1e-9).all()


@settings(deadline=None, max_examples=40)
@given(answers())
def test_a_guessed_token_may_spend_what_it_is_credited_itself(answer: Answer) -> None:
    """And the one after it, of which all are confirmed, whatever the others have left."""
    answer.set_out(guessed=False)
    answer.set_out(guessed=True)
    first, second = answer.under_way
    assert first.allowance.tolist() == second.allowance.tolist() == [answer.budget]
    answer.all_come_back([1, 0])
    left = answer.balance
    answer.set_out(guessed=True)
    answer.set_out(guessed=False)
    guessed, other = answer.under_way
    assert guessed.allowance.tolist() == [answer.budget]
    assert other.allowance.tolist() == [left + answer.budget]
