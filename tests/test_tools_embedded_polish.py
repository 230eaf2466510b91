"""The embedded model's third stage: tasks' text, the mixed loss, exits, and how those are told."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tools.embedded import measure
from tools.embedded.asked import gsm8k_result, spread_over
from tools.embedded.distill import Student, divergence
from tools.embedded.exits import calibrated_exits, exit_table, record_exits, share_within
from tools.embedded.layerwise import LayerwiseSettings
from tools.embedded.network import BF16, Trim
from tools.embedded.polish import (
    PolishSettings,
    Probes,
    agreement,
    exit_weights,
    mixed_loss,
    polish_stage,
    polish_windows,
    with_attention,
)
from tools.embedded.stages import Bench
from tools.embedded.tasks import (
    Piece,
    gsm8k_problems,
    gsm8k_prompt,
    is_task,
    pack_whole,
    squad_paragraphs,
    squad_prompt,
    task_documents,
)
from tools.embedded.text import SEPARATOR, Source
from torch.nn import functional

from carving import CARVED, Letters, carved_checkpoint, carved_layers, some_tokens, tiny_bench
from trimmoe.evaluate.local_data import local_data, read_squad
from trimmoe.evaluate.tasks import local_task, prepare, reference_answers

TINY = PolishSettings(
    steps=30, first_steps=5, windows=2, length=24, lr=1e-2, warmup=2, attention_rank=2, exit_from=1,
    exit_positions=20,
)  # fmt: skip
FIRST = LayerwiseSettings(rank=2)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return tiny_bench(tmp_path, CARVED)


@pytest.fixture
def tasks(tmp_path: Path) -> dict[str, Path]:
    """Twelve articles of two paragraphs with two questions, and a hundred problems."""
    folder = tmp_path / "data"
    for name in ("squad", "gsm8k"):
        (folder / name).mkdir(parents=True)
    squad, gsm8k = folder / "squad" / "dev-v1.1.json", folder / "gsm8k" / "test.jsonl"
    articles = [
        {"title": f"Title_{a}", "paragraphs": [_paragraph(a, p) for p in range(2)]}
        for a in range(12)
    ]
    squad.write_text(json.dumps({"data": articles}))
    lines = [
        {"question": f"What is {n} + 1?", "answer": f"It is.\n#### {n + 1}"} for n in range(100)
    ]
    gsm8k.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"squad": squad, "gsm8k": gsm8k}


def _paragraph(article: int, paragraph: int) -> dict:
    asked = [
        {
            "id": f"{article}-{paragraph}-{q}",
            "question": f"Which is {q} of {article}.{paragraph}?",
            "answers": [{"text": f"answer {article} {paragraph} {q}"}, {"text": "another"}],
        }
        for q in range(2)
    ]
    return {"context": f"Context {paragraph} of article {article}.", "qas": asked}


def text_of(document: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in document)


def first_documents(path: Path, count: int) -> list[str]:
    stream = task_documents(path, random.Random(0))
    return [text_of(next(stream)) for _ in range(count)]


@pytest.mark.parametrize("name", ["squad", "gsm8k"])
def test_questions_are_asked_as_the_evaluation_asks_them(tasks: dict[str, Path], name: str) -> None:
    """The evaluation's own prompt, with its reference answer, stands in a training document."""
    task = local_task(local_data(name, tasks[name].parent.parent, limit=None, seed=0))
    prepare(task, num_fewshot=0, max_gen_toks=None, seed=0)
    task.build_all_requests(rank=0, world_size=1)
    asked = reference_answers(task)
    if name == "squad":
        prompts = [squad_prompt(one) for one in read_squad(tasks[name])]
    else:
        prompts = [
            gsm8k_prompt(one)
            for kept in (False, True)
            for one in gsm8k_problems(tasks[name], held_out=kept)
        ]
    assert {prompt for prompt, _ in asked} == set(prompts)
    trained = "".join(first_documents(tasks[name], 60))
    found = [prompt + answer in trained for prompt, answer in asked]
    assert sum(found) >= len(found) // 3  # a paragraph's later questions follow the first


