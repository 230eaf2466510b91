"""Linear attention in compiled steps: the same bits whatever rows come together and whatever was
withdrawn before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zoo
from compiled_rows import alone, assert_same_in_any_batch, fed, opened
from trimmoe.core.errors import UserError
from trimmoe.core.precision import Precision
from trimmoe.models.cache import SNAPSHOTS
from trimmoe.models.compiled.view import CompiledView

VOCABULARY = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of heads whose sizes are no multiple of a lane, each key's serving two of values."""
    more = {"linear_key_head_dim": 24, "linear_value_head_dim": 40}
    return zoo.write("qwen3_5_moe_text", tmp_path_factory.mktemp("delta"), **more)


@pytest.fixture(scope="module")
def view(folder: Path) -> CompiledView:
    return opened(folder)


@pytest.mark.parametrize("precision", [Precision.NONE, Precision.INT8])
def test_a_row_does_not_depend_on_what_it_is_batched_with(
    folder: Path, precision: Precision
) -> None:
    assert_same_in_any_batch(opened(folder, precision), zoo.prompts(2 * SNAPSHOTS + 3, 1, 5))


_PIECES = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 12)), min_size=1, max_size=8)


@given(pieces=_PIECES, seed=st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_withdrawn_tokens_leave_nothing(
    view: CompiledView, pieces: list[tuple[int, int]], seed: int
) -> None:
    """Pieces of a sequence, each behind tokens that turn out wrong and are taken back, beside
    another sequence that goes on undisturbed."""
    rng = np.random.default_rng(seed)
    right = rng.integers(0, VOCABULARY, sum(size for size, _ in pieces)).tolist()
    beside = rng.integers(0, VOCABULARY, len(pieces)).tolist()
    cache = view.new_cache(slots=2)
    one, other = cache.alloc(), cache.alloc()
    made, at = [], 0
    for number, (size, wrong) in enumerate(pieces):
        if wrong:
            fed(view, cache, {one: (at, rng.integers(0, VOCABULARY, wrong).tolist())})
        piece = (at, right[at : at + size])
        made.append(fed(view, cache, {one: piece, other: (number, beside[number : number + 1])}))
        at += size
    ours = torch.cat([rows[:-1] for rows in made])
    assert torch.equal(ours, alone(view, right))
    assert torch.equal(torch.cat([rows[-1:] for rows in made]), alone(view, beside))


def test_as_many_tokens_as_are_guessed_may_be_withdrawn(view: CompiledView) -> None:
    (tokens,) = zoo.prompts(3 * SNAPSHOTS)
    expected, cache = alone(view, tokens), view.new_cache(slots=1)
    slot, back = cache.alloc(), SNAPSHOTS - 1
    fed(view, cache, {slot: (0, tokens)})
    start = len(tokens) - back
    assert torch.equal(fed(view, cache, {slot: (start, tokens[start:])}), expected[start:])
    with pytest.raises(UserError, match="no longer kept"):
        fed(view, cache, {slot: (start - 1, tokens[start - 1 : start])})


def test_a_place_that_is_given_back_keeps_no_state(view: CompiledView) -> None:
    cache = view.new_cache(slots=1)
    slot, (tokens,) = cache.alloc(), zoo.prompts(6)
    fed(view, cache, {slot: (0, tokens)})
    cache.free(slot)
    assert cache.alloc() == slot
    with pytest.raises(UserError, match="after 6 tokens"):
        fed(view, cache, {slot: (6, tokens[:1])})
    assert torch.equal(fed(view, cache, {slot: (0, tokens)}), alone(view, tokens))


def test_what_leaves_early_keeps_the_state_that_it_would_have(view: CompiledView) -> None:
    """A layer of linear attention that a token passes without anybody asking what it gives."""
    (tokens,) = zoo.prompts(4)
    kept = []
    for leaves in (True, False):
        cache = view.new_cache(slots=1)
        slot = cache.alloc()
        batch = view.batch(cache, [slot], [range(4)])
        hidden = view.embed(batch.pad([tokens]), batch)
        if leaves:
            view.propagate(0, hidden, batch, cache)
        else:
            view.attend(0, hidden, batch, cache)
        after = view.batch(cache, [slot], [[4]])
        kept.append(view.attend(0, hidden[:, :1], after, cache))
    assert torch.equal(kept[0], kept[1])
