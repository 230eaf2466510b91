"""Drawing the next token from logits, reproducibly wherever the sequence is continued.

The random number behind the token at a position depends on the seed and that position only, not
on what was drawn before. A sequence that a lost server interrupted is continued elsewhere with
the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trimmoe.core.specs import FloatArray
from trimmoe.runtime.processors import shaped
from trimmoe.runtime.sampling_params import Sampling
from trimmoe.runtime.seen import Seen

_WORD = 2**64


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """A token drawn, with what the model thought of it.

    Probabilities are the model's own, before temperature and whatever else restricts a draw.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    """(token, logprob) of the most probable tokens, best first."""


def draw(logits: Tensor, sampling: Sampling, position: int, seen: Seen | None = None) -> Draw:
    """The token that goes to `position` (counted from the prompt's start), from logits [V].

    `seen`, what comes before it, is needed where `sampling.looks_back`.
    """
    token = pick(shaped(logits, sampling, position, seen), sampling, position)
    if sampling.logprobs is None:
        return Draw(token=token)
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    values, ids = logprobs.topk(min(sampling.logprobs, logits.shape[-1]))
    return Draw(
        token=token,
        logprob=float(logprobs[token]),
        top=tuple(zip(ids.tolist(), values.tolist(), strict=True)),
    )


def pick(scores: Tensor, sampling: Sampling, position: int) -> int:
    """The token that goes to `position`, from logits [V] that nothing is to be done to any more."""
    if sampling.temperature == 0:
        return int(scores.argmax())
    wide = scores.double().cpu()
    if not torch.isfinite(wide.max()):
        # What another server sent was too large for any arithmetic; servers go on all the same.
        return int(scores.argmax())
    # From the most probable one on: by the least temperatures that there are, others overflow.
    scaled = (wide - wide.max()) / sampling.temperature
    probabilities = torch.softmax(scaled, dim=-1).numpy()
    return choose(probabilities, sampling, uniform(sampling, position))


def uniform(sampling: Sampling, position: int) -> float:
    """The number in [0, 1) behind the token at `position`."""
    key = np.array([sampling.seed % _WORD, sampling.stream % _WORD], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=position)).random())


def choose(probabilities: FloatArray, sampling: Sampling, number: float) -> int:
    """The token at `number` in [0, 1) of those of `probabilities` [V] that may be drawn.

    Those are, in the order of transformers: the `top_k` most probable; of them the nucleus, the
    fewest whose mass reaches `top_p`, at least one; of it those that `min_p` lets through.
    """
    if sampling.top_p >= 1 and sampling.top_k == 0:
        return _invert(_probable(probabilities, sampling.min_p), number)
    order = np.argsort(-probabilities, kind="stable")[: sampling.top_k or None]
    mass = np.cumsum(probabilities[order])
    # Up to and with the token whose mass reaches top_p.
    kept = order[: int(np.searchsorted(mass, sampling.top_p * mass[-1], side="left")) + 1]
    return int(kept[_invert(_probable(probabilities[kept], sampling.min_p), number)])


def _probable(weights: FloatArray, min_p: float) -> FloatArray:
    """`weights` with nothing where they are less than `min_p` times the largest."""
    if min_p == 0:
        return weights
    return np.where(weights >= min_p * weights.max(), weights, 0.0)


def _invert(weights: FloatArray, number: float) -> int:
    """The index at `number` of the weights' cumulative distribution; never one of weight 0."""
    mass = np.cumsum(weights)
    index = int(np.searchsorted(mass, number * mass[-1], side="right"))
    # Rounding may put the number on the very end.
    return min(index, int(np.flatnonzero(weights)[-1]))
