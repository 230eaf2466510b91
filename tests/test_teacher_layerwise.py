"""Texts scored layer by layer fare exactly as decoded step by step: token for token, slot for slot.

Models and profiles are random and seeds fixed, so that no decision lies within rounding of another:
whatever differs is a mistake.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import checkpoints
from factories import random_cluster, random_profile
from synthetic import random_plan
from trimmoe.core.events import Complete, Execute
from trimmoe.core.exit_states import ExitState
from trimmoe.core.ledger import Kind, Ledger
from trimmoe.core.loss_curves import LossCurves
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.engine.step import Engine
from trimmoe.evaluate.jobs import Forced, run_jobs
from trimmoe.evaluate.scoring import Scoring
from trimmoe.evaluate.teacher import cut_passages, score
from trimmoe.experiments.method_engines import make_engine, method_engine
from trimmoe.experiments.methods import configured, find_method
from trimmoe.models.base import MoEView
from trimmoe.models.load import open_model
from trimmoe.policy.base import Decision, Observation, Policy
from trimmoe.policy.presets import final_exits, speculative
from trimmoe.policy.readings import WeightRule
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.layerwise import Layerwise
from trimmoe.runtime.local import LocalDriver
from trimmoe.runtime.texts import Scored, Text, batches, schedule

LENGTHS = (40, 25, 33, 12, 60)
PROMPT = 6
AT_ONCE = 3
FAMILIES = ("mixtral", "qwen2_moe")
SURE = {"mixtral": 0.06, "qwen2_moe": 0.0126}
"""Which about half of its guesses reach."""


@dataclass(frozen=True, kw_only=True)
class World:
    view: MoEView
    profile: Profile
    plan: Plan

    def engine(self, policy: PolicySettings) -> Engine:
        return make_engine(self.plan, self.profile, self.view.spec, policy)

    def driven(self, engine: Engine, slots: int = 2 * AT_ONCE) -> LocalDriver:
        return LocalDriver(self.view, self.profile, engine, slots=slots, seed=7)

    def texts(self, policy: PolicySettings, seed: int = 0, lengths=LENGTHS) -> list[Text]:
        rng = np.random.default_rng(seed)
        texts = []
        for length in lengths:
            ids = rng.integers(3, self.view.spec.vocab_size, PROMPT + length + 1).tolist()
            texts.append(
                Text(
                    prompt=ids[:PROMPT],
                    tokens=ids[PROMPT:-1],
                    following=ids[PROMPT + 1 :],
                    access=int(rng.integers(self.plan.cluster.server_count)),
                    budget=policy.budget,
                    confidence=policy.confidence,
                )
            )
        return texts


def make_world(view: MoEView, seed: int = 1) -> World:
    """Skips, drops and substitutes are cheap enough to be worth it, and links are slow."""
    rng = np.random.default_rng(seed)
    profile = random_profile(rng, view.spec)
    cheaper = replace(
        profile,
        skip=scaled(profile.skip, 0.2),
        drop=scaled(profile.drop, 0.4),
        substitution_loss=profile.substitution_loss * 0.5,
        exit_error_upper=profile.exit_error_upper * 0.3,
        exit_echo=profile.exit_echo * 0.3,
    )
    plan = random_plan(rng, view.spec, random_cluster(rng, servers=4))
    return World(view=view, profile=cheaper, plan=plan)


def scaled(curves: LossCurves, by: float) -> LossCurves:
    return replace(curves, mean=curves.mean * by, upper=curves.upper * by)


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MoEView]:
    return {
        family: open_model(checkpoints.write(family, tmp_path_factory.mktemp(family)))
        for family in (*FAMILIES, "mixtral_window", "switch")
    }


@pytest.fixture(scope="module")
def worlds(views: dict[str, MoEView]) -> dict[str, World]:
    return {family: make_world(view) for family, view in views.items()}


def policy_of(*, budget: float, exits: bool, **changes) -> PolicySettings:
    policy = final_exits().but(
        budget=budget,
        confidence=0.4,
        exit_risk=None,
        audit_share=0.1,
        window_tokens=16,
    )
    levers = replace(policy.levers, exit=exits)
    return policy.but(levers=levers, **changes)


def by_steps(driver: LocalDriver, texts: list[Text]) -> list[Scored]:
    """Decoded one token after another; what ran is read from the log of the engine."""
    done: dict[int, int] = {}
    scored = []
    for step in schedule([len(text.tokens) for text in texts], AT_ONCE):
        for number in step:
            if number not in done:
                text, done[number] = texts[number], 0
                driver.open(
                    number,
                    text.prompt,
                    access=text.access,
                    budget=text.budget,
                    confidence=text.confidence,
                )
        driver.log = []
        decoded = driver.decode({number: texts[number].tokens[done[number]] for number in step})
        ran = executed(driver)
        for row, one in enumerate(decoded):
            number, at = one.sequence, done[one.sequence]
            following = texts[number].following[at]
            scored.append(
                Scored(
                    text=number,
                    prediction=int(one.logits.argmax()),
                    logprob=float(one.logits.log_softmax(-1)[following]),
                    slot_expert=np.array(ran[row]),
                    ledger=one.ledger,
                )
            )
            done[number] += 1
            if done[number] == len(texts[number].tokens):
                driver.close(number)
    return scored


def executed(driver: LocalDriver) -> dict[int, list[np.ndarray]]:
    """Experts by slot of every layer that each row of the last step passed before its answer."""
    assert driver.log is not None
    ran: dict[int, list[np.ndarray]] = {}
    answered: set[int] = set()
    for _, commands in driver.log:
        for command in commands:
            if isinstance(command, Complete):
                answered |= set(command.rows.tolist())
            elif isinstance(command, Execute):
                for row, experts in zip(command.rows.tolist(), command.slot_expert, strict=True):
                    if row not in answered:
                        ran.setdefault(row, []).append(experts)
    return ran


def by_layers(
    driver: LocalDriver, texts: list[Text], *, ahead: int = 4
) -> tuple[list[Scored], Layerwise]:
    layerwise = Layerwise(driver, texts, at_once=AT_ONCE, ahead=ahead)
    scored = list(layerwise.run())
    assert layerwise.rows_run >= len(scored) == sum(len(text.tokens) for text in texts)
    return scored, layerwise


def compared(
    world: World, engine: Engine, texts: list[Text], *, ahead: int = 4
) -> tuple[list[Scored], Layerwise]:
    """Scored by layers, and found to be the same as by steps."""
    stepping, layered = world.driven(engine), world.driven(engine)
    expected = by_steps(stepping, texts)
    scored, layerwise = by_layers(layered, texts, ahead=ahead)
    require_same(scored, expected)
    require_same_steering(layered, stepping)
    return scored, layerwise


def require_same(ours: list[Scored], theirs: list[Scored]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.text == other.text
        assert one.prediction == other.prediction
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        np.testing.assert_array_equal(one.slot_expert, other.slot_expert)
        np.testing.assert_array_equal(one.ledger.kinds, other.ledger.kinds)
        np.testing.assert_array_equal(one.ledger.messages, other.ledger.messages)
        assert one.ledger.loss == pytest.approx(other.ledger.loss, abs=1e-9)
        assert one.ledger.delay_s == pytest.approx(other.ledger.delay_s)
        assert one.ledger.audits == other.ledger.audits


def require_same_steering(ours: LocalDriver, theirs: LocalDriver) -> None:
    """omega_D, p and the audits behind it, and nothing left in flight."""
    mine, yours = ours.state.feedback, theirs.state.feedback
    assert mine.route_weights == pytest.approx(yours.route_weights)
    assert mine.exit_raise == pytest.approx(yours.exit_raise)
    assert (mine.audits, mine.false_exits) == (yours.audits, yours.false_exits)
    assert not ours.state.waves
    assert not ours.state.accounts
    assert ours.execution.cache.free_slots == ours.execution.cache.slots


def total(scored: list[Scored]) -> Ledger:
    ledger = scored[0].ledger
    for one in scored[1:]:
        ledger = ledger + one.ledger
    return ledger


@pytest.mark.parametrize("exits", [ExitState.WHOLE, ExitState.DENSE, None])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_fares_as_in_decoding_step_by_step(
    worlds: dict[str, World], family: str, exits: ExitState | None
) -> None:
    """Under budgets of which every token takes what it gets, and under ample ones."""
    world, reached = worlds[family], []
    for budget in (0.05, 0.15, 0.5):
        policy = policy_of(budget=budget, exits=exits is not None)
        policy = policy.but(exit_state=exits or policy.readings.exit_state)
        scored, layerwise = compared(world, world.engine(policy), world.texts(policy))
        assert layerwise.passes < len(schedule(LENGTHS, AT_ONCE)) / 2
        reached.append((total(scored), layerwise))
    tight, layerwise = reached[0]
    assert tight.loss > 0.7 * tight.budget
    assert layerwise.rows_run > tight.tokens, "no guess was wrong: order did not matter"
    ledger = reached[0][0] + reached[1][0] + reached[2][0]
    assert ledger.share(Kind.SKIPPED) > 0.05
    assert ledger.slots_dropped > 0
    assert ledger.share(Kind.LOCAL_SUBSTITUTE, Kind.REMOTE_SUBSTITUTE) > 0
    assert bool(ledger.share(Kind.EXITED)) == (exits is not None)


@pytest.mark.parametrize("family", FAMILIES)
def test_servers_guess_the_same_of_whole_texts_as_of_token_after_token(
    worlds: dict[str, World], family: str
) -> None:
    world, policy = worlds[family], replace(speculative(), guess_confidence=SURE[family])
    engine, texts = world.engine(policy), world.texts(policy)
    stepping, layered = world.driven(engine), world.driven(engine)
    expected, (scored, layerwise) = by_steps(stepping, texts), by_layers(layered, texts)
    require_same(scored, expected)
    assert layerwise.passes < len(schedule(LENGTHS, AT_ONCE)) / 2
    assert stepping.guesser is not None
    assert layered.guesser is not None
    found = layered.guesser.guessed, layered.guesser.right
    assert found == (stepping.guesser.guessed, stepping.guesser.right)
    assert 0 < found[1] < found[0] < len(scored)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_follows_a_guess_may_spend_the_same_as_token_after_token(
    worlds: dict[str, World], family: str
) -> None:
    """Whether a token sets out on a guess says what it may spend, and hangs on those before."""
    world = worlds[family]
    for budget in (0.05, 0.15):
        policy = replace(
            policy_of(budget=budget, exits=False), guesses=3, guess_confidence=SURE[family]
        )
        engine, texts = world.engine(policy), world.texts(policy)
        scored, layerwise = compared(world, engine, texts)
        assert layerwise.passes < len(schedule(LENGTHS, AT_ONCE)) / 2
        alone, _ = compared(world, world.engine(replace(policy, guesses=0)), texts)
        assert 0 < total(scored).loss < total(scored).budget
        assert [one.ledger.loss for one in scored] != [one.ledger.loss for one in alone]


@pytest.mark.parametrize("family", [*FAMILIES, "mixtral_window", "switch"])
def test_a_server_that_holds_every_expert_is_always_right(
    worlds: dict[str, World], family: str
) -> None:
    """With all that full depth has before it, an encoder's states among it."""
    world, policy = worlds[family], replace(speculative(), guess_confidence=0.0)
    engine = world.engine(policy)
    everything = np.ones(engine.cost.expert_s.shape, dtype=bool)
    driver = world.driven(replace(engine, hosts=everything))
    jobs = jobs_of(world.texts(policy, lengths=(12, 7, 12)))
    run_jobs(
        driver, jobs, access=np.arange(len(jobs)) % 4, budget=0.0,
        confidence=policy.confidence, at_once=AT_ONCE, label="",
    )  # fmt: skip
    assert driver.guesser is not None
    decoded = sum(len(job.answer) - 1 for job in jobs)
    assert driver.guesser.right == driver.guesser.guessed == decoded > 30


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_told_as_full_depth_has_it(worlds: dict[str, World], family: str) -> None:
    world = worlds[family]
    policy = policy_of(budget=0.0, exits=True, draft_confidence=0.3, exits_weighed=False)
    scored, _ = compared(world, world.engine(policy), world.texts(policy))
    exact = policy_of(budget=0.0, exits=False)
    plain, _ = compared(world, world.engine(exact), world.texts(exact))
    for one, same in zip(scored, plain, strict=True):
        assert one.prediction == same.prediction
        assert one.logprob == pytest.approx(same.logprob, abs=1e-4)
    told = total(scored)
    assert told.audits > 0
    assert told.kinds[:, Kind.EXITED].sum() > 0
    assert told.delay_s < total(plain).delay_s


