"""A draft head: it says what its weights say, however it was fed, and a file that does not fit is
refused. What it says never changes an answer."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from draft_heads import PlainHead, random_head
from nodes import (
    answers,
    constant_routes,
    guessing,
    hybrid_routes,
    running,
    staircase_routes,
    tokens_of,
    world,
)
from questions import Questions
from serving import Tiny
from trimmoe.core.errors import UserError
from trimmoe.core.machines import Work
from trimmoe.models import draft_chains, draft_head_file
from trimmoe.models.compiled.view import CompiledView
from trimmoe.models.draft_chains import Chain, Piece, expected_tokens
from trimmoe.models.draft_head import FILE, DraftHead, HeadMemory, HeadWeights
from trimmoe.models.draft_head_file import load_draft_head, open_draft_head, save_draft_head
from trimmoe.runtime.node.compute import guesses as guesses_module
from trimmoe.runtime.node.compute.draft_runner import DraftRunner
from trimmoe.runtime.node.node import Node
from trimmoe.runtime.node.records.readings import Foreseen, Reading
from trimmoe.runtime.node.records.sequences import Seat, Written
from trimmoe.runtime.node.schedule.intake import Intake
from trimmoe.runtime.probe import time_naming, time_work
from trimmoe.runtime.sampling import Sampling

HIDDEN, VOCABULARY = 64, 96
_DRAWS = torch.Generator().manual_seed(5)
HEAD = torch.randn(VOCABULARY, HIDDEN, generator=_DRAWS)
EMBEDDING = torch.randn(VOCABULARY, HIDDEN, generator=_DRAWS)
STATES = torch.randn(40, HIDDEN, generator=_DRAWS)
TOKENS = torch.randint(VOCABULARY, (41,), generator=_DRAWS).tolist()


def compiled(weights: HeadWeights) -> DraftHead:
    return DraftHead(
        weights,
        lambda tokens: HEAD.numpy()[tokens],
        lambda tokens: EMBEDDING.numpy()[list(tokens)],
    )


@pytest.fixture
def weights() -> HeadWeights:
    return random_head(HIDDEN, VOCABULARY)


@pytest.mark.parametrize(("length", "inner"), [(2, 64), (7, 64), (40, 64), (9, 40)])
def test_a_head_says_what_its_weights_say(
    length: int, inner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for rounding to few bits: what it names is among what they take for most probable."""
    weights = random_head(HIDDEN, VOCABULARY, inner=inner)
    monkeypatch.setattr(draft_chains, "FREQUENT_BITS", 8)
    head, states = compiled(weights), STATES[:length]
    memory = head.begin()
    head.read(memory, 0, states.numpy(), TOKENS[:length])
    drafted = head.draft(memory, length, TOKENS[length], 3, likely=0.0)
    said = PlainHead(weights, HEAD, EMBEDDING).scores(states, TOKENS[: length + 1], drafted[:-1])
    for token, scores in zip(drafted, said, strict=True):
        assert scores[token] >= scores.max() - 0.05 * scores.std()


@given(pieces=st.lists(st.integers(1, 9), min_size=1, max_size=5), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=25)
def test_it_says_the_same_however_it_was_fed(pieces: Sequence[int], seed: int) -> None:
    """At once, in pieces, or with other tokens read first that were withdrawn."""
    head, length = compiled(random_head(HIDDEN, VOCABULARY, seed=seed % 3)), sum(pieces)
    length = min(length, len(STATES))
    at_once, in_pieces = head.begin(), head.begin()
    head.read(at_once, 0, STATES.numpy()[:length], TOKENS[:length])
    start = 0
    for size in pieces:
        stop = min(start + size, length)
        if start < stop:
            wrong = [(token + 1) % VOCABULARY for token in TOKENS[start:stop]]
            head.read(in_pieces, start, -STATES.numpy()[start:stop], wrong)
            head.draft(in_pieces, stop, wrong[0], 2)
            head.read(in_pieces, start, STATES.numpy()[start:stop], TOKENS[start:stop])
        start = stop
    drafted = [
        head.draft(memory, length, TOKENS[length], 4, likely=0.0)
        for memory in (at_once, in_pieces.copy())
    ]
    assert drafted[0] == drafted[1]
    assert len(drafted[0]) == 4


