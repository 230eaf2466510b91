"""The model as far as one server has it: every layer, with those experts that it holds.

Attention, routers and shared experts are on every server. Of the experts that a token activates
those that are elsewhere add nothing; the gates of the others stay as they are. What comes out at
the head is the server's own guess of the next token, made without a message to anybody. Its keys
and values are not those of full depth, so it has a cache of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trimmoe.models.base import DROPPED, MoEView, TokenBatch
from trimmoe.models.cache import KVCache

ROWS_AT_ONCE = 4096
"""Tokens that pass the layers together."""
_HEAD_ROWS = 256
"""Tokens whose logits exist at once."""


class Guess(NamedTuple):
    """What a server takes to follow a token."""

    token: int
    confidence: float
    """Its probability."""


def held_here(view: MoEView) -> Tensor:
    """The experts that a view was opened with, bool [N, E]."""
    held = torch.zeros(view.spec.layer_count, view.spec.expert_count, dtype=torch.bool)
    for layer, experts in enumerate(view.loaded):
        held[layer, sorted(experts)] = True
    return held.to(view.device)


def home_layer(
    view: MoEView, layer: int, hidden: Tensor, batch: TokenBatch, cache: KVCache, held: Tensor
) -> Tensor:
    """One layer with the experts `held` there, [B, T, d] to [B, T, d].

    `held` is bool [E], or [n, E] where the batch's tokens, packed, are on several servers.
    """
    groups = None if batch.shape[1] == 1 else batch.groups
    flat = batch.pack(view.attend(layer, hidden, batch, cache))
    routing = view.route(layer, flat, groups=groups)
    here = held.expand(flat.shape[0], -1).gather(1, routing.experts)
    shared = view.shared(layer, flat, normed=routing.normed)
    routed = None
    if bool(here.any()):
        experts = torch.where(here, routing.experts, DROPPED)
        routed = view.experts(layer, flat, experts, routing.gates, normed=routing.normed)
    return batch.unpack(view.finish(layer, flat, shared, routed))


@torch.inference_mode()
def home_states(
    view: MoEView,
    token_ids: Sequence[Sequence[int]],
    batch: TokenBatch,
    cache: KVCache,
    held: Tensor,
) -> Tensor:
    """What `logits` takes after each token of a batch, packed [n, d].

    `token_ids` are the batch's rows; `held` is bool [N, E], or [n, N, E] as in `home_layer`. The
    cache is written.
    """
    hidden = view.embed(batch.pad(token_ids), batch)
    for layer in range(view.spec.layer_count):
        hidden = home_layer(view, layer, hidden, batch, cache, held[..., layer, :])
    return batch.pack(view.tail(hidden, batch, cache))


@torch.inference_mode()
def guessed(view: MoEView, states: Tensor) -> list[Guess]:
    """The most probable next token after each of n packed states [n, d]."""
    made: list[Guess] = []
    for part in states.split(_HEAD_ROWS):
        probability, token = view.logits(part).float().softmax(-1).max(-1)
        made += map(Guess, token.tolist(), probability.tolist())
    return made


def home_pass(
    view: MoEView,
    token_ids: Sequence[Sequence[int]],
    batch: TokenBatch,
    cache: KVCache,
    held: Tensor,
) -> list[Guess]:
    """What is taken to follow each of the n packed tokens of a batch; else as `home_states`."""
    return guessed(view, home_states(view, token_ids, batch, cache, held))