def test_held_out_articles_and_problems_are_never_trained_on(tasks: dict[str, Path]) -> None:
    kept = squad_paragraphs(tasks["squad"], held_out=True)
    assert {asked["title"] for group in kept for asked in group} == {"Title_5", "Title_11"}
    rest = squad_paragraphs(tasks["squad"], held_out=False)
    assert len(kept) + len(rest) == 24
    seen = "".join(first_documents(tasks["squad"], 60))
    assert "Title_4" in seen
    assert "Title_5" not in seen
    assert "Title_11" not in seen

    problems = gsm8k_problems(tasks["gsm8k"], held_out=True)
    assert [problem["question"] for problem in problems] == ["What is 49 + 1?", "What is 99 + 1?"]
    seen = "".join(first_documents(tasks["gsm8k"], 200))
    assert "What is 48 + 1?" in seen
    assert not any(problem["question"] in seen for problem in problems)


def test_a_paragraph_comes_once_with_all_its_questions(tasks: dict[str, Path]) -> None:
    for document in first_documents(tasks["squad"], 20):
        assert document.startswith("Title: Title_")
        assert document.count("Background: ") == 1
        assert document.count("\n\nQuestion: ") == document.count("\n\nAnswer: ") == 2
    orders = {text.split("Which is ")[1][0] for text in first_documents(tasks["squad"], 20)}
    assert orders == {"0", "1"}


def test_task_files_are_told_by_what_they_hold(tasks: dict[str, Path], tmp_path: Path) -> None:
    assert is_task(tasks["squad"])
    assert is_task(tasks["gsm8k"])
    (tmp_path / "news.jsonl").write_text(json.dumps({"text": "A question"}) + "\n")
    (tmp_path / "tale.txt").write_text("Once upon a time.")
    assert not is_task(tmp_path / "news.jsonl")
    assert not is_task(tmp_path / "tale.txt")


@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=30),
    length=st.integers(2, 20),
)
def test_windows_begin_with_documents_and_mark_exactly_the_answers(
    sizes: list[tuple[int, int]], length: int
) -> None:
    documents = [
        [Piece(text="q" * asked), Piece(text="a" * answer, answer=True)] for asked, answer in sizes
    ]
    windows = pack_whole(documents, Letters(), windows=5, length=length)
    assert windows.tokens.shape == windows.answers.shape
    assert len(windows.tokens) <= 5
    assert (windows.tokens[:, 0] == SEPARATOR).all()
    letter = Letters()("a", add_special_tokens=False)["input_ids"][0]
    assert torch.equal(windows.answers, windows.tokens == letter)


def test_every_source_has_its_share_of_the_windows(
    bench: Bench, tasks: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "tale.txt").write_text("Once upon a time there was a shore. " * 200)
    arguments = (f"{tmp_path}/tale.txt=3", f"{tasks['squad']}=1")
    sources = [Source.parse(argument) for argument in arguments]
    windows = polish_windows(bench, sources, replace(TINY, steps=20, length=300), seed=0)
    assert len(windows.tokens) == 40
    assert windows.answers.any(1).sum() == 10


def test_mixed_loss_is_the_divergence_and_the_cross_entropy_with_their_gradient() -> None:
    torch.manual_seed(0)
    embed, states, aim = torch.randn(50, 16), torch.randn(30, 16), torch.randn(30, 16)
    follows, weights = torch.randint(50, (30,)), 1 + 3 * (torch.rand(30) < 0.3)
    states, aim, embed = (each.to(BF16) for each in (states, aim, embed))
    found, gradient = mixed_loss(
        states, aim, follows, embed, text_share=0.25, weights=weights, chunk=7
    )

    free = states.float().requires_grad_()
    logs = functional.log_softmax(free @ embed.float().T, -1)
    goal = functional.log_softmax(aim.float() @ embed.float().T, -1)
    kl = functional.kl_div(logs, goal, log_target=True, reduction="none").sum(-1)
    nll = functional.nll_loss(logs, follows, reduction="none")
    (0.75 * kl + 0.25 * weights * nll).mean().backward()
    assert free.grad is not None
    assert found["kl"] == pytest.approx(kl.mean().item(), rel=0.02)
    assert found["nll"] == pytest.approx(nll.mean().item(), rel=0.02)
    torch.testing.assert_close(gradient.float(), free.grad, atol=3e-3, rtol=0.05)


