"""Gemma 4 in compiled steps, whose experts lie between norms: the same bits whatever rows come
together and whatever was taken back, in few bits too, and layers whose values are their keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zoo
from compiled_rows import alone, assert_same_in_any_batch, fed, opened
from trimmoe.core.precision import Precision
from trimmoe.models.base import DROPPED
from trimmoe.models.compiled.view import CompiledView
from trimmoe.models.exact import exact_logits, greedy
from trimmoe.models.load import open_model

VOCABULARY = 64
SHARED = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
"""Layers that attend to all have no matrix for values."""


@pytest.fixture(scope="module", params=[{}, SHARED], ids=["apart", "keys_as_values"])
def it(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> zoo.Specimen:
    return zoo.specimen("gemma4_text", tmp_path_factory.mktemp("gemma"), **request.param)


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
    assert_same_in_any_batch(opened(it.folder, precision), zoo.prompts(11, 1, 5))


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT4])
def test_few_bits_are_those_that_modules_have(it: zoo.Specimen, precision: Precision) -> None:
    asked = zoo.prompts(12, 7)
    ours, theirs = (
        torch.cat(exact_logits(view, asked))
        for view in (
            opened(it.folder, precision),
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
            fed(view, cache, {slot: (at, rng.integers(0, VOCABULARY, wrong).tolist())})
        made.append(fed(view, cache, {slot: (at, right[at : at + size])}))
        at += size
    assert torch.equal(torch.cat(made), alone(view, right))


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
