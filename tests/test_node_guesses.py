"""Guesses on nodes: a user's server guesses what its answer goes on with, several tokens ahead, and
nobody is shown what full depth does not confirm."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from draft_heads import Oracle
from nodes import (
    UnevenNetwork,
    answers,
    constant_routes,
    guessing,
    hybrid_routes,
    ledgers_of,
    read,
    request,
    running,
    spent_within,
    staircase_routes,
    tokens_of,
    vectors_sent,
    world,
)
from questions import Questions
from serving import Tiny
from trimmoe.core.events import SegmentRan, TokensImported
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.engine.lead import HEAD, OWN, Lead
from trimmoe.experiments.method_engines import make_engine
from trimmoe.models.compiled.view import CompiledView
from trimmoe.policy.presets import PRESETS, ring
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.node.compute import guesses as guesses_module
from trimmoe.runtime.node.compute.draft_runner import DraftRunner, Prepared
from trimmoe.runtime.node.compute.worker import Worker
from trimmoe.runtime.node.front.drafts import Pending
from trimmoe.runtime.node.front.guess_prices import GuessPrices
from trimmoe.runtime.node.front.jobs import Attempt
from trimmoe.runtime.node.front.speculation import Speculation, _until
from trimmoe.runtime.node.records.output import Arrival, BatchOutput
from trimmoe.runtime.node.records.readings import Foreseen, Reading
from trimmoe.runtime.node.records.sequences import Seat
from trimmoe.runtime.node.records.tokens import Token
from trimmoe.runtime.node.records.units import Unit
from trimmoe.runtime.node.records.work import Step
from trimmoe.runtime.node.schedule.scheduler import Scheduler
from trimmoe.runtime.sampling import Sampling
from trimmoe.runtime.service import Unavailable
from trimmoe.runtime.wire.memory import MemoryNetwork
from wires import soon, until

SEAT: dict[str, Any] = {
    "slot": 0, "route": (0, 1), "sampling": Sampling(), "budget": 0.0, "written": {},
}  # fmt: skip


def words(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 200, count).tolist()


@pytest.fixture(scope="module")
def questions(tiny: Tiny) -> Questions:
    return Questions(tiny=tiny, count=12)


@pytest.mark.parametrize("guesses", [1, 2, 5])
@pytest.mark.parametrize("routes", [constant_routes, staircase_routes, hybrid_routes])
async def test_answers_are_those_of_transformers_however_many_are_guessed(
    tiny: Tiny,
    questions: Questions,
    routes: Callable[[int], list[list[int]]],
    guesses: int,
) -> None:
    profile, plan = world(tiny, servers=3, routes=routes(3))
    async with running(
        tiny, profile=profile, plan=plan, policy=guessing(guesses), prefill_chunk=8
    ) as cluster:
        made = await answers(cluster, questions.among(3))
        await cluster.all_free()
        front_ends = [node.front_end for node in cluster.nodes.values()]
        said = [front_end.speculation.guessing for front_end in front_ends]
    assert [tokens_of(events) for events in made] == questions.answers
    assert 0 < sum(each.right for each in said) < sum(each.made for each in said)
    assert sum(front_end.restarts for front_end in front_ends) == 0


async def test_guesses_set_out_together_where_nothing_that_is_read_waits_for_them(
    tiny: Tiny, questions: Questions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies from what came before are left out, since they come all at once."""
    profile, plan = world(tiny, servers=3, routes=hybrid_routes(3))
    monkeypatch.setattr(Lead, "together", 3)
    monkeypatch.setattr(Lead, "pays", lambda *_: False)
    sent: list[int] = []
    arrive = Worker.arrive

    def arrived(worker: Worker, arrivals: Sequence[Arrival]) -> BatchOutput:
        guessed = [one.sequence for one in arrivals if one.guessed]
        sent.extend(guessed.count(sequence) for sequence in set(guessed))
        return arrive(worker, arrivals)

    monkeypatch.setattr(Worker, "arrive", arrived)
    policy = replace(guessing(8), guess_confidence=0.0, guess_chance=0.0)
    async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
        made = await answers(cluster, questions.among(3))
        await cluster.all_free()
    assert [tokens_of(events) for events in made] == questions.answers
    assert max(sent) >= 3


