"""What the model thinks of a prompt's own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trimmoe.models.base import MoEView
from trimmoe.models.encoder_decoder import EncoderDecoderView
from trimmoe.models.exact import full_depth

_ROWS = 256
"""Tokens whose logits exist at once."""


class Score(NamedTuple):
    """Of one token, after those before it."""

    token: int
    logprob: float
    """The model's own, before anything that a request does to draws."""
    rank: int
    """1 for the most probable one."""
    top: tuple[tuple[int, float], ...]
    """(token, logprob) of the most probable ones, best first."""


def scored(view: MoEView, hidden: Tensor, tokens: Sequence[int], count: int) -> list[Score]:
    """What last states [n, d] say of the `tokens` that follow them, n or fewer, each with `count`
    alternatives."""
    made: list[Score] = []
    for at in range(0, len(tokens), _ROWS):
        part = tokens[at : at + _ROWS]
        made += _of(view.logits(hidden[at : at + len(part)]), part, count)
    return made


def _of(logits: Tensor, tokens: Sequence[int], count: int) -> list[Score]:
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1))
    ranks = (logprobs > own).sum(1) + 1
    values, ids = logprobs.topk(min(count, logits.shape[1]))
    return [
        Score(token, logprob, rank, tuple(zip(each, value, strict=True)))
        for token, logprob, rank, each, value in zip(
            tokens,
            own.squeeze(1).tolist(),
            ranks.tolist(),
            ids.tolist(),
            values.tolist(),
            strict=True,
        )
    ]


@torch.inference_mode()
def prompt_scores(view: MoEView, prompt: Sequence[int], count: int) -> list[Score]:
    """Of all tokens of a prompt but the first, read exactly and in one process; its states are not
    kept. Nothing of models with an encoder, whose prompts are no predictions."""
    if isinstance(view, EncoderDecoderView) or len(prompt) < 2:
        return []
    cache = view.new_cache(slots=1)
    batch = view.batch(cache, [cache.alloc()], [range(len(prompt))])
    states = full_depth(view, view.embed(batch.pad([prompt]), batch), batch, cache)
    return scored(view, states, prompt[1:], count)
