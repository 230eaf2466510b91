"""Questions and answers in the form in which `trimmoe evaluate` asks them, to train on and to ask.

A document is a list of pieces, of which some are answers. Every sixth SQuAD article and every
fiftieth GSM8K problem is never trained on, so that tasks can be measured on them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from trimmoe.evaluate.local_data import read_gsm8k, read_squad

from .text import SEPARATOR

ARTICLES_HELD_OUT_EVERY = 6
PROBLEMS_HELD_OUT_EVERY = 50
MOST_PROBLEMS = 3
"""Problems one after another in a document, as in a prompt with examples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Part of a document."""

    text: str
    answer: bool = False


Rendered = Sequence[Piece]


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """Training windows, and which of their tokens are answers."""

    tokens: torch.Tensor
    """int32 (windows, length)."""
    answers: torch.Tensor
    """bool (windows, length)."""


def is_task(path: Path) -> bool:
    """Whether the file holds questions with answers: SQuAD's form, or GSM8K's."""
    return path.suffix == ".json" or (path.suffix == ".jsonl" and _asks(path))


def _asks(path: Path) -> bool:
    with path.open(encoding="utf-8") as handle:
        return "question" in json.loads(handle.readline() or "{}")


def task_documents(path: Path, generator: random.Random) -> Iterator[Rendered]:
    """A file's training documents in random order, and again until the caller has enough."""
    for _ in range(20):
        if path.suffix == ".json":
            groups = squad_paragraphs(path, held_out=False)
            yield from (_paragraph(group, generator) for group in _shuffled(groups, generator))
        else:
            yield from _problems(gsm8k_problems(path, held_out=False), generator)


def squad_paragraphs(path: Path, *, held_out: bool) -> list[list[dict]]:
    """Every paragraph's questions, of the articles to train on or of those kept back."""
    articles: dict[str, dict[str, list[dict]]] = {}
    for asked in read_squad(path):
        paragraphs = articles.setdefault(asked["title"], {})
        paragraphs.setdefault(asked["context"], []).append(asked)
    kept = _part(list(articles.values()), ARTICLES_HELD_OUT_EVERY, held_out=held_out)
    return [asked for paragraphs in kept for asked in paragraphs.values()]


def gsm8k_problems(path: Path, *, held_out: bool) -> list[dict]:
    """Either the problems to train on or those kept back."""
    return _part(read_gsm8k(path), PROBLEMS_HELD_OUT_EVERY, held_out=held_out)


def _part(items: list, every: int, *, held_out: bool) -> list:
    return [item for i, item in enumerate(items) if (i % every == every - 1) == held_out]


def squad_prompt(asked: dict) -> str:
    """One question after its paragraph."""
    return f"{_background(asked)}\n\n{_question(asked)}"


def gsm8k_prompt(problem: dict) -> str:
    return f"Question: {problem['question']}\nAnswer:"


def _background(asked: dict) -> str:
    return f"Title: {asked['title']}\n\nBackground: {asked['context']}"


def _question(asked: dict) -> str:
    return f"Question: {asked['question']}\n\nAnswer:"


def _paragraph(group: list[dict], generator: random.Random) -> Rendered:
    """A paragraph, then its questions in random order, each with its first annotator's answer."""
    pieces = [Piece(text=_background(group[0]))]
    for asked in _shuffled(group, generator):
        pieces.append(Piece(text=f"\n\n{_question(asked)}"))
        pieces.append(Piece(text=f" {asked['answers']['text'][0]}", answer=True))
    return pieces


def _problems(problems: list[dict], generator: random.Random) -> Iterator[Rendered]:
    left = _shuffled(problems, generator)
    while left:
        count = generator.randint(1, MOST_PROBLEMS)
        group, left = left[:count], left[count:]
        pieces = []
        for index, problem in enumerate(group):
            pieces.append(Piece(text="\n\n" * (index > 0) + gsm8k_prompt(problem)))
            pieces.append(Piece(text=f" {problem['answer']}", answer=True))
        yield pieces


def _shuffled(items: list, generator: random.Random) -> list:
    return generator.sample(items, len(items))


def pack_whole(rendered: Iterable[Rendered], tokenizer, *, windows: int, length: int) -> Windows:
    """Every window begins with a document, so that a question has its paragraph before it; what
    no longer fits at the end is cut off."""
    tokens, answers = [], []
    ids: list[int] = []
    marks: list[bool] = []
    for document in rendered:
        if len(tokens) == windows:
            break
        ids.append(SEPARATOR)
        marks.append(False)
        for piece in document:
            new = tokenizer(piece.text, add_special_tokens=False)["input_ids"]
            ids.extend(new)
            marks.extend([piece.answer] * len(new))
        if len(ids) >= length:
            tokens.append(ids[:length])
            answers.append(marks[:length])
            ids, marks = [], []
    shape = (len(tokens), length)
    return Windows(
        tokens=torch.tensor(tokens, dtype=torch.int32).reshape(shape),
        answers=torch.tensor(answers, dtype=torch.bool).reshape(shape),
    )


def plain(tokens: torch.Tensor) -> Windows:
    """Windows of running text."""
    return Windows(
        tokens=tokens.to(torch.int32), answers=torch.zeros_like(tokens, dtype=torch.bool)
    )
