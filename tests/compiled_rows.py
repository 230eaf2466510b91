"""Rows of sequences through compiled steps, together or one at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from trimmoe.core.precision import Precision
from trimmoe.models.cache import KVCache
from trimmoe.models.compiled.view import CompiledView
from trimmoe.models.exact import full_depth
from trimmoe.models.load import open_model


def opened(folder: Path, precision: Precision = Precision.NONE) -> CompiledView:
    """A model whose steps are compiled."""
    view = open_model(folder, quantise=precision)
    assert isinstance(view, CompiledView)
    return view


@torch.inference_mode()
def fed(view: CompiledView, cache: KVCache, rows: dict[int, tuple[int, list[int]]]) -> Tensor:
    """Logits [n, V] after each token of sequences, by slot, that go on from a position, all passed
    together."""
    given = [tokens for _, tokens in rows.values()]
    positions = [range(start, start + len(tokens)) for start, tokens in rows.values()]
    batch = view.batch(cache, list(rows), positions)
    return view.logits(full_depth(view, view.embed(batch.pad(given), batch), batch, cache))


def alone(view: CompiledView, tokens: list[int]) -> Tensor:
    """Logits after each token of a sequence, one token at a time."""
    cache = view.new_cache(slots=1)
    slot = cache.alloc()
    return torch.cat([fed(view, cache, {slot: (at, [one])}) for at, one in enumerate(tokens)])


def assert_same_in_any_batch(view: CompiledView, asked: list[list[int]]) -> None:
    """Prompts whole or token by token, alone or beside others, on one thread or two."""
    expected = torch.cat([alone(view, one) for one in asked])
    for threads in (1, 2):
        view.use_threads(threads)
        cache = view.new_cache(slots=3)
        together = fed(view, cache, {cache.alloc(): (0, one) for one in asked})
        assert torch.equal(together, expected)