def test_wholly_taught_the_mixed_loss_is_the_divergence_from_the_teacher() -> None:
    torch.manual_seed(0)
    embed, states, aim = (torch.randn(n, 16).to(BF16) for n in (50, 30, 30))
    follows, weights = torch.randint(50, (30,)), torch.ones(30)
    found, gradient = mixed_loss(states, aim, follows, embed, text_share=0.0, weights=weights)
    loss, wanted = divergence(states, aim, embed)
    assert found["kl"] == pytest.approx(loss, abs=1e-4)
    torch.testing.assert_close(gradient, wanted)


def test_late_exits_count_more_and_the_first_steps_most() -> None:
    settings = PolishSettings()
    layers = torch.arange(settings.exit_from, 29)
    weights = exit_weights(layers, settings, 30, step=settings.first_steps)
    assert (weights.diff() > 0).all()
    assert weights[-1] == pytest.approx(settings.exit_weight)
    assert weights[0] == pytest.approx(settings.exit_weight * settings.exit_least)
    before = exit_weights(layers, settings, 30, step=settings.first_steps - 1)
    assert before[-1] == pytest.approx(settings.first_weight)
    assert (before > weights).all()


def test_agreement_is_of_the_named_tokens_not_of_the_states() -> None:
    embed = torch.eye(6).to(BF16)
    states = torch.tensor([[3.0, 1, 0, 0, 0, 0], [0, 3, 1, 0, 0, 0]]).to(BF16)
    final = torch.tensor([[9.0, 0, 0, 2, 0, 0], [0, 3, 4, 0, 0, 0]]).to(BF16)
    assert agreement(states, final, embed).tolist() == [True, False]


def test_probes_read_only_the_direction() -> None:
    probes = Probes(CARVED)
    torch.nn.init.normal_(probes.weight)
    states, layers = torch.randn(7, CARVED.hidden), torch.arange(7) % CARVED.layers
    torch.testing.assert_close(probes(states, layers), probes(5 * states, layers))
    assert not torch.equal(probes(states, layers), probes(states, (layers + 1) % CARVED.layers))


def test_attention_s_updates_begin_at_zero(bench: Bench) -> None:
    layers = carved_layers(bench)
    wider = with_attention(bench, layers, FIRST, rank=2, seed=0)
    for old, new in zip(layers, wider, strict=True):
        assert {"q", "k", "v", "o"} <= set(new.a)
        before, after = old.merged(), new.merged()
        for name in ("q", "o", "gate", "down"):
            assert torch.equal(getattr(before, name), getattr(after, name))
        assert torch.equal(old.router, new.router)


def test_polishing_brings_exits_to_the_model_s_own_output_and_goes_on_where_it_stopped(
    bench: Bench, tmp_path: Path
) -> None:
    (tmp_path / "tale.txt").write_text("The tide is out and the shore is wide. " * 100)
    sources = [Source.parse(f"{tmp_path}/tale.txt")]
    layers = polish_stage(bench, carved_layers(bench), sources, FIRST, TINY, seed=0)
    lines = [json.loads(line) for line in (bench.work / "polish.log").read_text().splitlines()]
    assert len(lines) == TINY.steps
    first, last = lines[:5], lines[-5:]
    for what, share in {"nll": 0.8, "exits": 0.8, "sure": 0.95}.items():
        assert sum(e[what] for e in last) < share * sum(e[what] for e in first)
    assert layers[1].b["q"].any()

    again = polish_stage(bench, carved_layers(bench), sources, FIRST, TINY, seed=0)
    assert torch.equal(again[2].b["o"], layers[2].b["o"])
    assert len((bench.work / "polish.log").read_text().splitlines()) == TINY.steps


def test_stage_ends_between_its_first_and_its_last_state(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "tale.txt").write_text("The tide is out and the shore is wide. " * 100)
    sources = [Source.parse(f"{tmp_path}/tale.txt")]
    few = replace(TINY, steps=4)

    def ended(kept_share: float) -> torch.Tensor:
        torch.manual_seed(0)
        settings = replace(few, kept_share=kept_share)
        layers = polish_stage(bench, carved_layers(bench), sources, FIRST, settings, seed=0)
        return layers[1].b["up"].detach().clone()

    torch.manual_seed(0)
    before, last = carved_layers(bench)[1].b["up"].detach(), ended(0.0)
    assert not torch.allclose(before, last)
    torch.testing.assert_close(ended(1.0), before)
    torch.testing.assert_close(ended(0.25), 0.25 * before + 0.75 * last)


