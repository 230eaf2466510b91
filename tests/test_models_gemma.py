"""Gemma 4 in compiled steps, whose experts lie between norms: the same bits whatever rows come
together and whatever was taken back, in few bits too, and layers whose values are their keys."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import zoo
from trimmoe.core.precision import Precision
from trimmoe.models.base import DROPPED
from trimmoe.models.cache import KVCache
from trimmoe.models.compiled.view import CompiledView
from trimmoe.models.exact import exact_logits, full_depth, greedy
from trimmoe.models.load import open_model

VOCABULARY = 64
SHARED = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
"""Layers that attend to all have no matrix for values."""


@pytest.fixture(scope="module", params=[{}, SHARED], ids=["apart", "keys_as_values"])
def it(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> zoo.Specimen:
    return zoo.specimen("gemma4_text", tmp_path_factory.mktemp("gemma"), **request.param)


def _open(folder: Path, precision: Precision) -> CompiledView:
    view = open_model(folder, quantise=precision)
    assert isinstance(view, CompiledView)
    return view


@torch.inference_mode()
def _fed(view: CompiledView, cache: KVCache, rows: dict[int, tuple[int, list[int]]]) -> Tensor:
    """Logits [n, V] after each token of sequences, by slot, that go on from a position, all passed
    together."""
    given = [tokens for _, tokens in rows.values()]
    positions = [range(start, start + len(tokens)) for start, tokens in rows.values()]
    batch = view.batch(cache, list(rows), positions)
    return view.logits(full_depth(view, view.embed(batch.pad(given), batch), batch, cache))


def _alone(view: CompiledView, tokens: list[int]) -> Tensor:
    """Logits after each token of a sequence, one token at a time."""
    cache = view.new_cache(slots=1)
    slot = cache.alloc()
    return torch.cat([_fed(view, cache, {slot: (at, [one])}) for at, one in enumerate(tokens)])


def test_answers_are_those_of_transformers(it: zoo.Specimen) -> None:
    asked = zoo.prompts(9, 1, 14)
    assert isinstance(it.view, CompiledView)
    assert greedy(it.view, asked, 10) == [it.generated(one, 10) for one in asked]
    attentions = [layer.self_attn for layer in it.reference.model.layers]
    assert any(one.v_proj is None for one in attentions) == it.reference.config.attention_k_eq_v


@pytest.mark.parametrize("precision", list(Precision))
def test_a_row_does_not_depend_on_what_it_is_batched_with(
    it: zoo.Specimen, precision: Precision
) -> None:
    """Prompts whole or token by token, alone or beside others, on one thread or two."""
    view, asked = _open(it.folder, precision), zoo.prompts(11, 1, 5)
    expected = torch.cat([_alone(view, one) for one in asked])
    for threads in (1, 2):
        view.use_threads(threads)
        cache = view.new_cache(slots=3)
        together = _fed(view, cache, {cache.alloc(): (0, one) for one in asked})
        assert torch.equal(together, expected)


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT4])
def test_few_bits_are_those_that_modules_have(it: zoo.Specimen, precision: Precision) -> None:
    asked = zoo.prompts(12, 7)
    ours, theirs = (
        torch.cat(exact_logits(view, asked))
        for view in (
            _open(it.folder, precision),
            open_model(it.folder, quantise=precision, compiled=False),
        )
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-2 * float(theirs.abs().max()))
    exact = torch.cat(exact_logits(it.view, asked))
    assert not torch.allclose(ours, exact, atol=1e-3)


_PIECES = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 12)), min_size=1, max_size=6)


@given(pieces=_PIECES, seed=st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_withdrawn_tokens_leave_nothing(
    it: zoo.Specimen, pieces: list[tuple[int, int]], seed: int
) -> None:
    """Pieces of a sequence, each behind tokens that turn out wrong and are taken back."""
    view, rng = it.view, np.random.default_rng(seed)
    assert isinstance(view, CompiledView)
    right = rng.integers(0, VOCABULARY, sum(size for size, _ in pieces)).tolist()
    cache = view.new_cache(slots=1)
    slot, made, at = cache.alloc(), [], 0
    for size, wrong in pieces:
        if wrong:
            _fed(view, cache, {slot: (at, rng.integers(0, VOCABULARY, wrong).tolist())})
        made.append(_fed(view, cache, {slot: (at, right[at : at + size])}))
        at += size
    assert torch.equal(torch.cat(made), _alone(view, right))


def test_a_layer_in_parts_is_the_layer_whole(it: zoo.Specimen) -> None:
    """What two servers give of a layer, added before the norms that follow its experts."""
    view = it.view
    rows = torch.randn(6, view.spec.hidden_size, generator=torch.Generator().manual_seed(0))
    for layer in range(view.spec.layer_count):
        routing = view.route(layer, rows)
        experts = routing.experts.numpy()
        here, there = (np.where(mine, experts, DROPPED) for mine in (experts < 4, experts >= 4))
        moved = view.gathered_part(layer, rows, here, routing.gates)
        rest = view.experts(layer, rows, torch.from_numpy(there), routing.gates)
        moved[:, -view.widths.part :] += rest
        whole = view.whole(layer, moved)
        assert whole.dtype is view.dtype
        assert torch.equal(whole, view.give(layer, rows, experts, routing.gates))