@pytest.mark.parametrize("drafted", [1, 4])
@pytest.mark.parametrize("routes", [constant_routes, staircase_routes, hybrid_routes])
async def test_a_ring_drafts_the_next_tokens_when_there_is_word_of_all_before_them(
    tiny: Tiny,
    questions: Questions,
    monkeypatch: pytest.MonkeyPatch,
    routes: Callable[[int], list[list[int]]],
    drafted: int,
) -> None:
    """Answers are transformers'. Nobody has more than one chunk under way, whose end stays where it
    is until nothing is unconfirmed."""
    asked: list[tuple[int, bool]] = []
    may_guess = Attempt.may_guess

    def watched(attempt: Attempt, position: int) -> bool:
        before, drafts = attempt.chunk_end, attempt.pending.drafts
        may = may_guess(attempt, position)
        assert attempt.chunk_end == (before if drafts else position + drafted)
        assert may == (position < attempt.chunk_end)
        asked.append((drafts, may))
        return may

    monkeypatch.setattr(Attempt, "may_guess", watched)
    profile, plan = world(tiny, servers=3, routes=routes(3))
    policy = ring(drafted)
    async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
        made = await answers(cluster, questions.among(3))
        await cluster.all_free()
        said = [node.front_end.speculation.guessing for node in cluster.nodes.values()]
    assert [tokens_of(events) for events in made] == questions.answers
    assert sum(each.copied for each in said) == 0
    assert 0 < sum(each.right for each in said) < sum(each.made for each in said)
    assert max(drafts for drafts, _ in asked) == drafted - 1, "a full chunk is not asked about"
    assert not all(may for _, may in asked) or drafted == 1, "some would be of the next one"
    told = [ledger for events in made for ledger in ledgers_of(events)]
    if drafted > 1:
        assert any(each.delay_s == 0.0 for each in told), "of a chunk's first token only"


async def test_budgets_hold_at_every_prefix_of_answers_that_are_guessed_ahead(
    tiny: Tiny, questions: Questions
) -> None:
    """With tokens under way that may each spend something, of which some are withdrawn."""
    budget = 0.2
    profile, plan = world(tiny, servers=3, routes=hybrid_routes(3))
    policy = replace(PRESETS["guessing"](), guess_confidence=0.0, budget=budget)
    async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
        made = await answers(cluster, questions.among(3, new=16))
        said = [node.front_end.speculation.guessing for node in cluster.nodes.values()]
    assert spent_within(budget, made) > 0
    told = [ledger for events in made for ledger in ledgers_of(events)]
    assert all(ledger.budget == pytest.approx(budget * ledger.tokens) for ledger in told)
    assert 0 < sum(each.right for each in said) < sum(each.made for each in said)


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
async def test_what_an_answer_copies_is_guessed_from_what_came_before(
    tiny: Tiny, temperature: float
) -> None:
    """Right or wrong, as long as it may be, the answers are the same."""
    profile, plan = world(tiny, servers=3, routes=hybrid_routes(3))
    sampling = Sampling(temperature=temperature, seed=5, stream=0)
    asked = [
        (access, request(prompt * 6, 60, sampling=sampling))
        for access, prompt in enumerate(([7, 8, 9, 10, 11], [3, 1, 4, 1, 5, 9], [2] * 4))
    ]
    made, copied, kinds = [], [], []
    for policy in (PRESETS["exact"](), guessing(2)):
        async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
            told = await answers(cluster, asked)
            made.append([tokens_of(events) for events in told])
            kinds.append({one.ahead.kind for events in told for one in events if one.ahead})
            await cluster.all_free()
            copied.append(
                [node.front_end.speculation.guessing.copied for node in cluster.nodes.values()]
            )
    assert made[0] == made[1]
    # What is drawn at random may part with what came before at once, before word of a copy comes.
    assert ({"guess"} if temperature else {"copy", "guess"}) <= kinds[1]
    assert not kinds[0]
    assert sum(copied[0]) == 0
    assert temperature or sum(copied[1]) > 0


