"""Calibration text: files -> passages -> windows of tokens."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from trimmoe.calibrate.settings import MIN_WINDOWS
from trimmoe.core.errors import UserError
from trimmoe.core.specs import IntArray

_PASSAGE_CHARS_PER_TOKEN = 6
"""Generous: a passage of this many characters per token nearly always fills a window."""


def read_texts(paths: Sequence[Path]) -> list[str]:
    """The texts of plain UTF-8 files (one text each) and of .jsonl or .jsonl.gz files (one a
    line, under "text").

    Raises `UserError` if a file is missing, unreadable, not UTF-8, not of its form or empty.
    """
    if not paths:
        raise UserError("Calibration needs at least one text file.")
    return [text for path in paths for text in _texts_of(Path(path))]


def text_hash(texts: Sequence[str]) -> str:
    """SHA-256 of the texts in order, their boundaries included."""
    digest = hashlib.sha256()
    for text in texts:
        encoded = text.encode()
        digest.update(f"{len(encoded)}\n".encode())
        digest.update(encoded)
    return digest.hexdigest()


def _texts_of(path: Path) -> list[str]:
    try:
        with _opened(path) as opened:
            lines = path.name.endswith((".jsonl", ".jsonl.gz"))
            found = list(_json_texts(path, opened)) if lines else [opened.read()]
    except FileNotFoundError as error:
        raise UserError(f"There is no text file at {path}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text; convert it first.") from error
    except (OSError, EOFError) as error:
        raise UserError(f"Cannot read {path}: {error}.") from error
    texts = [text for text in found if text.strip()]
    if not texts:
        raise UserError(f"{path} holds no text; give a file that does.")
    return texts


def _opened(path: Path) -> IO[str]:
    if path.name.endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _json_texts(path: Path, opened: IO[str]) -> Iterator[str]:
    for number, line in enumerate(opened, start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise UserError(f'{path}, line {number}, is not a JSON object with "text".') from error
        if not isinstance(text, str):
            raise UserError(f'{path}, line {number}: "text" is not a string.')
        yield text


def token_windows(
    texts: Sequence[str], tokenizer: Any, *, tokens: int, window: int, seed: int
) -> IntArray:
    """Windows of token ids drawn from all over the texts, shape [W, window].

    The texts are cut into passages a little longer than a window and taken in an order drawn by
    `seed`; a passage that fills a window gives one (a beginning, as the tokenizer marks it),
    shorter ones are joined. Raises `UserError` if they do not fill MIN_WINDOWS windows.
    """
    wanted = max(tokens // window, MIN_WINDOWS)
    passages = _passages(texts, _PASSAGE_CHARS_PER_TOKEN * window)
    windows: list[list[int]] = []
    short: list[int] = []
    for index in np.random.default_rng(seed).permutation(len(passages)):
        ids = tokenizer(passages[index], truncation=False, verbose=False)["input_ids"]
        if len(ids) >= window:
            windows.append(ids[:window])
        else:
            short += ids
        if len(short) >= window and len(windows) < wanted:
            windows.append(short[:window])
            short = short[window:]
        if len(windows) == wanted:
            break
    if len(windows) < MIN_WINDOWS:
        have = len(windows) * window + len(short)
        raise UserError(
            f"The calibration text gives about {have} tokens; {MIN_WINDOWS * window} are the "
            f"least ({MIN_WINDOWS} windows of {window}): give more text or a smaller window."
        )
    return np.asarray(windows, dtype=np.int64)


def _passages(texts: Sequence[str], length: int) -> list[str]:
    """The texts in pieces of at most `length` characters, cut at white space where there is any
    in a piece's last tenth."""
    pieces: list[str] = []
    for text in texts:
        start = 0
        while start < len(text):
            end = min(start + length, len(text))
            if end < len(text):
                space = text.rfind(" ", end - length // 10, end)
                end = space if space > start else end
            if piece := text[start:end].strip():
                pieces.append(piece)
            start = end
    return pieces
