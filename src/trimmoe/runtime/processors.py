"""What a request does to the logits before a token is drawn from them.

The same as transformers' logits processors, in their order: `SequenceBiasLogitsProcessor`,
`RepetitionPenaltyLogitsProcessor`, OpenAI's two penalties, which transformers does not have,
`MinNewTokensLengthLogitsProcessor` and, for grammars, `PrefixConstrainedLogitsProcessor`. All of
them read the tokens before the one that is drawn and nothing else, so a guess, a draft and full
depth are drawn alike at a position.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trimmoe.runtime.guides import forbidden
from trimmoe.runtime.sampling_params import Sampling
from trimmoe.runtime.seen import Seen

_STRONGEST = 1e30
"""Penalties beyond would make logits infinite, or no numbers, and change nothing else."""


def shaped(logits: Tensor, sampling: Sampling, position: int, seen: Seen | None) -> Tensor:
    """Logits [V] as the token at `position` is drawn from, float32; themselves if nothing asks for
    a change. `seen` is needed where `sampling.looks_back`."""
    if not (sampling.looks_back or sampling.logit_bias):
        return logits
    scores = logits.float().clone()
    if sampling.logit_bias:
        ids, values = zip(*sampling.logit_bias, strict=True)
        scores[list(ids)] += torch.tensor(values, device=scores.device)
    if not sampling.looks_back:
        return scores
    assert seen is not None, "these options need the tokens before"
    if sampling.repetition_penalty != 1:
        _penalise_repetition(scores, sampling.repetition_penalty, seen, position)
    if sampling.frequency_penalty or sampling.presence_penalty:
        _penalise_answered(scores, sampling, seen, position)
    ends = list(sampling.stop_ids)
    held = scores[ends]
    if position - seen.prompt < sampling.min_tokens:
        scores[ends] = -math.inf
    if sampling.grammar:
        _hold_to_grammar(scores, seen, position)
        if not torch.isfinite(scores).any():
            # The grammar is at its end before the answer is long enough.
            scores[ends] = held
    return scores


def _hold_to_grammar(scores: Tensor, seen: Seen, position: int) -> None:
    """Only what the answer's guide allows can be drawn."""
    assert seen.guide is not None
    mask = seen.guide.allowed(seen.answer(position))
    ids = torch.from_numpy(forbidden(mask, scores.shape[0]))
    scores[ids.to(scores.device)] = -math.inf


def _penalise_repetition(scores: Tensor, penalty: float, seen: Seen, position: int) -> None:
    """Logits of all tokens of prompt and answer move away from likely by a factor."""
    penalty = min(max(penalty, 1.0 / _STRONGEST), _STRONGEST)
    ids = torch.tensor(sorted(set(seen.before(position))), device=scores.device)
    those = scores[ids]
    scores[ids] = torch.where(those < 0, those * penalty, those / penalty)


def _penalise_answered(scores: Tensor, sampling: Sampling, seen: Seen, position: int) -> None:
    """Tokens of the answer lose by how often they came, and for having come at all."""
    answered = torch.tensor(seen.answer(position), dtype=torch.int64, device=scores.device)
    ids, counts = answered.unique(return_counts=True)
    scores[ids] -= sampling.frequency_penalty * counts + sampling.presence_penalty