@settings(max_examples=25, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    budget=st.floats(0.0, 0.4),
    confidence=st.floats(0.0, 1.0),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    ahead=st.integers(1, 20),
)
def test_whatever_the_profile_the_budget_and_the_texts(
    views: dict[str, MoEView],
    seed: int,
    budget: float,
    confidence: float,
    lengths: list[int],
    ahead: int,
) -> None:
    world = make_world(views["mixtral_window"], seed)
    policy = replace(policy_of(budget=budget, exits=True), confidence=confidence, horizon=1)
    compared(world, world.engine(policy), world.texts(policy, seed, lengths), ahead=ahead)


def test_audits_and_what_they_steer_are_the_same(worlds: dict[str, World]) -> None:
    """A profile that swears exits are harmless, a random model, and every second exit audited."""
    world = worlds["qwen2_moe"]
    harmless = np.zeros_like(world.profile.exit_error_upper)
    sworn = replace(world.profile, exit_error_upper=harmless, exit_echo=np.zeros(2))
    policy = policy_of(budget=0.3, exits=True).but(
        confidence=0.0, exit_risk=0.0, exits_charged=False, exits_weighed=False, audit_share=0.5,
    )  # fmt: skip
    world = replace(world, profile=sworn)
    scored, layerwise = compared(world, world.engine(policy), world.texts(policy))
    assert total(scored).audits > 10
    feedback = layerwise.driver.state.feedback
    assert feedback.false_exits > 0
    assert feedback.exit_raise > 0
    assert feedback.route_weights != layerwise.driver.engine.route_weights