def test_what_several_sequences_share_changes_nothing(weights: HeadWeights) -> None:
    """Read and drafted side by side, with texts of different lengths, or each by itself."""
    head, lengths = compiled(weights), (3, 17, 40, 9)

    def chain(length: int) -> Chain[HeadMemory]:
        return Chain(memory=head.begin(), position=length, token=TOKENS[length], most=4, likely=0.0)

    alone, together = [chain(length) for length in lengths], [chain(length) for length in lengths]
    for one, length in zip(alone, lengths, strict=True):
        head.read(one.memory, 0, STATES.numpy()[:length], TOKENS[:length])
        head.draft_all([one])
    head.read_all(
        [
            (Piece(memory=one.memory, first=0, states=STATES.numpy()[:length]), TOKENS[:length])
            for one, length in zip(together, lengths, strict=True)
        ]
    )
    head.draft_all(together)
    assert [one.drafted for one in together] == [one.drafted for one in alone]
    assert [one.chances for one in together] == [one.chances for one in alone]


def test_it_names_frequent_tokens_only_and_stops_where_it_is_not_sure(
    weights: HeadWeights,
) -> None:
    frequent = [3, 17, 40]
    head = compiled(replace(weights, frequent=np.array(frequent)))
    memory = head.begin()
    head.read(memory, 0, STATES.numpy()[:9], TOKENS[:9])
    assert set(head.draft(memory, 9, 1, 4, likely=0.0)) <= set(frequent)
    assert head.draft(memory, 9, 1, 4, likely=1.1) == ()
    assert head.draft(memory, 9, 1, 0) == ()
    assert head.draft(head.begin(), 9, 1, 4) == (), "nothing was read before"


def test_tokens_of_a_pass_are_those_up_to_the_first_wrong_draft() -> None:
    assert expected_tokens([0.5, 0.5], 0) == 1.0
    assert expected_tokens([0.5, 0.5], 2) == 1.75
    assert expected_tokens([1.0] * 4, 4) == 5.0


