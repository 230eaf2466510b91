"""SQuAD's own measures: answers compared without case, punctuation, articles and extra spaces."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def process_results(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The harness' call: F1 and exact match of one prediction, best over the annotators'."""
    predicted, answers = normalised(results[0]), doc["answers"]["text"]
    return {
        "f1": max(f1(predicted, normalised(answer)) for answer in answers),
        "exact_match": max(float(predicted == normalised(answer)) for answer in answers),
    }


def normalised(answer: str) -> str:
    """An answer as the official script compares it."""
    plain = answer.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def f1(predicted: str, answer: str) -> float:
    """Harmonic mean of the shares of words in common, of normalised texts."""
    ours, theirs = predicted.split(), answer.split()
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2.0 * common / (len(ours) + len(theirs)) if common else 0.0
