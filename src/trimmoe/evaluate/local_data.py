"""WikiText, SQuAD and GSM8K from files in their public formats, found by name below a folder."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from trimmoe.core.errors import UserError

Document = dict[str, Any]

_HEADING = re.compile(r"^ = [^=].* = $", re.MULTILINE)
_FEWEST_SHOTS = 32
"""Problems left over from a draw that are enough to choose examples from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """How a task's files are recognised and read."""

    pattern: re.Pattern[str]
    """Of the path below the folder, in lower case."""
    parts: tuple[str, ...]
    """What a name says of its split; a file of the first one that exists is evaluated on."""
    read: Callable[[Path], list[Document]]
    form: str
    """For people."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalData:
    """What one task is evaluated on."""

    name: str
    documents: tuple[Document, ...]
    shots: tuple[Document, ...]
    """Examples for few-shot prompts, none of them evaluated; empty: `documents` themselves, of
    which the harness leaves out the one asked."""
    hashes: dict[str, str]
    """SHA-256 of every file read, by name."""


def local_data(name: str, folder: Path, *, limit: int | None, seed: int) -> LocalData:
    """The documents of one task, `limit` of them drawn by the seed.

    Raises `UserError` if the task has no local form or the folder lacks its files, and if a file
    is not of its form.
    """
    if name not in SOURCES:
        raise UserError(
            f"There is no local form of the task `{name}`: with --data there are "
            f"{', '.join(SOURCES)}; leave --data out for the harness' own tasks."
        )
    source = SOURCES[name]
    files, others = _found(name, source, folder)
    documents = [document for file in files for document in source.read(file)]
    if not documents:
        raise UserError(f"{files[0]} holds no documents; give {source.form}.")
    drawn, rest = _drawn(documents, limit, seed)
    shots = [document for file in others for document in source.read(file)] or rest
    return LocalData(
        name=name,
        documents=tuple(drawn),
        shots=tuple(shots) if len(shots) >= _FEWEST_SHOTS else (),
        hashes={file.name: _hash(file) for file in (*files, *others)},
    )


def _found(name: str, source: Source, folder: Path) -> tuple[list[Path], list[Path]]:
    """Files of the best split, and those of the training split if that is another."""
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}; give the one that holds the tasks' data.")
    every = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and source.pattern.search(path.relative_to(folder).as_posix().lower())
    )
    by_part = {part: [path for path in every if part in path.name.lower()] for part in source.parts}
    best = next((part for part, paths in by_part.items() if paths), None)
    if best is None:
        raise UserError(f"{folder} holds no data for {name}; put {source.form} there.")
    return by_part[best], by_part.get("train", []) if best != "train" else []


def _drawn(
    documents: list[Document], limit: int | None, seed: int
) -> tuple[list[Document], list[Document]]:
    """`limit` documents, in their order, and the others."""
    if limit is None or limit >= len(documents):
        return documents, []
    order = np.random.default_rng(seed).permutation(len(documents))
    chosen = set(order[:limit].tolist())
    return (
        [document for index, document in enumerate(documents) if index in chosen],
        [document for index, document in enumerate(documents) if index not in chosen],
    )


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def read_wikitext(file: Path) -> list[Document]:
    """The articles of a WikiText file, each from its heading on, under `page`."""
    text = _text(file)
    starts = [match.start() for match in _HEADING.finditer(text)]
    return [{"page": text[start:end]} for start, end in pairwise([*starts, len(text)])]


def read_squad(file: Path) -> list[Document]:
    """The questions of a SQuAD file; those without an answer (version 2) are left out."""
    try:
        articles = json.loads(_text(file))["data"]
        return [
            {
                "id": asked["id"],
                "title": article["title"],
                "context": paragraph["context"],
                "question": asked["question"].strip(),
                "answers": {"text": [answer["text"] for answer in asked["answers"]]},
            }
            for article in articles
            for paragraph in article["paragraphs"]
            for asked in paragraph["qas"]
            if asked["answers"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is not a SQuAD file; fetch it again.") from error


def read_gsm8k(file: Path) -> list[Document]:
    """The problems of a GSM8K file, with worked answers."""
    try:
        lines = [json.loads(line) for line in _text(file).splitlines() if line.strip()]
        return [{"question": line["question"], "answer": line["answer"]} for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is not a GSM8K file; fetch it again.") from error


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"Cannot read {file} as UTF-8 text; fetch it again.") from error


SOURCES = {
    "wikitext": Source(
        pattern=re.compile(r"wiki[^/]*\.(tokens|raw)$"),
        parts=("test", "valid"),
        read=read_wikitext,
        form="wiki.test.tokens or wiki.test.raw of WikiText",
    ),
    "squad": Source(
        pattern=re.compile(r"(squad.*/|^)(dev|train)[^/]*\.json$"),
        parts=("dev", "train"),
        read=read_squad,
        form="dev-v1.1.json of SQuAD",
    ),
    "gsm8k": Source(
        pattern=re.compile(r"(gsm8k|grade.school).*\.jsonl$|^(test|train)\.jsonl$"),
        parts=("test", "train"),
        read=read_gsm8k,
        form="test.jsonl and train.jsonl of GSM8K in a folder gsm8k",
    ),
}


def input_hashes(data: Sequence[LocalData]) -> dict[str, str]:
    """Every file's hash under `task/name`."""
    return {
        f"{one.name}/{file}": digest for one in data for file, digest in sorted(one.hashes.items())
    }