def test_an_audit_that_was_not_foreseen_needs_the_token_again(worlds: dict[str, World]) -> None:
    """Every token runs exactly; whether an exit would be due, and is audited, only the growing
    balance says. What it would have predicted there is not known of a token that was not asked."""
    world, policy = worlds["mixtral"], policy_of(budget=0.01, exits=True)
    exact_but_exits = replace(policy.levers, substitute=False, drop_slots=False, skip=False)
    policy = policy.but(
        levers=exact_but_exits, confidence=0.5, exits_weighed=False, audit_share=1.0,
        exit_state=ExitState.DENSE,
    )  # fmt: skip
    scored, layerwise = compared(world, world.engine(policy), world.texts(policy))
    ledger = total(scored)
    assert ledger.loss == 0
    assert 0 < ledger.audits < ledger.tokens
    assert 0 < layerwise.driver.state.feedback.false_exits < ledger.audits
    assert layerwise.rows_run > ledger.tokens


@pytest.mark.parametrize("name", ["exact", "paper", "mixture-of-depths", "local-prior", "moe2"])
def test_other_policies_are_scored_alike(worlds: dict[str, World], name: str) -> None:
    """Those that know no budget, that want the whole router output, that let tokens migrate."""
    world, method = worlds["qwen2_moe"], find_method(name)
    policy = configured(method, budget=0.2, confidence=0.5)
    engine = method_engine(method, world.plan, world.profile, world.view.spec, policy)
    texts = world.texts(policy, lengths=(14, 9, 11, 5))
    _, layerwise = compared(world, engine, texts)
    if policy.levers.lossless:
        assert layerwise.rows_run == 14 + 9 + 11 + 5


