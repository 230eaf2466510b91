"""What a draft head takes to follow in one process: it is read along, and never changes an answer,
whatever it is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from draft_heads import Oracle
from questions import Questions
from serving import Tiny
from test_api_service import read, running
from trimmoe.models.compiled.view import CompiledView
from trimmoe.models.draft_chains import Piece
from trimmoe.models.draft_head import DraftHead, HeadMemory
from trimmoe.runtime import head_drafts
from trimmoe.runtime.exact_decoder import ExactDecoder
from trimmoe.runtime.head_drafts import HeadDrafts, Wish
from trimmoe.runtime.sampling import Sampling
from trimmoe.runtime.service import GenerationRequest, TokenEvent


@pytest.fixture
def oracle(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> Oracle:
    assert isinstance(tiny.view, CompiledView)
    oracle = Oracle(tiny.view, wrong_every=3)
    monkeypatch.setattr(tiny.view, "draft_head", oracle)
    return oracle


@pytest.fixture
def confirmed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many drafts of each pass were right."""
    counts: list[int] = []
    confirm = ExactDecoder.confirm

    def counted(decoder: ExactDecoder, sequence: int, right: int) -> None:
        counts.append(right)
        confirm(decoder, sequence, right)

    monkeypatch.setattr(ExactDecoder, "confirm", counted)
    return counts


async def answered(
    tiny: Tiny, asked: Sequence[GenerationRequest], *, at_once: bool
) -> list[list[TokenEvent]]:
    async with running(tiny.exact(slots=4, max_waiting=64)) as service:
        if at_once:
            return list(await asyncio.gather(*(read(service.submit(one)) for one in asked)))
        return [await read(service.submit(one)) for one in asked]


def tokens_of(made: Sequence[Sequence[TokenEvent]]) -> list[list[int]]:
    return [[event.token for event in events] for events in made]


def _tokens_booked(event: TokenEvent) -> int:
    return 0 if event.ledger is None else event.ledger.tokens


@pytest.mark.parametrize("at_once", [False, True], ids=["alone", "several at once"])
async def test_answers_are_those_of_transformers_whatever_a_head_of_random_weights_says(
    tiny: Tiny, oracle: Oracle, confirmed: list[int], at_once: bool
) -> None:
    questions = Questions(tiny=tiny, count=8)
    asked = [one for _, one in questions.among(1)]
    assert tokens_of(await answered(tiny, asked, at_once=at_once)) == questions.answers
    assert confirmed
    assert max(oracle.most) > 0


@pytest.mark.parametrize("at_once", [False, True], ids=["alone", "several at once"])
@pytest.mark.parametrize("penalty", [1.0, 1.3], ids=["", "draws that look back"])
@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
async def test_answers_are_the_same_with_drafts_that_are_right_more_often_than_not(
    tiny: Tiny,
    oracle: Oracle,
    confirmed: list[int],
    monkeypatch: pytest.MonkeyPatch,
    temperature: float,
    penalty: float,
    at_once: bool,
) -> None:
    """Tokens, their order and their probabilities."""
    sampling = Sampling(temperature=temperature, seed=3, stream=0, repetition_penalty=penalty)
    questions = Questions(tiny=tiny, count=6)
    asked = [replace(one, sampling=sampling) for _, one in questions.among(1, new=24)]
    monkeypatch.setattr(tiny.view, "draft_head", None)
    plain = await answered(tiny, asked, at_once=False)
    monkeypatch.setattr(tiny.view, "draft_head", oracle)
    confirmed.clear()
    pairs = zip(questions.prompts, tokens_of(plain), strict=True)
    oracle.texts = [[*prompt, *tokens] for prompt, tokens in pairs]
    made = await answered(tiny, asked, at_once=at_once)
    assert tokens_of(made) == tokens_of(plain)
    for with_drafts, without in zip(made, plain, strict=True):
        assert [one.logprob for one in with_drafts] == [one.logprob for one in without]
        assert [one.finish_reason for one in with_drafts] == [one.finish_reason for one in without]
        assert [_tokens_booked(one) for one in with_drafts] == [0, *[1] * (len(without) - 1)]
    assert min(confirmed) == 0
    assert max(confirmed) > (0 if at_once else 2)


async def test_what_an_answer_has_no_room_for_is_not_drafted(
    tiny: Tiny, oracle: Oracle, confirmed: list[int]
) -> None:
    """Of an answer of four tokens the first comes of the prompt, and the last is not fed."""
    (_, one), *_ = Questions(tiny=tiny, count=1).among(1, new=4)
    (events,) = await answered(tiny, [one], at_once=False)
    assert len(events) == 4
    assert max(oracle.most) == 2


async def test_a_prompt_that_goes_on_from_an_answer_is_read_behind_it(
    tiny: Tiny, oracle: Oracle, confirmed: list[int]
) -> None:
    """What the first answer left is right, though wrong drafts were written behind it."""
    (_, one), *_ = Questions(tiny=tiny, count=2).among(1, new=40)
    plain = tiny.greedy(list(one.prompt_ids), 40, eos=None)
    oracle.texts = [[*one.prompt_ids, *plain]]
    first, again = await answered(tiny, [one, one], at_once=False)
    longer = replace(one, prompt_ids=(*one.prompt_ids, *plain))
    expected = tiny.greedy(list(longer.prompt_ids), 40, eos=None)
    oracle.texts.append([*longer.prompt_ids, *expected])
    (_, after) = await answered(tiny, [one, longer], at_once=False)
    assert tokens_of([first, again]) == [plain, plain]
    assert tokens_of([after]) == [expected]
    assert after[0].cached_tokens > len(one.prompt_ids)
    assert max(confirmed) > 0


def test_a_head_reads_nothing_while_there_are_too_many_streams_and_then_all_at_once(
    tiny: Tiny, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it drafts is the same: from the states of all tokens, those that were written over
    among them; and from the last ones, where there are too many."""
    states = torch.randn(12, tiny.view.spec.hidden_size, generator=torch.Generator().manual_seed(2))
    tokens, pieces = list(range(40, 52)), []
    read_all = DraftHead.read_all

    def counted(head: DraftHead, read: Sequence[tuple[Piece[HeadMemory], Sequence[int]]]) -> None:
        pieces.extend((piece.first, len(said)) for piece, said in read)
        read_all(head, read)

    monkeypatch.setattr(DraftHead, "read_all", counted)
    found = []
    for at_once in (True, False):
        drafts = HeadDrafts(view=tiny.view)
        drafts.begin(3, None)
        if at_once:
            drafts.read(3, 0, states, tokens)
        else:
            drafts.read(3, 0, states[:5], tokens[:5])
            drafts.read(3, 5, -states[5:8], tokens[:3])
            for at in range(5, 12):
                drafts.read(3, at, states[at : at + 1], tokens[at : at + 1])
                assert drafts.offer([Wish(slot=3, position=at + 1, token=7, most=0)]) == [()]
        assert not pieces
        drafts.begin(4, 3)
        found += drafts.offer([Wish(slot=4, position=12, token=7, most=4, likely=0.0)])
        assert pieces == ([(0, 12)] if at_once else [(0, 8), (5, 7)])
        pieces.clear()
    assert found[0] == found[1]
    assert len(found[0]) == 4
    monkeypatch.setattr(head_drafts, "MOST_UNREAD", 4)
    few = HeadDrafts(view=tiny.view)
    few.read(1, 0, states[:8], tokens[:8])
    for at in range(8, 12):
        few.read(1, at, states[at : at + 1], tokens[at : at + 1])
    few.offer([Wish(slot=1, position=12, token=7, most=4)])
    assert pieces == [(8, 4)]