@pytest.mark.parametrize("chains", [True, False])
async def test_tokens_of_an_answer_pass_layers_together_where_a_view_says_that_they_may(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, chains: bool
) -> None:
    """On routes that end with experts elsewhere, and on routes that do not."""
    monkeypatch.setattr(CompiledView, "chains", chains)
    policies = {"exact": PRESETS["exact"]()} | {
        policy: replace(
            PRESETS[policy](), budget=0.0, guesses=8, guess_confidence=0.0, guess_chance=0.0
        )
        for policy in ("speculative", "guessing")
    }
    together = dict.fromkeys(policies, 0)
    for routes in (hybrid_routes(3), staircase_routes(3), constant_routes(3)):
        profile, plan = world(tiny, servers=3, routes=routes)
        asked = [(access, request([7, 8, 9, 10, 11] * 3, 16)) for access in range(3)]
        made = {}
        for name, policy in policies.items():
            async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
                made[name] = [tokens_of(events) for events in await answers(cluster, asked)]
                logs = [node.worker.log or [] for node in cluster.nodes.values()]
            waves = [
                each.event.tokens.sequences
                for log in logs
                for each in log
                if isinstance(each.event, (SegmentRan, TokensImported))
            ]
            together[name] += sum(len(set(sequences)) < len(sequences) for sequences in waves)
        assert made["speculative"] == made["guessing"] == made["exact"]
    assert (together["speculative"] > 0) == (together["guessing"] > 0) == chains


async def test_tokens_of_an_answer_pass_a_last_layer_together_that_is_all_that_a_server_has(
    tiny: Tiny,
) -> None:
    """All of it is there: an answer's tokens come to it in one message, and end together."""
    profile, plan = world(tiny, servers=3, routes=[[1, 1, 2, 0]] * 3)
    hosts = plan.hosts.copy()
    hosts[0, 3] = True
    plan = replace(plan, hosts=hosts)
    asked = [(0, request([7, 8, 9, 10, 11] * 3, 24))]
    made: dict[str, list[list[int]]] = {}
    batches: list[tuple[str, int, int]] = []
    for name, policy in {"exact": PRESETS["exact"](), "speculative": guessing(8)}.items():
        async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
            made[name] = [tokens_of(events) for events in await answers(cluster, asked)]
            batches = cluster.nodes[0].batch_loop.batches
    assert made["speculative"] == made["exact"]
    assert max(size for step, layer, size in batches if (step, layer) == ("ATTEND", 3)) > 1