def test_own_output_moves_only_for_its_own_losses(bench: Bench) -> None:
    """What the exits aim at is detached: with no other loss the last layer is left alone."""
    layers = carved_layers(bench)
    student = Student(bench.dense, layers, CARVED)
    trim = Trim(skip_share=0.0, drop_share=0.0, generator=torch.Generator())
    found = student.run(some_tokens(2, 12), trim, kept=(1, 2))
    early = student.normed(found.after[1]).flatten(0, 1)
    _, gradient = divergence(early.detach(), found.states.detach().flatten(0, 1), student.embed)
    torch.autograd.backward(early, gradient)
    last, second = (layers[index].b["down"] for index in (3, 1))
    assert last.grad is None
    assert second.grad is not None
    assert second.grad.any()


def test_surest_tokens_leave_until_too_many_are_wrong() -> None:
    agrees = np.array([True, True, False, True, True, True, True, True, True, True, False, False])
    sureness = np.linspace(1.0, 0.0, 12)
    assert share_within(agrees, sureness, 0.0) == pytest.approx(2 / 12)
    assert share_within(agrees, sureness, 0.1) == pytest.approx(10 / 12)
    assert share_within(agrees, sureness, 1.0) == 1.0
    assert share_within(~agrees, sureness, 0.0) == 0.0


def test_exits_are_measured_as_the_output_head_reads_them(bench: Bench) -> None:
    model = measure.load_weights(carved_checkpoint(bench, carved_layers(bench)))
    tokens = some_tokens(4, 16)
    record = record_exits(model, tokens, 1)
    assert record.agrees.shape == record.probability.shape == (CARVED.layers - 2, tokens.numel())
    for window, start in ((0, 0), (3, 48)):
        states = [hidden[0] for hidden, _, _ in measure.walk(model, tokens[window][None])]
        heads = [measure.logits_of(model, state).float().softmax(-1) for state in states]
        for row in range(CARVED.layers - 2):
            same = heads[row + 1].argmax(-1) == heads[-1].argmax(-1)
            assert record.agrees[row, start : start + 16].tolist() == same.tolist()
            np.testing.assert_allclose(
                record.probability[row, start : start + 16], heads[row + 1].amax(-1), rtol=1e-2
            )
    table = exit_table(record)
    assert [row["layer"] for row in table] == [1, 2]
    for row in table:
        assert row["above 0.98"] <= row["above 0.9"]
        assert row["at most 0.01 wrong"] <= row["at most 0.02 wrong"]


def test_calibrated_exits_find_a_readable_sign(bench: Bench) -> None:
    """Where one direction of the state says which tokens are right, most of those leave."""
    model = measure.load_weights(carved_checkpoint(bench, carved_layers(bench)))
    record = record_exits(model, some_tokens(30, 40), 1)
    generator = np.random.default_rng(0)
    agrees = generator.random(record.agrees.shape) < 0.5
    hidden = [torch.randn(len(row), CARVED.hidden) for row in agrees]
    for states, row in zip(hidden, agrees, strict=True):
        states[:, 0] = torch.from_numpy(np.where(row, 6.0, -6.0))
    rows = calibrated_exits(replace(record, agrees=agrees, hidden=hidden))
    assert max(row["share"] for row in rows if row["wrong_at_most"] <= 0.02) > 0.6


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It is 5.\n#### 1,005\nQuestion: #### 7", "1005"),
        ("#### -3.", "-3"),
        ("It is 5.", None),
        ("Question: more\n#### 4", None),
    ],
)
def test_result_is_the_marked_number_before_another_question(text: str, number: str | None) -> None:
    assert gsm8k_result(text) == number


def test_questions_are_spread_over_all() -> None:
    assert spread_over(range(100), 4) == [0, 25, 50, 75]
    assert spread_over("abc", 9) == ["a", "b", "c"]
