"""Text files -> windows of token ids."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

SEPARATOR = 0  # <|endoftext|>, which the source model was pretrained with between documents
HELD_OUT_EVERY = 50  # every 50th document of a file is never trained on


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A text file and the share of the windows to take from it."""

    path: Path
    weight: float

    @classmethod
    def parse(cls, argument: str) -> Source:
        """`FILE` or `FILE=WEIGHT`."""
        path, _, weight = argument.partition("=")
        return cls(path=Path(path), weight=float(weight or 1.0))


def documents(path: Path) -> list[str]:
    """A file's documents: .jsonl (`text`, or `question` and `answer`), SQuAD's .json, or plain."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as handle:
        if ".jsonl" in path.name:
            return [_record_text(json.loads(line)) for line in handle if line.strip()]
        if path.name.endswith((".json", ".json.gz")):
            return list(_squad_contexts(json.load(handle)))
        return [handle.read()]


def _record_text(record: dict[str, str]) -> str:
    if "text" in record:
        return record["text"]
    return f"Question: {record['question']}\nAnswer: {record['answer']}"


def _squad_contexts(content: dict) -> Iterator[str]:
    for article in content["data"]:
        yield "\n".join(paragraph["context"] for paragraph in article["paragraphs"])


def split(texts: list[str], *, held_out: bool) -> list[str]:
    """Either the documents to train on or those kept back; a lone document is all training."""
    if len(texts) == 1:
        return [] if held_out else texts
    return [
        t for i, t in enumerate(texts) if (i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) == held_out
    ]


def pack(texts: Iterator[str], tokenizer, *, windows: int, length: int) -> torch.Tensor:
    """int64 (windows, length): documents one after another, a separator before each."""
    need = windows * length
    ids: list[int] = []
    for text in texts:
        ids.append(SEPARATOR)
        ids.extend(tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(ids) >= need:
            break
    full = min(windows, len(ids) // length)
    return torch.tensor(ids[: full * length]).reshape(full, length)


def excerpts(texts: list[str], generator: random.Random, *, characters: int) -> Iterator[str]:
    """An excerpt from each document in random order, and again until the caller has enough."""
    for _ in range(20):
        for text in generator.sample(texts, len(texts)):
            start = generator.randrange(max(1, len(text) - characters + 1))
            yield text[start : start + characters]


def training_windows(
    sources: list[Source], tokenizer, *, windows: int, length: int, seed: int
) -> torch.Tensor:
    """int32 (windows, length), shuffled, each source with its share."""
    total = sum(source.weight for source in sources)
    parts = []
    for index, source in enumerate(sources):
        generator = random.Random(f"{seed}/{index}")
        texts = split(documents(source.path), held_out=False)
        count = round(windows * source.weight / total)
        stream = excerpts(texts, generator, characters=16 * length)
        parts.append(pack(stream, tokenizer, windows=count, length=length))
    together = torch.cat(parts)
    shuffled = torch.randperm(len(together), generator=torch.Generator().manual_seed(seed))
    return together[shuffled].to(torch.int32)


def evaluation_windows(path: Path, tokenizer, *, windows: int, length: int) -> torch.Tensor:
    """The start of a file: of its held-out documents, or of the whole where it is one document."""
    texts = documents(path)
    kept = split(texts, held_out=True) or texts
    if len(texts) > 1:
        # Many documents, a little of each; where there are few, enough of each.
        each = 4 * length * math.ceil(2 * windows / len(kept))
        kept = [text[:each] for text in kept]
    return pack(iter(kept), tokenizer, windows=windows, length=length)