def begins_whole(tiny: Tiny) -> tuple[Profile, Plan]:
    """Everybody's tokens begin on the first server, which has all of the first layer."""
    profile, plan = world(tiny, servers=3, routes=[[0, 0, 1, 2]] * 3)
    hosts = plan.hosts.copy()
    hosts[0, 0] = True
    return profile, replace(plan, hosts=hosts)


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
async def test_what_is_guessed_is_read_at_once_and_sets_out_with_what_is_guessed_upon_it(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """Where users' servers have the first layer whole: it is not passed a second time."""
    monkeypatch.setattr(guesses_module, "AHEAD_S", 60.0)
    profile, plan = begins_whole(tiny)
    sampling = Sampling(temperature=temperature, seed=3, stream=0)
    asked = [(0, request(words(9, seed=seed), 40, sampling=sampling)) for seed in range(3)]
    known, found = DraftRunner.known, []

    def counted(runner: DraftRunner, units: Sequence[Unit]) -> Foreseen | None:
        found.append((len(units), seen := known(runner, units)))
        return seen

    monkeypatch.setattr(DraftRunner, "known", counted)
    foreseen, streams = guesses_module.foreseen, []

    def watched(worker: Worker, seats: Sequence[Seat], *rows: Any) -> Any:
        streams.append(len({seat.sequence for seat in seats}))
        return foreseen(worker, seats, *rows)

    monkeypatch.setattr(guesses_module, "foreseen", watched)
    slots_of, passed = DraftRunner.slots_of, []

    def seen_passing(runner: DraftRunner, readings: Sequence[Reading]) -> tuple[int, ...]:
        passed.append({bool(one.made) for one in readings})
        return slots_of(runner, readings)

    monkeypatch.setattr(DraftRunner, "slots_of", seen_passing)
    made = []
    for policy in (PRESETS["exact"](), guessing(6)):
        found.clear()
        # Or full depth may always be there before guesses that wait for one another.
        network = UnevenNetwork(5) if made else MemoryNetwork()
        async with running(
            tiny, profile=profile, plan=plan, policy=policy, network=network
        ) as cluster:
            made.append([tokens_of(events) for events in await answers(cluster, asked)])
            await cluster.all_free()
            guessing_said = cluster.nodes[0].front_end.speculation.guessing
    assert made[0] == made[1]
    assert 0 < guessing_said.right < guessing_said.made
    used = [(count, seen) for count, seen in found if seen is not None]
    assert used
    assert max(count for count, _ in used) > 1, "several set out together"
    assert max(streams) > 1, "and of several streams they pass that layer as one batch"
    assert {True, False} in passed, "the others too, with what is read for a first guess"
    assert all(seen.hidden.shape[0] == count for count, seen in used)


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
@pytest.mark.parametrize("ahead_s", [0.0, 60.0], ids=["short readings", "long readings"])
async def test_what_a_head_names_is_made_ready_for_the_next_reading_where_full_depth_is_far(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, temperature: float, ahead_s: float
) -> None:
    """It passes the first layers with the last guess, and not once more. The head is wrong now and
    then, so that some of it is withdrawn; answers are those of exact execution."""
    monkeypatch.setattr(guesses_module, "AHEAD_S", ahead_s)
    monkeypatch.setattr(Lead, "is_far", True)
    monkeypatch.setattr(GuessPrices, "drafts_along", False)
    profile, plan = begins_whole(tiny)
    sampling = Sampling(temperature=temperature, seed=3, stream=0)
    asked = [(0, request(words(9, seed=seed), 30, sampling=sampling)) for seed in range(4)]
    take, taken = DraftRunner.take_prepared, []

    def counted(runner: DraftRunner, *which: int) -> Prepared | None:
        taken.append(found := take(runner, *which))
        return found

    monkeypatch.setattr(DraftRunner, "take_prepared", counted)
    made: list[list[list[int]]] = []
    for policy in (PRESETS["exact"](), guessing(6)):
        network = UnevenNetwork(5) if made else MemoryNetwork()
        async with running(
            tiny, profile=profile, plan=plan, policy=policy, network=network
        ) as cluster:
            view = cluster.nodes[0].worker.draft_runner.view
            assert isinstance(view, CompiledView)
            oracle = Oracle(view, wrong_every=4)
            if made:
                texts = zip(asked, made[0], strict=True)
                oracle.texts = [[*one.prompt_ids, *answer] for (_, one), answer in texts]
            monkeypatch.setattr(view, "draft_head", oracle)
            # One stream after another, as several are not offered anything.
            each = [await answers(cluster, [one]) for one in asked]
            made.append([tokens_of(events) for (events,) in each])
            await cluster.all_free()
            said = cluster.nodes[0].front_end.speculation.guessing
            assert not cluster.nodes[0].worker.draft_runner.prepared
        monkeypatch.setattr(view, "draft_head", None)
    assert made[0] == made[1]
    assert 0 < said.right < said.made
    used = sum(len(one.offered) for one in taken if one is not None)
    assert ahead_s or used > 10, "long ones are through with all that there is room for"


@pytest.mark.parametrize(("start", "goes_on"), [(9, True), (8, False)])
def test_a_prompt_is_read_on_where_only_what_comes_behind_it_is_withdrawn(
    tiny: Tiny, start: int, goes_on: bool
) -> None:
    """Its states are as they were, on the front end's side and on the worker's."""
    prompt = Reading(sequence=7, start=0, tokens=tuple(range(9)), route=(0, 1), sampling=Sampling())
    attempt = Attempt(sequence=7, route=(0, 1), trouble=None)  # type: ignore[arg-type]
    attempt.reading, attempt.read = prompt, 9
    attempt.withdraw(start)
    assert (attempt.reading is prompt) == (not prompt.void) == goes_on
    assert attempt.read == (9 if goes_on else 0), "what is not read is read another time"
    runner = DraftRunner.of(tiny.view, 2, None)
    runner.waiting[7] = prompt
    runner.forget(7, start)
    assert (7 in runner.waiting) == goes_on


def test_of_a_prompt_and_drafts_behind_it_the_prompt_is_read_first() -> None:
    """They may be withdrawn, and with them all that is read with them; few are read at once."""
    job: Any = SimpleNamespace(request=request(words(9, 1), 8), tokens=[3, 4])
    ids = [*job.request.prompt_ids, *job.tokens, 5, 6]
    assert _until(job, ids, 0) == 9 + 2
    assert _until(job, ids, 9) == len(ids)


@pytest.mark.parametrize(("made", "turn"), [(0, OWN), (3, HEAD)])
def test_until_an_answer_has_begun_whose_turn_it_is_may_change_for_nothing(
    made: int, turn: int
) -> None:
    """Then what its server has not read is told, and how much is left that would gain by that."""
    told: list[tuple[int, list[int], int]] = []

    def tell(lead: Lead, route: tuple[int, ...]) -> int:
        told.append((lead.turn, list(lead.unread), lead.left))
        return lead.turn

    context: Any = SimpleNamespace(prices=SimpleNamespace(tell=tell))
    job: Any = SimpleNamespace(request=request(words(9, 1), 8), tokens=[5] * made)
    attempt = Attempt(sequence=7, route=(0, 1), trouble=None, prompt=9, read=4)  # type: ignore[arg-type]
    lead = Lead(guesses=4, guess_s=1.0, turn=HEAD)
    Speculation(context, lambda _: job)._tell(job, attempt, lead)
    assert told == [(turn, [5 + made, 9 + made], 8 - made)]


def test_nothing_is_known_behind_another_token_than_was_foreseen(tiny: Tiny) -> None:
    runner = DraftRunner.of(tiny.view, 2, None)
    state = torch.zeros(1, tiny.view.spec.hidden_size)
    experts = np.zeros((1, 1, tiny.view.spec.top_k), dtype=np.int64)

    def foreseen(*tokens: int) -> dict[int, Foreseen]:
        each = (Foreseen(token=token, hidden=state, experts=experts) for token in tokens)
        return dict(enumerate(each, 4))

    def unit(start: int, token: int) -> Unit:
        return Unit(seat=Seat(sequence=7, **SEAT), layer=0, start=start, tokens=(token,))

    runner.foreseen[7] = foreseen(10, 11, 12)
    both = runner.known([unit(4, 10), unit(5, 11)])
    assert both is not None
    assert both.hidden.shape[0] == both.experts.shape[0] == 2
    assert runner.known([unit(6, 99)]) is None
    runner.foreseen[7] = foreseen(10, 11, 12)
    assert runner.known([unit(4, 99)]) is None
    assert runner.known([unit(5, 11)]) is None, "it was foreseen behind 10"
    runner.foreseen[7] = foreseen(10, 11, 12)
    runner.forget(7, 5)
    assert runner.known([unit(4, 10)]) is not None
    assert runner.known([unit(5, 11)]) is None, "it was withdrawn"
    runner.foreseen[7] = foreseen(10, 11, 12)
    runner.foresees(7, 5, [foreseen(98)[4]])
    assert runner.known([unit(4, 10)]) is not None
    assert runner.known([unit(5, 11)]) is None, "the cache has another one's keys there"
    runner.foreseen[7] = foreseen(10, 11, 12)
    runner.forget_foreseen()
    assert runner.known([unit(4, 10)]) is None


def test_nothing_is_ready_behind_another_token_than_it_was_made_ready_for(tiny: Tiny) -> None:
    """As that token's keys and values are those that it attends to, nor behind another one before
    it, nor after anything was withdrawn; and it is taken once."""
    runner = DraftRunner.of(tiny.view, 2, None)
    state = torch.zeros(1, tiny.view.spec.hidden_size)
    experts = np.zeros((1, 1, tiny.view.spec.top_k), dtype=np.int64)
    ready = Prepared(
        position=6,
        token=12,
        offered=(13,),
        offers=(Foreseen(token=13, hidden=state, experts=experts),),
    )

    def foresees() -> None:
        runner.prepared[7] = ready
        each = (Foreseen(token=token, hidden=state, experts=experts) for token in (10, 11, 12))
        runner.foreseen[7] = dict(enumerate(each, 4))

    def passes(start: int, token: int) -> None:
        runner.known([Unit(seat=Seat(sequence=7, **SEAT), layer=0, start=start, tokens=(token,))])

    foresees()
    for start, token in enumerate((10, 11, 12), 4):
        passes(start, token)
    assert runner.take_prepared(7, 6, 12) is ready
    assert runner.take_prepared(7, 6, 12) is None
    foresees()
    assert runner.take_prepared(7, 6, 99) is None
    foresees()
    assert runner.take_prepared(7, 5, 12) is None
    foresees()
    passes(4, 10)
    passes(5, 99)
    passes(6, 12)
    assert runner.take_prepared(7, 6, 12) is None
    foresees()
    runner.forget(7, 7)
    assert runner.take_prepared(7, 6, 12) is None


class SlowNetwork(UnevenNetwork):
    """Every message takes a fifth of a second."""

    def __init__(self) -> None:
        super().__init__(0)
        self._rng: Any = SimpleNamespace(choice=lambda _: 0.2)


async def test_the_first_token_is_guessed_while_the_prompt_is_on_its_way(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the second one does not wait for it: all come with the prompt's, once each."""
    monkeypatch.setattr(Lead, "pays", lambda *_: False)
    profile, plan = world(tiny, servers=2, routes=staircase_routes(2))
    plan = replace(plan, hosts=np.ones_like(plan.hosts))
    asked = request(words(12, seed=4), 6)
    async with running(
        tiny, profile=profile, plan=plan, policy=guessing(8), network=SlowNetwork()
    ) as cluster:
        (made,) = await answers(cluster, [(0, asked)])
        await cluster.all_free()
        said = cluster.nodes[0].front_end.speculation.guessing
    assert tokens_of(made) == tiny.greedy(list(asked.prompt_ids), 6)
    assert said.made == said.right == 5, "of all tokens but the last, which nothing follows"


async def test_a_server_with_all_experts_is_always_right(tiny: Tiny, questions: Questions) -> None:
    """Then nothing is withdrawn, and what is sent is what is sent without guesses."""
    profile, plan = world(tiny, servers=2, routes=staircase_routes(2))
    plan = replace(plan, hosts=np.ones_like(plan.hosts))
    asked = questions.among(2, stop_ids=frozenset())
    sent = []
    for policy in (PRESETS["exact"](), guessing(4)):
        async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
            made = await answers(cluster, asked)
            await cluster.all_free()
            nodes = list(cluster.nodes.values())
            sent.append([dict(node.outbox.vectors_sent) for node in nodes])
    said = [node.front_end.speculation.guessing for node in nodes]
    assert sum(each.made for each in said) > 0
    assert all(each.made == each.right for each in said)
    ahead = [event.ahead for events in made for event in events if event.ahead is not None]
    assert len(ahead) == sum(each.made for each in said)
    assert all(each.right and not each.withdrawn and each.kind != "draft" for each in ahead)
    assert sent[0] == sent[1]
    full = questions.answers
    answered = [tokens_of(events)[: len(one)] for events, one in zip(made, full, strict=True)]
    assert answered == full


async def test_what_was_sent_in_vain_is_in_the_ledgers_too(
    tiny: Tiny, questions: Questions
) -> None:
    """But for what is still on its way when a request ends."""
    guesses = 3
    profile, plan = world(tiny, servers=4, routes=hybrid_routes(4))
    asked = questions.among(4, new=16)
    async with running(tiny, profile=profile, plan=plan, policy=guessing(guesses)) as cluster:
        made = await answers(cluster, asked)
        await cluster.all_free()
        sent = vectors_sent(cluster)
    told = [ledger for events in made for ledger in ledgers_of(events)]
    charged = sum((ledger.messages for ledger in told), np.zeros_like(sent))
    spec = tiny.view.spec
    assert (charged <= sent).all()
    left = guesses * len(asked) * spec.layer_count * (2 * spec.top_k + 1)
    assert (sent - charged).sum() <= left
    assert charged.sum() > 0.8 * sent.sum()
    assert all(ledger.tokens == 1 for ledger in told)
    assert all((ledger.kinds.sum(1) == 1).all() for ledger in told)


async def test_a_user_that_leaves_frees_everything(tiny: Tiny) -> None:
    """Also what the server has read by itself; places are there for the next."""
    profile, plan = world(tiny, servers=2, routes=staircase_routes(2))
    async with running(tiny, profile=profile, plan=plan, policy=guessing(3), kv_slots=2) as cluster:
        for _ in range(3):
            streams = [cluster.nodes[0].service.submit(request([1, 2, 3], 60)) for _ in range(2)]
            for stream in streams:
                await anext(stream)
                await stream.aclose()
        await cluster.all_free()
        runner = cluster.nodes[0].worker.draft_runner
        for _ in range(100):
            if runner.free == 2:
                break
            await asyncio.sleep(0.01)
        assert runner.free == 2


def guess(position: int, which: int) -> Token:
    return Token(1, position, which, 0.0, [], None, None, None, draft=True)


def test_a_wrong_guess_takes_those_behind_it_along() -> None:
    pending = Pending()
    for position in (5, 6, 7):
        pending.add(guess(position, 10 * position), None)
    assert pending.drafts == 3
    right = Token(1, 5, 50, 0.0, [], None, None, None)
    assert pending.check(right, None) is None
    withdrawn = pending.check(replace_token(right, 6, 61), None)
    assert withdrawn is not None
    assert [entry.token.token for entry in withdrawn] == [70]
    assert [entry.token.token for entry in pending.shown()] == [50, 61]


def replace_token(token: Token, position: int, which: int) -> Token:
    import msgspec

    return msgspec.structs.replace(token, position=position, token=which)


async def test_guesses_pass_a_layer_at_a_time_where_layers_take_long(
    tiny: Tiny,
    questions: Questions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that others are not held up for longer; what was read of withdrawn tokens is forgotten."""
    monkeypatch.setattr(guesses_module, "SLICE_S", 0.0)
    profile, plan = world(tiny, servers=3, routes=hybrid_routes(3))
    async with running(tiny, profile=profile, plan=plan, policy=guessing(3)) as cluster:
        made = await answers(cluster, questions.among(3))
        await cluster.all_free()
        counts = [node.batch_loop.batch_counts["GUESS"] for node in cluster.nodes.values()]
        rows = sum(node.batch_loop.item_counts["GUESS"] for node in cluster.nodes.values())
    assert [tokens_of(events) for events in made] == questions.answers
    assert all(counts)
    layers = tiny.view.spec.layer_count
    # Every prompt is read in all layers at least.
    assert rows >= layers * questions.count


def test_of_guesses_what_has_come_furthest_comes_first() -> None:
    """A prompt that is read for its first guess is not kept waiting by those that begin anew."""
    ready = Scheduler(max_rows=8, now=lambda: 0.0, waited=lambda _: None)
    ready.put(Step.GUESS, 1, "prompt", rows=6)
    ready.put(Step.GUESS, 0, "token")
    ready.put(Step.GUESS, 0, "another")
    items = [work.items for _ in range(2) if (work := ready.next()) is not None]
    assert items == [["prompt"], ["token", "another"]]


def test_guesses_come_after_prompts_too() -> None:
    ready = Scheduler(max_rows=8, now=lambda: 0.0, waited=lambda _: None)
    for item in range(3):
        ready.put(Step.CHUNK, 0, item)
    for layer in range(3):
        ready.put(Step.GUESS, layer, "guess")
    steps = [work.step for _ in range(6) if (work := ready.next()) is not None]
    assert steps == [Step.CHUNK] * 3 + [Step.GUESS] * 3


async def test_a_wrong_guess_that_needs_a_lost_expert_ends_no_answer(tiny: Tiny) -> None:
    """What exact execution answers while a server is lost is answered with guesses, too."""
    profile, plan = world(tiny, servers=3, routes=[[0] * 4, [1] * 4, [0] * 4])
    hosts = np.zeros_like(plan.hosts)
    hosts[2] = True
    hosts[0, :, 0] = True
    hosts[:, 1, 2] = [False, True, False]
    plan = replace(plan, hosts=hosts)
    asked = [request([7 * i % 251], 5) for i in range(60)]

    async def ended(policy: PolicySettings) -> list[list[int] | None]:
        async with running(
            tiny,
            profile=profile,
            plan=plan,
            policy=policy,
            patience_s=0.0,
            network=UnevenNetwork(0),
        ) as cluster:
            await cluster.kill(1)
            await until(lambda: all(1 in node.planner.lost for node in cluster.nodes.values()))
            streams = [cluster.nodes[0].service.submit(one) for one in asked]
            made = await soon(
                asyncio.gather(*(read(one) for one in streams), return_exceptions=True)
            )
        assert all(isinstance(one, (list, Unavailable)) for one in made)
        return [tokens_of(one) if isinstance(one, list) else None for one in made]

    guessing = replace(PRESETS["speculative"](), guess_confidence=0.0)
    exact = await ended(PRESETS["exact"]())
    assert any(one is not None for one in exact)
    got = await ended(guessing)
    assert got == exact


@pytest.mark.parametrize(("streams", "guessed"), [(2.5, True), (0.5, False)])
async def test_auto_guesses_while_few_streams_are_under_way(
    tiny: Tiny, questions: Questions, streams: float, guessed: bool
) -> None:
    """One after another, each is the only stream; the answers are the model's either way."""
    profile, plan = world(tiny, servers=3, routes=staircase_routes(3))
    policy = replace(guessing(3), guess_below=0.75)
    async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
        for node in cluster.nodes.values():
            engine = node.worker.engine
            engine.guess_rules.__dict__["streams"] = np.full(engine.routes.shape[0], streams)
        asked = questions.among(3)[:4]
        made = [(await answers(cluster, [one]))[0] for one in asked]
        said = [node.front_end.speculation.guessing.made for node in cluster.nodes.values()]
    assert [tokens_of(events) for events in made] == questions.answers[:4]
    assert (sum(said) > 0) == guessed


def test_auto_guesses_nothing_where_that_is_late_or_in_others_way(tiny: Tiny) -> None:
    """By the cost model: a guess that takes as long as the way through the servers, and machines
    that are at work for others, eight of nine streams, for three quarters of what they can do."""
    profile, plan = world(tiny, servers=3, routes=staircase_routes(3))
    auto = PRESETS["auto"]()
    engine = make_engine(plan, profile, tiny.view.spec, auto)
    idle = replace(engine.cost, guess_s=np.full(3, 1e-9))
    late = replace(engine.cost, guess_s=np.array([1e-9, 1e9, 1e-9]))
    crowded = replace(idle, busy=np.array([0.1, 0.86, 0.1]))
    never = {
        name: np.isinf(replace(engine, cost=cost).guess_rules.least_among(9)).tolist()
        for name, cost in (("idle", idle), ("late", late), ("crowded", crowded))
    }
    assert never["idle"] == [False] * 3
    assert never["late"] == [False, True, False]
    assert never["crowded"] == [True] * 3, "all cross server 1"
    always = replace(engine, cost=crowded, settings=PRESETS["speculative"]())
    assert np.isfinite(always.guess_rules.least_among(9)).all()
    assert np.isinf(always.guess_rules.streams).all()


async def test_servers_tell_each_other_at_once_how_many_answers_are_under_way(tiny: Tiny) -> None:
    """Long before the next report is due."""
    profile, plan = world(tiny, servers=3, routes=hybrid_routes(3))
    async with running(
        tiny, profile=profile, plan=plan, policy=guessing(2), report_every_s=600.0
    ) as cluster:
        others = [cluster.nodes[at].reporter for at in (1, 2)]
        stream = cluster.nodes[0].service.submit(request(words(9, 1), 40))
        await soon(anext(stream))
        await until(lambda: all(each.running.get(0) == 1 for each in others))
        await soon(read(stream))
        await until(lambda: all(each.running.get(0) == 0 for each in others))


async def test_what_is_read_for_guesses_is_let_be_where_too_many_answers_are_under_way(
    tiny: Tiny, questions: Questions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt is being read when word of the others comes; the answer is the same."""
    profile, plan = world(tiny, servers=3, routes=hybrid_routes(3))
    policy = replace(guessing(2), guess_below=1.0)
    (access, asked), *_ = questions.among(3)
    async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
        node = cluster.nodes[access]
        monkeypatch.setattr(node.worker, "least_chance", lambda *_: 0.0)
        guessed = node.front_end.speculation.guessing
        # What is to be read waits for ever.
        monkeypatch.setattr(node.intake, "read_on", lambda *_: None)
        stream = node.service.submit(asked)
        await until(lambda: any(job.attempt for job in node.front_end._jobs))
        (job,) = node.front_end._jobs
        assert job.attempt is not None
        attempt = job.attempt
        await until(lambda: attempt.reading is not None)
        reading = attempt.reading
        assert reading is not None
        monkeypatch.setattr(node.worker, "least_chance", lambda *_: np.inf)
        node.front_end.load_changed()
        assert (reading.void, attempt.reading, attempt.read) == (True, None, 0)
        events = await soon(read(stream))
    assert tokens_of(events) == questions.answers[0]
    assert not guessed.made
