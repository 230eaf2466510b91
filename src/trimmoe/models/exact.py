"""Full depth, every expert exact: the reference that everything else is measured against."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from trimmoe.models.base import MoEView
from trimmoe.models.batch import TokenBatch
from trimmoe.models.cache import KVCache
from trimmoe.models.encoder_decoder import EncoderDecoderView


def full_depth(view: MoEView, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> Tensor:
    """Every layer for every token: embedded [B, T, d] to what `logits` takes, packed [n, d]."""
    layers, experts = view.spec.layer_count, view.spec.expert_count
    everything = np.ones((layers, experts), dtype=bool)
    ran = view.run(0, layers, batch.pack(hidden), batch, cache, everything)
    assert ran.layer == layers, "a view that lacks experts has no full depth"
    return batch.pack(view.tail(batch.unpack(ran.hidden), batch, cache))


@torch.inference_mode()
def exact_logits(
    view: MoEView,
    token_ids: Sequence[Sequence[int]],
    *,
    sources: Sequence[Sequence[int]] | None = None,
    chunk: int | None = None,
) -> list[Tensor]:
    """Logits [T_b, V] at every position of each sequence, sequences of any length together.

    `sources` are the encoder's inputs where there is an encoder. `chunk` feeds at most that many
    tokens of a sequence at once.
    """
    cache = view.new_cache(slots=len(token_ids))
    slots = [cache.alloc() for _ in token_ids]
    _attach(view, cache, slots, sources)
    longest = max(len(row) for row in token_ids)
    step = chunk or longest
    pieces: list[list[Tensor]] = [[] for _ in token_ids]
    for start in range(0, longest, step):
        rows = [b for b, ids in enumerate(token_ids) if len(ids) > start]
        ids = [token_ids[b][start : start + step] for b in rows]
        positions = [range(start, start + len(row)) for row in ids]
        batch = view.batch(cache, [slots[b] for b in rows], positions)
        logits = view.logits(full_depth(view, view.embed(batch.pad(ids), batch), batch, cache))
        parts = logits.split([len(row) for row in ids])
        for b, part in zip(rows, parts, strict=True):
            pieces[b].append(part)
    return [torch.cat(parts) for parts in pieces]


@torch.inference_mode()
def greedy(
    view: MoEView,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    stop: Collection[int] = (),
    start_token: int | None = None,
) -> list[list[int]]:
    """Generate greedily; each result ends at the first token in `stop`, which it includes.

    With an encoder the prompts are its inputs and generation starts from `start_token`.
    """
    cache = view.new_cache(slots=len(prompts))
    slots = [cache.alloc() for _ in prompts]
    ids: list[Sequence[int]] = list(prompts)
    if isinstance(view, EncoderDecoderView):
        _attach(view, cache, slots, prompts)
        assert start_token is not None, "a model with an encoder needs the token to start from"
        ids = [[start_token] for _ in prompts]
    starts = [0] * len(ids)
    made: list[list[int]] = [[] for _ in ids]
    rows = list(range(len(ids)))
    for _ in range(max_new_tokens):
        for b, token in zip(rows, _next(view, cache, slots, ids, starts, rows), strict=True):
            starts[b] += len(ids[b])
            ids[b] = [token]
            made[b].append(token)
        rows = [b for b in rows if made[b][-1] not in stop]
        if not rows:
            break
    return made


def _next(
    view: MoEView,
    cache: KVCache,
    slots: list[int],
    ids: list[Sequence[int]],
    starts: list[int],
    rows: list[int],
) -> list[int]:
    """The most probable next token of each row."""
    positions = [range(starts[b], starts[b] + len(ids[b])) for b in rows]
    batch = view.batch(cache, [slots[b] for b in rows], positions)
    hidden = view.embed(batch.pad([ids[b] for b in rows]), batch)
    last = batch.last(batch.unpack(full_depth(view, hidden, batch, cache)))
    return view.logits(last).argmax(-1).tolist()


def _attach(
    view: MoEView, cache: KVCache, slots: list[int], sources: Sequence[Sequence[int]] | None
) -> None:
    """Encode the sources and give each sequence its own."""
    if not isinstance(view, EncoderDecoderView):
        return
    assert sources is not None, "a model with an encoder needs its inputs"
    for slot, states in zip(slots, view.encode(sources), strict=True):
        view.attach(cache, slot, states)
