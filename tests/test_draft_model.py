"""A small model beside the served one: it fits or is refused, reads what the model it is reads, and
what it guesses changes no answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
)

from nodes import (
    UnevenNetwork,
    answers,
    guessing,
    hybrid_routes,
    request,
    running,
    staircase_routes,
    tokens_of,
    world,
)
from questions import Questions
from serving import Tiny
from tiny import OF_BYTES, VOCABULARY, byte_tokenizer, write_random
from trimmoe.core.errors import UserError
from trimmoe.engine.lead import DRAFT_MODEL, FIRST_CHANCE, OWN, Lead
from trimmoe.experiments.method_engines import make_engine
from trimmoe.experiments.opening import open_drafts, require_guesses
from trimmoe.models.draft import DraftModel, Served, open_draft
from trimmoe.policy.presets import PRESETS
from trimmoe.runtime.drafter import Drafter
from trimmoe.runtime.generate import Generated, generate
from trimmoe.runtime.local import LocalDriver
from trimmoe.runtime.sampling import Sampling

SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
SLOTS = 16


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model, which hardly ever guesses right."""
    config = LlamaConfig(**OF_BYTES, **SMALL)
    folder = tmp_path_factory.mktemp("llama")
    return write_random(LlamaForCausalLM, config, folder, seed=3)


