"""Prompts for the load generator, and its options as users write them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trimmoe.core.errors import UserError

_WORDS = re.findall(
    r"\w+",
    "the of and to in is you that it he was for on are as with his they at be this have from or "
    "one had by word but not what all were we when your can said there use an each which she do "
    "how their if will up other about out many then them these so some her would make like him",
)
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


def make_prompts(
    dataset: str, path: Path | None, count: int, length: int, *, seed: int, model: str | None
) -> tuple[str, ...]:
    """Prompts of the data set `random` or `text`; `model` names whose tokens count lengths.

    Raises `UserError`.
    """
    if dataset == "text":
        if path is None:
            raise UserError("--dataset-name text needs --dataset-path, a UTF-8 text or .jsonl.")
        from trimmoe.calibrate.text import read_texts

        return text_prompts(read_texts([path]), count, length, seed=seed)
    tokenizer = None
    if model is not None:
        from trimmoe.models.load import load_tokenizer

        tokenizer = load_tokenizer(model)
    return random_prompts(count, length, seed=seed, tokenizer=tokenizer)


def random_prompts(count: int, length: int, *, seed: int, tokenizer: Any = None) -> tuple[str, ...]:
    """Random text, different for each request.

    With a tokenizer of `length` tokens each, as nearly as text that is tokenised again can be;
    without one of `length` common words.
    """
    rng = np.random.default_rng(seed)
    if tokenizer is None:
        return tuple(" ".join(rng.choice(_WORDS, length)) for _ in range(count))
    plain = sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids))
    return tuple(_text_of_length(tokenizer, rng, plain, length) for _ in range(count))


def _text_of_length(
    tokenizer: Any, rng: np.random.Generator, plain: Sequence[int], length: int
) -> str:
    """Decoded random tokens; again and again, since decoding and encoding change their number."""
    ids = rng.choice(plain, length).tolist()
    for _ in range(8):
        again = tokenizer(tokenizer.decode(ids), add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        if len(again) == length:
            break
        ids = [*again, *rng.choice(plain, length).tolist()][:length]
    return tokenizer.decode(ids)


def text_prompts(texts: Sequence[str], count: int, length: int, *, seed: int) -> tuple[str, ...]:
    """Passages of `length` words from random places; raises `UserError` if there are too few."""
    words = " ".join(texts).split()
    if len(words) < length:
        raise UserError(
            f"The text has {len(words)} words, a prompt needs {length}; give more text or a "
            "smaller --random-input-len."
        )
    starts = np.random.default_rng(seed).integers(0, len(words) - length + 1, count)
    return tuple(" ".join(words[start : start + length]) for start in starts.tolist())


def token_prompts(
    ids: Sequence[int], count: int, length: int, *, seed: int
) -> tuple[tuple[int, ...], ...]:
    """Passages of `length` tokens from random places; raises `UserError` if there are too few."""
    if len(ids) < length:
        raise UserError(
            f"The text has {len(ids)} tokens, a prompt needs {length}; give more text or shorter "
            "prompts."
        )
    starts = np.random.default_rng(seed).integers(0, len(ids) - length + 1, count)
    return tuple(tuple(ids[start : start + length]) for start in starts.tolist())


def parse_names(text: str, known: Sequence[str], option: str) -> tuple[str, ...]:
    """A comma-separated list of known names; raises `UserError`."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in known:
            raise UserError(f"{option} knows no `{name}`; choose from {', '.join(known)}.")
    return names


def parse_percentiles(text: str) -> tuple[float, ...]:
    """Comma-separated percentiles; raises `UserError`."""
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = (-1.0,)
    if not all(0 <= value <= 100 for value in values):
        raise UserError(
            f"--metric-percentiles `{text}`: give numbers from 0 to 100, such as 50,99."
        )
    return values


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """`ttft:200` and the like, in milliseconds, by metric; raises `UserError`."""
    limits = {}
    for pair in pairs:
        name, _, limit = pair.partition(":")
        if name not in GOODPUT_METRICS or not limit.replace(".", "", 1).isdecimal():
            raise UserError(
                f"--goodput `{pair}`: give METRIC:MILLISECONDS with one of "
                f"{', '.join(GOODPUT_METRICS)}."
            )
        limits[name] = float(limit)
    return limits


def parse_object(text: str, option: str) -> dict[str, Any]:
    """A JSON object; raises `UserError`."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UserError(f'{option} `{text}`: give a JSON object, such as {{"exact": true}}.')
    return value


def positive(value: float, option: str) -> float:
    """The value itself; raises `UserError` unless it is above 0."""
    if not value > 0:
        raise UserError(f"{option} is {value}; give a number above 0.")
    return value