def test_a_file_gives_back_what_was_saved(weights: HeadWeights, tmp_path: Path) -> None:
    save_draft_head(weights, tmp_path / "head.safetensors")
    found = load_draft_head(tmp_path / "head.safetensors", hidden=HIDDEN, vocabulary=VOCABULARY)
    assert (found.sizes, found.right) == (weights.sizes, weights.right)
    assert found.frequent.tolist() == weights.frequent.tolist()
    for name, matrix in weights.matrices.items():
        assert np.abs(found.matrices[name] - matrix).max() <= np.abs(matrix).max() / 127
    for name, norm in weights.norms.items():
        assert (found.norms[name] == norm).all()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b"nothing of the kind"),
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
    ],
    ids=["nonsense", "missing", "cut short"],
)
def test_a_file_that_is_no_head_is_refused(
    weights: HeadWeights, tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    save_draft_head(weights, path := tmp_path / "head.safetensors")
    spoil(path)
    with pytest.raises(UserError, match="draft head"):
        load_draft_head(path, hidden=HIDDEN, vocabulary=VOCABULARY)


@pytest.mark.parametrize(("hidden", "vocabulary"), [(HIDDEN + 32, VOCABULARY), (HIDDEN, 50)])
def test_a_head_for_another_model_is_refused(
    weights: HeadWeights, tmp_path: Path, hidden: int, vocabulary: int
) -> None:
    save_draft_head(weights, path := tmp_path / "head.safetensors")
    with pytest.raises(UserError, match="not one for this model"):
        load_draft_head(path, hidden=hidden, vocabulary=vocabulary)


def test_a_head_of_a_later_format_is_refused(
    weights: HeadWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_head_file, "FORMAT", 2)
    save_draft_head(weights, path := tmp_path / "head.safetensors")
    monkeypatch.undo()
    with pytest.raises(UserError, match="its format is 2, not 1"):
        load_draft_head(path, hidden=HIDDEN, vocabulary=VOCABULARY)


def test_a_model_takes_the_head_in_its_folder_unless_told_otherwise(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = tiny.view
    monkeypatch.setattr(view, "draft_head", None)
    open_draft_head(view, tmp_path)
    assert view.draft_head is None, "there is none"
    (tmp_path / FILE).parent.mkdir()
    made = random_head(view.spec.hidden_size, view.spec.vocab_size)
    save_draft_head(made, tmp_path / FILE)
    open_draft_head(view, tmp_path, "none")
    assert view.draft_head is None
    open_draft_head(view, tmp_path)
    assert view.draft_head is not None


def test_a_probe_counts_the_tokens_that_a_pass_brings(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = tiny.view
    assert isinstance(view, CompiledView)
    weights = random_head(view.spec.hidden_size, view.spec.vocab_size)
    taken_s = []
    for right in ((0.0, 0.0), (1.0, 1.0)):
        made = DraftHead(replace(weights, right=right), view.head_rows, view.token_rows)
        monkeypatch.setattr(view, "draft_head", made)
        taken_s.append(time_work(view)[0, Work.DRAFT, 0])
    assert 0 < 1.5 * taken_s[1] < taken_s[0], "three tokens at once, or one"


def test_a_probe_times_what_a_head_takes_to_name_a_token(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = tiny.view
    assert isinstance(view, CompiledView)
    assert time_naming(view) == 0.0
    weights = random_head(view.spec.hidden_size, view.spec.vocab_size)
    monkeypatch.setattr(view, "draft_head", DraftHead(weights, view.head_rows, view.token_rows))
    assert 0.0 < time_naming(view) < 1.0


class Oracle:
    """Offers what followed a token at its position in the right texts, now and then something
    else."""

    def __init__(self, texts: Sequence[Sequence[int]], *, wrong_every: int) -> None:
        self._following: dict[tuple[int, int], list[int]] = defaultdict(list)
        for text in texts:
            for at, token in enumerate(text):
                self._following[at, token] = list(text[at + 1 : at + 5])
        self._wrong_every, self.offered = wrong_every, 0

    def offer(
        self, runner: DraftRunner, sequence: int, position: int, token: int, most: int
    ) -> tuple[int, ...]:
        found = self._following[position, token][:most]
        self.offered += 1
        if found and self.offered % self._wrong_every == 0:
            # What follows it would be right.
            at = self.offered % len(found)
            found[at] = (found[at] + 1) % 256
        return tuple(found)


ROUTES = [constant_routes, staircase_routes, hybrid_routes, lambda _: [[0, 0, 1, 2]] * 3]


async def offered_to(
    tiny: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    routes: list[list[int]],
    temperature: float,
    nodes: list[Node] | None = None,
) -> list[int]:
    """Answers are the same whatever a head offers; how much was right of each that was offered.
    `nodes` are told which answer."""
    monkeypatch.setattr(guesses_module, "AHEAD_S", 60.0)
    profile, plan = world(tiny, servers=3, routes=routes)
    hosts = plan.hosts.copy()
    hosts[0, 0] = True
    plan = replace(plan, hosts=hosts)
    sampling = Sampling(temperature=temperature, seed=3, stream=0)
    asked = Questions(tiny=tiny, count=6).among(3, new=24, sampling=sampling)
    async with running(tiny, profile=profile, plan=plan) as cluster:
        made = [tokens_of(events) for events in await answers(cluster, asked)]
    texts = [[*one.prompt_ids, *text] for (_, one), text in zip(asked, made, strict=True)]
    oracle = Oracle(texts, wrong_every=3)
    accepted: list[int] = []
    verify = guesses_module._verify

    def counted(worker, one, states, logits) -> None:
        offered, before = len(one.offered), len(one.made)
        verify(worker, one, states, logits)
        accepted.extend([len(one.made) - before - 1] if offered else [])

    monkeypatch.setattr(DraftRunner, "offer", lambda runner, *asked: oracle.offer(runner, *asked))
    monkeypatch.setattr(guesses_module, "_verify", counted)
    async with running(tiny, profile=profile, plan=plan, policy=guessing(8)) as cluster:
        if nodes is not None:
            nodes += cluster.nodes.values()
        # One at a time at each server, as several that are guessed together are offered nothing.
        told = [*await answers(cluster, asked[:3]), *await answers(cluster, asked[3:])]
        again = [tokens_of(events) for events in told]
        await cluster.all_free()
    assert again == made
    return accepted


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
@pytest.mark.parametrize("routes", ROUTES)
async def test_answers_are_the_same_whatever_a_head_offers(
    tiny: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    routes: Callable[[int], list[list[int]]],
    temperature: float,
) -> None:
    """What is offered passes the layers with what it follows, and counts as far as it is right."""
    accepted = await offered_to(tiny, monkeypatch, routes(3), temperature)
    assert min(accepted) == 0
    # What a server draws by itself is what was offered only now and then.
    assert temperature or max(accepted) > 1


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("routes", ROUTES)
async def test_readings_that_begin_anew_with_other_offers_change_no_answer(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, routes: Callable[[int], list[list[int]]], seed: int
) -> None:
    """As they do when the load changes: what passed the first layers in the place of others is all
    that is there of it."""
    monkeypatch.setattr(guesses_module, "SLICE_S", 0.0)
    monkeypatch.setattr(guesses_module, "LAYERS_AT_ONCE", 1)
    rng, read_on = np.random.default_rng(seed), Intake.read_on
    nodes: list[Node] = []

    def begin_anew(one: Reading) -> None:
        for front in (node.front_end for node in nodes):
            for job in front._jobs:
                if job.attempt is not None and job.attempt.reading is one:
                    job.attempt.stop_reading()
                    front.speculation.guess(job, job.attempt)

    def read_on_or_not(intake: Intake, readings: Iterable[Reading]) -> None:
        read_on(intake, those := list(readings))
        for one in those:
            if one.made and rng.random() < 0.3:
                asyncio.get_running_loop().call_soon(begin_anew, one)

    monkeypatch.setattr(Intake, "read_on", read_on_or_not)
    await offered_to(tiny, monkeypatch, routes(3), 0.0, nodes)


def reading(offered: Sequence[int]) -> Reading:
    """Of token 7 at position 5, with what is offered behind it and has passed the first layers."""
    route = (0, 1)
    seat = Seat(
        sequence=1,
        slot=0,
        route=route,
        sampling=Sampling(),
        budget=0.0,
        written={0: Written(length=6)},
    )
    early = (
        Foreseen(token=token, hidden=torch.zeros(1, 4), experts=np.zeros((1, 1, 2), dtype=int))
        for token in offered
    )
    return Reading(
        sequence=1,
        start=5,
        tokens=(7,),
        route=route,
        sampling=Sampling(),
        seat=seat,
        offered=tuple(offered),
        offers=tuple(early),
    )


def test_what_is_offered_is_read_up_to_the_first_wrong_token() -> None:
    read: list[tuple[int, int, Sequence[int]]] = []
    runner = SimpleNamespace(
        has_read=lambda sequence, start, states, tokens: read.append((len(states), start, tokens)),
    )
    one = reading([1, 2, 3])
    says = torch.eye(10)[[1, 2, 9, 4]] * 9.0
    worker: Any = SimpleNamespace(draft_runner=runner)
    guesses_module._verify(worker, one, torch.zeros(4, 8), says)
    assert one.made == (1, 2, 9)
    assert read == [(3, 5, (7, 1, 2))]
    assert (one.offered, one.offers) == ((), ())


def test_readings_that_go_on_enter_the_layers_that_they_have_left() -> None:
    """So that those with the same layers left, and whatever begins there, pass as one batch; what
    was withdrawn meanwhile is nobody's."""
    worker: Any = SimpleNamespace(reads_from=lambda route: route[0])
    made = [replace(reading([]), route=(first, 0), made=(1,)) for first in (2, 5, 2, 2)]
    made[3].void = True
    came = guesses_module._outcome(worker, made[:2], made, ())
    assert [(one, one.layer) for one in came.reading] == [(made[0], 2), (made[1], 5)]
    assert came.guessed == [made[2]]


async def test_a_head_of_a_view_is_fed_with_what_the_own_pass_reads(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And forgets a sequence when that is over. It is asked where one sequence is read by itself,
    so one question follows the other."""
    questions = Questions(tiny=tiny, count=6)
    profile, plan = world(tiny, servers=3, routes=hybrid_routes(3))
    runners: list[DraftRunner] = []
    offered = []
    offer = DraftRunner.offer

    def seen(runner: DraftRunner, *asked: int) -> tuple[int, ...]:
        offered.append(found := offer(runner, *asked))
        return found

    def with_head(runner: DraftRunner) -> None:
        view = runner.view
        assert isinstance(view, CompiledView)
        weights = random_head(view.spec.hidden_size, view.spec.vocab_size)
        head = DraftHead(weights, view.head_rows, view.token_rows)
        monkeypatch.setattr(view, "draft_head", head)
        runners.append(runner)

    monkeypatch.setattr(DraftRunner, "offer", seen)
    monkeypatch.setattr(DraftHead.draft, "__defaults__", (0.0,))
    async with running(tiny, profile=profile, plan=plan, policy=guessing(5)) as cluster:
        for node in cluster.nodes.values():
            with_head(node.worker.draft_runner)
        made = [await answers(cluster, [asked]) for asked in questions.among(3)]
        await cluster.all_free()
    assert [tokens_of(events) for (events,) in made] == questions.answers
    assert max(map(len, offered), default=0) > 1
    kept = {sequence for runner in runners for sequence in runner.memories}
    assert kept <= {sequence for runner in runners for sequence in runner._retained}
