"""What the exact model says of given answers, and how far a policy's decoding agrees with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trimmoe.core.specs import FloatArray, IntArray
from trimmoe.evaluate.jobs import Forced, added
from trimmoe.evaluate.teacher import Score
from trimmoe.models.base import MoEView
from trimmoe.models.encoder_decoder import EncoderDecoderView
from trimmoe.models.exact import exact_logits, full_depth
from trimmoe.progress import track

_HEAD_ROWS = 256
"""Positions whose logits exist at once: all of a long text would be hundreds of megabytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactAnswer:
    """The exact model on one answer of n tokens."""

    predictions: IntArray
    """Most probable token at each position, [n]."""
    logprobs: FloatArray
    """Log-probability of the answer's token at each position, [n]."""


class ExactReference:
    """The exact model's view of prompts with answers, each computed once, all tokens together."""

    def __init__(self, view: MoEView) -> None:
        self._view = view
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], ExactAnswer] = {}

    def answers(self, forced: Sequence[Forced]) -> list[ExactAnswer]:
        """One for each, in order."""
        keys = [(tuple(one.prompt), tuple(one.answer)) for one in forced]
        new = [key for key in dict.fromkeys(keys) if key not in self._known]
        for prompt, answer in track(new, "Exact model on the reference answers"):
            self._known[prompt, answer] = exact_answer(self._view, prompt, answer)
        return [self._known[key] for key in keys]

    def score(self, forced: Iterable[Forced]) -> Score | None:
        """Flips, likelihood and ledger of the tokens decoded under a policy; None without any.

        The first token of an answer is not among them: the exactly run prompt predicts it.
        """
        decoded = [one for one in forced if one.ledger is not None]
        flips, nll, tokens, ledger = 0, 0.0, 0, None
        for one, exact in zip(decoded, self.answers(decoded), strict=True):
            flips += int((np.array(one.predictions[1:]) != exact.predictions[1:]).sum())
            nll -= sum(one.logprobs[1:])
            tokens += len(one.answer) - 1
            ledger = added(ledger, one.ledger)
        if ledger is None:
            return None
        return Score(
            ledger=ledger,
            tokens=tokens,
            flips=flips,
            nll=nll / tokens,
            worst_prefix=max(one.worst_prefix for one in decoded),
        )

    def nll(self, forced: Sequence[Forced]) -> float:
        """The exact model's mean negative log likelihood of the tokens that `score` counts."""
        exact = self.answers(forced)
        losses = np.concatenate([-one.logprobs[1:] for one in exact])
        return float(losses.mean())


def exact_answer(view: MoEView, prompt: Sequence[int], answer: Sequence[int]) -> ExactAnswer:
    """Predictions at every token of `answer` after `prompt`, executed exactly.

    All at once; with an encoder, which reads the prompt, token by token, since experts there turn
    tokens away that come in one call with too many others.
    """
    if isinstance(view, EncoderDecoderView):
        ids = [view.start_token, *answer[:-1]]
        return _answered(exact_logits(view, [ids], sources=[prompt], chunk=1)[0], answer)
    cache = view.new_cache(slots=1)
    slot = cache.alloc()
    ids = [*prompt, *answer[:-1]]
    with torch.inference_mode():
        batch = view.batch(cache, [slot], [range(len(ids))])
        hidden = full_depth(view, view.embed(batch.pad([ids]), batch), batch, cache)
        parts = [
            _answered(view.logits(states), answer[start : start + _HEAD_ROWS])
            for start, states in _slices(hidden[-len(answer) :])
        ]
    return ExactAnswer(
        predictions=np.concatenate([part.predictions for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
    )


def _slices(hidden: Tensor) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, len(hidden), _HEAD_ROWS):
        yield start, hidden[start : start + _HEAD_ROWS]


def _answered(logits: Tensor, answer: Sequence[int]) -> ExactAnswer:
    """From logits [n, V] at the n positions before each token of `answer`."""
    tokens = torch.tensor(answer, device=logits.device)[:, None]
    scores = logits.float().log_softmax(-1).gather(1, tokens)[:, 0]
    return ExactAnswer(
        predictions=logits.argmax(-1).numpy(force=True),
        logprobs=scores.double().numpy(force=True),
    )