@dataclass(frozen=True)
class Fickle(Policy):
    """Skips by how many thousandths may still be spent, and charges some."""

    def decide(self, observation: Observation) -> Decision:
        count, slots = observation.experts.shape
        thousandths = np.rint(observation.allowance * 1e3).astype(int)
        charge = 0.001 * (1 + observation.experts[:, 0] % 3)
        skip = (7 * thousandths + 3 * observation.layer) % 5 < 2
        skip &= charge <= observation.allowance
        return Decision(
            slot_expert=np.where(skip[:, None], -1, observation.experts),
            slot_server=np.repeat(observation.server[:, None], slots, 1),
            destination=observation.server,
            delay_s=np.zeros(count),
            loss=np.where(skip, charge, 0.0),
            ahead=np.full(count, np.inf),
        )


def test_guesses_that_are_often_wrong_cost_passes_and_nothing_else(
    worlds: dict[str, World],
) -> None:
    world, policy = worlds["mixtral"], policy_of(budget=0.05, exits=False)
    engine = replace(world.engine(policy), policy=Fickle())
    texts = world.texts(policy)
    scored, layerwise = compared(world, engine, texts)
    assert total(scored).share(Kind.SKIPPED) > 0.2
    steps = len(schedule(LENGTHS, AT_ONCE))
    assert steps / 5 < layerwise.passes <= steps
    assert 1.5 < layerwise.rows_run / len(scored) < 2 * 4


