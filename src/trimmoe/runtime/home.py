"""The model as far as one server has it: every layer, with those experts that it holds.

Attention, routers and shared experts are on every server. Of the experts that a token activates
those that are elsewhere are stood in for by copies of theirs in few bits, where the plan gives the
server any, or by linear maps of low rank that calibration found, times their own gates; the gates
of the others stay as they are. Other experts in their place, or larger
gates for the others, make guesses worse on the embedded model, whose experts have nothing in
common. What comes out at the head is the server's own guess of the next token, made without a
message to anybody. Its keys and values are not those of full depth, so it has a cache of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from trimmoe.core.profile import Profile
from trimmoe.core.specs import BoolArray, IntArray
from trimmoe.models.base import DROPPED, MoEView
from trimmoe.models.batch import TokenBatch
from trimmoe.models.cache import KVCache
from trimmoe.models.compiled.copies import AtHand, Maps
from trimmoe.models.compiled.view import CompiledView
from trimmoe.models.passed import Routing
from trimmoe.policy.relaxed import NEAR, NOBODY, RANKED

ROWS_AT_ONCE = 4096
"""Tokens that pass the layers together."""
_HEAD_ROWS = 256
"""Tokens whose logits exist at once."""


class Guess(NamedTuple):
    """What a server takes to follow a token."""

    token: int
    confidence: float
    """Its probability."""


def runners_up(logits: Tensor) -> Tensor:
    """`policy.relaxed.runner_up` by logits [n, V], int64 [n]."""
    best = logits.float().topk(RANKED)
    near = best.values[:, 1] >= best.values[:, 0] + math.log(NEAR)
    return torch.where(near, best.indices[:, 1], NOBODY)


def held_here(view: MoEView) -> Tensor:
    """The experts that a view was opened with, bool [N, E]."""
    held = torch.zeros(view.spec.layer_count, view.spec.expert_count, dtype=torch.bool)
    for layer, experts in enumerate(view.loaded):
        held[layer, sorted(experts)] = True
    return held.to(view.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Own:
    """What a server has of the model's experts."""

    held: Tensor
    """Those that it serves, bool [N, E]."""
    stands_in: StandIns | None = None
    """For the others."""
    at_hand: AtHand | None = None
    """The same for a compiled view, with copies in few bits."""

    @staticmethod
    def of(
        view: MoEView,
        held: Tensor,
        stands_in: StandIns | None = None,
        bits: IntArray | None = None,
    ) -> Own:
        """The experts `held` [N, E], and for others copies in so many `bits` [N, E], where the view
        is compiled, and else what `stands_in`."""
        at_hand = None
        if isinstance(view, CompiledView):
            at_hand = view.at_hand(held.numpy(), bits)
        return Own(held=held.to(view.device), stands_in=stands_in, at_hand=at_hand)

    @property
    def is_whole(self) -> bool:
        """Whether nothing but experts and copies of them is needed."""
        if self.at_hand is not None:
            return self.at_hand.is_whole
        return bool(self.held.all())


@dataclass(frozen=True, kw_only=True, slots=True)
class StandIns:
    """Linear maps of low rank in the place of experts that are not at hand."""

    read: Tensor
    """[N, d, E * r]."""
    give: Tensor
    """[N, E * r, d]."""
    maps: Maps | None = None
    """The same for a compiled view."""

    def add(self, layer: int, routing: Routing, here: Tensor) -> Tensor:
        """What those of the activated experts that are not `here`, bool [n, k], are taken to add,
        [n, d]."""
        gates = torch.where(here, 0.0, routing.gates)
        of_all = torch.zeros_like(routing.probabilities).scatter_(1, routing.experts, gates)
        inner = (routing.normed @ self.read[layer]).unflatten(1, (of_all.shape[1], -1))
        return (inner * of_all.to(inner.dtype).unsqueeze(2)).flatten(1) @ self.give[layer]


def stand_ins(view: MoEView, profile: Profile) -> StandIns | None:
    """What a profile has of them, for a view of its model."""
    if profile.stand_in_read is None or profile.stand_in_give is None:
        return None
    read, give = (
        torch.from_numpy(part).to(device=view.device, dtype=view.dtype)
        for part in (profile.stand_in_read, profile.stand_in_give)
    )
    read, give = read.flatten(2), give.flatten(1, 2)
    maps = view.maps(read.numpy(), give.numpy()) if isinstance(view, CompiledView) else None
    return StandIns(read=read, give=give, maps=maps)


def owns(view: MoEView, profile: Profile, hosts: BoolArray, bits: IntArray | None) -> list[Own]:
    """What every server has of a whole model: the experts of `hosts` [M, N, E], copies of others
    in so many `bits` [M, N, E], and what the profile has where it needs more."""
    few = [None] * len(hosts) if bits is None else list(bits)
    view.fit_copies(profile.input_squares)
    found = [
        Own.of(view, torch.from_numpy(held), bits=its) for held, its in zip(hosts, few, strict=True)
    ]
    if all(own.is_whole for own in found):
        return found
    others = stand_ins(view, profile)
    return [own if own.is_whole else replace(own, stands_in=others) for own in found]


def home_layer(
    view: MoEView,
    layer: int,
    hidden: Tensor,
    batch: TokenBatch,
    cache: KVCache,
    own: Own,
) -> Tensor:
    """One layer with the experts held and the maps that stand in for others, [B, T, d] to
    [B, T, d]. Experts that nothing stands in for add nothing.
    """
    held, stands_in = own.held[layer], own.stands_in
    groups = None if batch.shape[1] == 1 else batch.groups
    flat = batch.pack(view.attend(layer, hidden, batch, cache))
    routing = view.route(layer, flat, groups=groups)
    here = held.expand(flat.shape[0], -1).gather(1, routing.experts)
    shared = view.shared(layer, flat, normed=routing.normed)
    routed = None
    if bool(here.any()):
        experts = torch.where(here, routing.experts, DROPPED)
        routed = view.experts(layer, flat, experts, routing.gates, normed=routing.normed)
    if stands_in is not None and not bool(here.all()):
        rest = stands_in.add(layer, routing, here)
        routed = rest if routed is None else routed + rest
    return batch.unpack(view.finish(layer, flat, shared, routed))


def home_layers(
    view: MoEView,
    first: int,
    last: int,
    hidden: Tensor,
    batch: TokenBatch,
    cache: KVCache,
    own: Own,
) -> Tensor:
    """The layers [first, last), one by one or, where that is compiled, in one go, with copies of
    experts that are elsewhere; else as `home_layer`."""
    if isinstance(view, CompiledView) and own.at_hand is not None:
        flat = batch.pack(hidden)
        maps = None if own.stands_in is None else own.stands_in.maps
        return batch.unpack(view.run_home(first, last, flat, batch, cache, own.at_hand, maps))
    for layer in range(first, last):
        hidden = home_layer(view, layer, hidden, batch, cache, own)
    return hidden


@torch.inference_mode()
def home_states(
    view: MoEView,
    token_ids: Sequence[Sequence[int]],
    batch: TokenBatch,
    cache: KVCache,
    own: Own,
) -> Tensor:
    """What `logits` takes after each token of a batch, packed [n, d].

    `token_ids` are the batch's rows. The cache is written.
    """
    hidden, layers = view.embed(batch.pad(token_ids), batch), view.spec.layer_count
    hidden = home_layers(view, 0, layers, hidden, batch, cache, own)
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
    own: Own,
) -> list[Guess]:
    """What is taken to follow each of the n packed tokens of a batch; else as `home_states`."""
    return guessed(view, home_states(view, token_ids, batch, cache, own))