def served(tokenizer: PreTrainedTokenizerFast | None = None) -> Served:
    return Served(
        tokenizer=tokenizer or byte_tokenizer(),
        vocab_size=VOCABULARY,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def opened(path: Path, slots: int = SLOTS) -> DraftModel:
    return open_draft(path, served(), slots=slots)


# The model.


@pytest.mark.parametrize("which", ["llama", "itself"])
def test_it_reads_as_transformers_does_bit_by_bit_and_after_it_was_cut_back(
    tiny: Tiny, llama: Path, which: str
) -> None:
    path = llama if which == "llama" else tiny.folder
    ids, model = [5, 6, 7, 8, 9, 10, 11], opened(path)
    whole = _whole(path, ids)
    memory = model.begin()
    assert torch.allclose(model.read(memory, 0, ids[:4]), whole[:4], atol=1e-4)
    model.read(memory, 4, [1, 2, 3, 4])
    for start in (4, 2, 6):
        again = model.read(memory, start, ids[start:])
        assert torch.allclose(again, whole[start:], atol=1e-4)


def _whole(path: Path, ids: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0]


def test_another_vocabulary_is_refused_in_a_sentence(llama: Path) -> None:
    other = byte_tokenizer()
    other.add_tokens(["<more>"])
    with pytest.raises(UserError, match="another vocabulary"):
        open_draft(llama, served(other), slots=1)


def test_what_cannot_take_back_what_it_has_read_is_refused(tmp_path: Path) -> None:
    shape = {name: value for name, value in OF_BYTES.items() if name != "max_position_embeddings"}
    config = MambaConfig(**shape, hidden_size=32, num_hidden_layers=2)
    write_random(MambaForCausalLM, config, tmp_path, seed=0)
    with pytest.raises(UserError, match="cannot take back"):
        opened(tmp_path)


def test_weights_that_are_not_there_are_missed_in_a_sentence(llama: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((llama / name).read_bytes())
    with pytest.raises(UserError, match="cannot open the draft model"):
        opened(tmp_path)


def test_a_head_that_is_wider_or_narrower_gives_as_many_scores_as_the_served_one(
    llama: Path,
) -> None:
    model = opened(llama)
    memory = model.begin()
    for size in (VOCABULARY - 10, VOCABULARY + 10):
        model.vocab_size = size
        scores = model.read(memory, 0, [1, 2])
        assert scores.shape == (2, size)
        assert bool((scores[:, VOCABULARY:] == float("-inf")).all())


def test_a_policy_that_follows_no_guesses_has_no_use_for_one(tiny: Tiny, llama: Path) -> None:
    with pytest.raises(UserError, match="leave out --draft-model"):
        require_guesses(PRESETS["exact"]())
    policy = PRESETS["speculative"]()
    assert open_drafts(None, tiny.view, tiny.tokenizer, PRESETS["exact"](), slots=1) is None
    assert open_drafts(str(llama), tiny.view, tiny.tokenizer, policy, slots=1) is not None


def test_there_is_room_for_so_many_sequences(llama: Path) -> None:
    drafter = Drafter(opened(llama, slots=1))
    assert drafter.read(1, 0, [1, 2, 3]) is not None
    assert drafter.read(2, 0, [1, 2, 3]) is None
    assert drafter.read(1, 7, [1]) is None, "what comes before was never read"
    drafter.close(1)
    assert drafter.read(2, 0, [1, 2, 3]) is not None


# Whose turn it is.


def after(lead: Lead, right: Callable[[int, int], bool], tokens: int) -> list[int]:
    """Whose turn it was at each token, of which `right` says whether that source is right."""
    turns = []
    for token in range(tokens):
        turns.append(lead.choose())
        lead.after(10.0, guessed=True, right=right(token, lead.turn), source=lead.turn)
    return turns


@pytest.mark.parametrize("better", [OWN, DRAFT_MODEL])
def test_who_was_right_lately_guesses(better: int) -> None:
    lead = Lead(guesses=8, guess_s=1.0, others_s=(1.0,), least=0.15)
    turns = after(lead, lambda token, turn: turn == better and token % 4 > 0, 400)
    assert Counter(turns[100:])[better] > 270
    assert len(set(turns[100:])) == 2, "the other one is tried again"


def test_who_takes_longer_has_to_be_right_more_often() -> None:
    for slow_s, chosen in ((2.0, DRAFT_MODEL), (9.9, OWN)):
        lead = Lead(guesses=8, guess_s=1.0, others_s=(slow_s,), least=0.15)
        lead.sources[OWN].chance, lead.sources[DRAFT_MODEL].chance = 0.5, FIRST_CHANCE
        lead.after(10.0, guessed=False, right=False)
        assert lead.choose() == chosen


def test_copies_say_nothing_of_either() -> None:
    lead = Lead(guesses=8, guess_s=1.0, others_s=(1.0,))
    lead.after(10.0, guessed=True, right=False, source=None)
    assert [source.chance for source in lead.sources] == [FIRST_CHANCE, FIRST_CHANCE]


# Answers.


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
@pytest.mark.parametrize("which", ["llama", "itself"])
async def test_answers_are_the_same_whatever_it_guesses(
    tiny: Tiny, llama: Path, which: str, temperature: float
) -> None:
    """It is nearly always wrong or, the served model itself, right wherever that is greedy."""
    path = llama if which == "llama" else tiny.folder
    profile, plan = world(tiny, servers=3, routes=hybrid_routes(3))
    asked = [
        (access, request([7, 8, 9 + access, 10, 11], 16, sampling=Sampling(
            temperature=temperature, seed=5, stream=access
        )))
        for access in (0, 1, 2, 0)
    ]  # fmt: skip
    made, ahead = [], []
    for draft, policy in ((None, PRESETS["exact"]()), (lambda: opened(path), guessing(3))):
        async with running(
            tiny,
            profile=profile,
            plan=plan,
            policy=policy,
            draft=draft,
            network=UnevenNetwork(3),
        ) as cluster:
            told = await answers(cluster, asked)
            made.append([tokens_of(events) for events in told])
            ahead = [one.ahead for events in told for one in events if one.ahead]
            await cluster.all_free()
            drafters = [node.worker.drafter for node in cluster.nodes.values()]
    assert made[0] == made[1]
    by_model = [one.right for one in ahead if one.kind == "model"]
    assert by_model
    if which == "itself":
        assert sum(by_model) > 0.9 * len(by_model)
        assert {one.kind for one in ahead} >= {"model"}
    else:
        assert not all(by_model)
        assert {one.kind for one in ahead} >= {"model", "guess"}, "its turn passes"
    assert all(each is not None and not each._memory for each in drafters)


async def test_answers_of_transformers_with_stops_and_prompts_of_many_chunks(
    tiny: Tiny, llama: Path
) -> None:
    questions = Questions(tiny=tiny, count=8)
    profile, plan = world(tiny, servers=3, routes=staircase_routes(3))
    async with running(
        tiny,
        profile=profile,
        plan=plan,
        policy=guessing(4),
        draft=lambda: opened(llama, slots=1),
        prefill_chunk=8,
    ) as cluster:
        made = await answers(cluster, questions.among(3))
        await cluster.all_free()
        front_ends = [node.front_end for node in cluster.nodes.values()]
    assert [tokens_of(events) for events in made] == questions.answers
    assert sum(front_end.restarts for front_end in front_ends) == 0


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
def test_one_process_books_what_the_better_source_saves_and_says_the_same(
    tiny: Tiny, temperature: float
) -> None:
    profile, plan = world(tiny, servers=3, routes=staircase_routes(3))
    policy = guessing(4)
    took_s, said = [], []
    for draft in (None, opened(tiny.folder)):
        engine = make_engine(plan, profile, tiny.view.spec, policy)
        driver = LocalDriver(tiny.view, profile, engine, slots=1, draft=draft)
        made = _generated(driver, temperature)
        said.append([one.token for one in made])
        took_s.append(sum(one.ledger.delay_s for one in made if one.ledger is not None))
    assert said[0] == said[1]
    assert took_s[1] < took_s[0]


def _generated(driver: LocalDriver, temperature: float) -> list[Generated]:
    return list(
        generate(
            driver,
            [7, 8, 9, 10, 11],
            access=0,
            budget=0.0,
            confidence=0.9,
            max_new_tokens=40,
            stop=frozenset(),
            sampling=Sampling(temperature=temperature, seed=2),
        )
    )