def test_no_token_runs_twice_where_the_budget_does_not_bind(worlds: dict[str, World]) -> None:
    """Balances are guessed wrongly all the time; it does not matter, and is found out unrun."""
    world = worlds["qwen2_moe"]
    policy = policy_of(budget=5.0, exits=True).but(weight_rule=WeightRule.FIXED)
    scored, layerwise = compared(world, world.engine(policy), world.texts(policy))
    assert total(scored).loss > 0
    assert layerwise.rows_run == len(scored)


def test_without_spare_slots_texts_wait_for_others_to_end(worlds: dict[str, World]) -> None:
    world, policy = worlds["mixtral"], policy_of(budget=0.15, exits=True)
    engine, texts = world.engine(policy), world.texts(policy)
    spare, early = by_layers(world.driven(engine), texts)
    scored, late = by_layers(world.driven(engine, slots=AT_ONCE), texts)
    require_same(scored, spare)
    assert early.passes < late.passes


def jobs_of(texts: list[Text]) -> list[Forced]:
    """With two answers of a single token, which the prompt predicts."""
    answers = [[*text.tokens, text.following[-1]] for text in texts]
    answers[1:1], texts = [[5]], [texts[0], *texts]
    answers.append([6])
    prompts = [*(text.prompt for text in texts), [7, 8, 9]]
    return [
        Forced(prompt=prompt, answer=answer)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


@pytest.mark.parametrize("family", [*FAMILIES, "switch"])
def test_jobs_come_to_the_same_either_way(worlds: dict[str, World], family: str) -> None:
    """Models with an encoder, which are not for layers, bit for bit: they are run in steps."""
    world, policy = worlds[family], policy_of(budget=0.1, exits=True)
    engine = world.engine(policy)
    done: dict[Scoring, list[Forced]] = {}
    for scoring in Scoring:
        jobs = done[scoring] = jobs_of(world.texts(policy, lengths=(12, 7, 12, 3, 9)))
        run_jobs(
            world.driven(engine), jobs, access=np.arange(len(jobs)) % 4, budget=policy.budget,
            confidence=policy.confidence, at_once=AT_ONCE, label="", scoring=scoring,
        )  # fmt: skip
    for ours, theirs in zip(done[Scoring.LAYERS], done[Scoring.STEPS], strict=True):
        assert len(ours.predictions) == len(ours.answer)
        assert ours.predictions == theirs.predictions
        tolerance = 0.0 if family == "switch" else 1e-4
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=tolerance, rel=0.0)
        assert ours.worst_prefix == pytest.approx(theirs.worst_prefix)
        assert (ours.ledger is None) == (len(ours.answer) == 1)
        if ours.ledger is not None and theirs.ledger is not None:
            np.testing.assert_array_equal(ours.ledger.kinds, theirs.ledger.kinds)


def test_passages_score_the_same_either_way(worlds: dict[str, World]) -> None:
    world, policy = worlds["mixtral"], policy_of(budget=0.1, exits=True)
    ids = np.random.default_rng(3).integers(3, 96, 400).tolist()
    passages = cut_passages(world.view, ids, count=4, context=8, steps=20)
    engine = world.engine(policy)
    layers, steps = (
        score(
            world.driven(engine),
            passages,
            access=[0, 1, 2, 3],
            budget=policy.budget,
            confidence=policy.confidence,
            label="",
            scoring=scoring,
        )
        for scoring in Scoring
    )
    assert (layers.tokens, layers.flips) == (steps.tokens, steps.flips) == (80, layers.flips)
    assert layers.flips > 0
    assert layers.nll == pytest.approx(steps.nll, abs=1e-5)
    assert layers.ledger.loss == pytest.approx(steps.ledger.loss)
    assert 0 < layers.worst_prefix <= 1 + 1e-9
    assert layers.worst_prefix == pytest.approx(steps.worst_prefix)


def test_batches_are_in_order_and_only_one_sequence_may_exceed_them() -> None:
    assert batches([3, 3, 4, 2, 9, 1, 1], most_rows=8) == [[0, 1], [2, 3], [4], [5, 6]]
    assert batches([], most_rows=8) == []


def test_the_schedule_admits_in_order_as_others_end() -> None:
    assert schedule([3, 1, 2, 1], at_once=2) == [(0, 1), (0, 2), (0, 2), (3,)]
    assert schedule([2, 2], at_once=5) == [(0, 1), (0, 1)]
    assert schedule([], at_once=3) == []
