"""The view computes what transformers computes, prompt and decode, for every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints import DECODERS, Folder, reference, written_once
from trimmoe.core.errors import UserError
from trimmoe.models.base import MoEView
from trimmoe.models.batch import TokenBatch
from trimmoe.models.cache import KVCache
from trimmoe.models.encoder_decoder import EncoderDecoderView
from trimmoe.models.exact import exact_logits, full_depth, greedy
from trimmoe.models.load import open_model

TOLERANCE = 1e-4


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return written_once(tmp_path_factory.mktemp)


def _tokens(*lengths: int, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 96, (n,), generator=generator).tolist() for n in lengths]


def _expected(model: Any, rows: list[list[int]]) -> list[Tensor]:
    with torch.inference_mode():
        return [model(torch.tensor([row])).logits[0] for row in rows]


def _close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, atol=TOLERANCE, rtol=0)


def _prefill(view: MoEView, rows: list[list[int]]) -> tuple[KVCache, TokenBatch, Tensor]:
    """Cache, batch and embedded tokens of prompts that start at 0."""
    cache = view.new_cache(slots=len(rows))
    slots = [cache.alloc() for _ in rows]
    batch = view.batch(cache, slots, [range(len(row)) for row in rows])
    return cache, batch, view.embed(batch.pad(rows), batch)


@pytest.mark.parametrize("chunk", [None, 3, 1])
@pytest.mark.parametrize("name", DECODERS)
def test_logits_of_unequal_prompts(folder: Folder, name: str, chunk: int | None) -> None:
    rows = _tokens(9, 4, 13)
    ours = exact_logits(open_model(folder(name)), rows, chunk=chunk)
    _close(ours, _expected(reference(folder(name)), rows))


@pytest.mark.parametrize("name", DECODERS)
def test_greedy_matches_generate(folder: Folder, name: str) -> None:
    rows, model = _tokens(7, 3, 11), reference(folder(name))
    made = greedy(open_model(folder(name)), rows, 12)
    for row, ours in zip(rows, made, strict=True):
        ids = torch.tensor([row])
        out = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert out[0, len(row) :].tolist() == ours


def test_greedy_stops(folder: Folder) -> None:
    view, rows = open_model(folder("mixtral")), _tokens(7, 3)
    free = greedy(view, rows, 8)
    stop = free[0][2]
    made = greedy(view, rows, 8, stop={stop})
    assert made[0] == free[0][: free[0].index(stop) + 1]


@pytest.mark.parametrize("name", [*DECODERS, "switch"])
def test_bfloat16_is_close(folder: Folder, name: str) -> None:
    view = open_model(folder(name), dtype=torch.bfloat16)
    assert view.dtype == torch.bfloat16
    assert view.spec.activation_bytes == 2
    model, sources = reference(folder(name), torch.bfloat16), _tokens(6, 9, seed=5)
    if name == "switch":
        decoded = [[0, *row] for row in _tokens(3, 5)]
        ours = exact_logits(view, decoded, sources=sources)
        theirs = _switch_expected(model, sources, decoded)
    else:
        ours, theirs = exact_logits(view, sources), _expected(model, sources)
    assert ours[0].dtype == torch.bfloat16
    cosines = torch.cosine_similarity(torch.cat(ours).float(), torch.cat(theirs).float())
    # Rounding may tip a router at single tokens; the median must not notice.
    assert cosines.median() > 0.999


@pytest.mark.parametrize("name", DECODERS)
def test_decode_of_some_rows_in_any_order(folder: Folder, name: str) -> None:
    view, rows = open_model(folder(name)), _tokens(6, 12, 3, 9)
    cache, batch, hidden = _prefill(view, [row[:-1] for row in rows])
    full_depth(view, hidden, batch, cache)
    order = [3, 0, 2]
    step = view.batch(cache, order, [[len(rows[b]) - 1] for b in order])
    hidden = view.embed(step.pad([rows[b][-1:] for b in order]), step)
    ours = view.logits(full_depth(view, hidden, step, cache))
    theirs = _expected(reference(folder(name)), [rows[b] for b in order])
    _close(list(ours), [logits[-1] for logits in theirs])


def test_whatever_lies_beyond_a_sequence_is_never_attended(folder: Folder) -> None:
    view, rows = open_model(folder("qwen2_moe")), _tokens(6, 12)
    cache, batch, hidden = _prefill(view, rows)
    full_depth(view, hidden, batch, cache)
    for keys, values in cache._slabs.values():
        keys[0, :, 6:] = 1e4
        values[0, :, 6:] = 1e4
    step = view.batch(cache, [0, 1], [[6], [12]])
    hidden = view.embed(step.pad([[5], [7]]), step)
    ours = view.logits(full_depth(view, hidden, step, cache))
    theirs = _expected(reference(folder("qwen2_moe")), [[*rows[0], 5], [*rows[1], 7]])
    _close(list(ours), [logits[-1] for logits in theirs])


@pytest.mark.parametrize("name", DECODERS)
def test_skipped_layer_is_the_residual_with_the_shared_expert(folder: Folder, name: str) -> None:
    view = open_model(folder(name))
    cache, batch, hidden = _prefill(view, _tokens(5))
    flat = batch.pack(view.attend(0, hidden, batch, cache))
    shared = view.shared(0, flat)
    assert (shared is not None) == (name == "qwen2_moe")
    expected = flat if shared is None else flat + shared
    assert torch.equal(view.finish(0, flat, shared, None), expected)
    routing = view.route(0, flat)
    dropped = torch.full_like(routing.experts, -1)
    assert not view.experts(0, flat, dropped, routing.gates).any()
    assert not view.experts(0, flat[:1], dropped[:1], routing.gates[:1]).any()


@pytest.mark.parametrize("name", [*DECODERS, "switch"])
def test_propagate_writes_what_attention_writes(folder: Folder, name: str) -> None:
    view, rows = open_model(folder(name)), _tokens(5, 8)
    written = []
    for run in ("attend", "propagate"):
        cache = view.new_cache(slots=2)
        slots = [cache.alloc(), cache.alloc()]
        if isinstance(view, EncoderDecoderView):
            for slot, states in zip(slots, view.encode(rows), strict=True):
                view.attach(cache, slot, states)
        batch = view.batch(cache, slots, [range(len(row)) for row in rows])
        hidden = view.embed(batch.pad(rows), batch)
        for layer in range(view.spec.layer_count):
            getattr(view, run)(layer, hidden, batch, cache)
        if run == "attend":
            view.tail(hidden, batch, cache)
        else:
            view.propagate_tail(hidden, batch, cache)
        written.append(cache._slabs)
    ours, theirs = written[1], written[0]
    assert set(ours) == set(theirs)
    # A MoE layer's dense blocks change the hidden state on the way; the first block of each
    # layer reads the very state that was propagated.
    firsts = _first_blocks(folder(name))
    assert firsts <= set(ours)
    for block in firsts:
        for our, their in zip(ours[block], theirs[block], strict=True):
            torch.testing.assert_close(our, their, atol=1e-6, rtol=0)


def _first_blocks(path: Path) -> set[int]:
    view: Any = open_model(path, compiled=False)
    groups = [
        *([*dense, moe] for dense, moe in zip(view._dense, view._moe, strict=True)),
        view._trailing,
    ]
    starts, block = set(), 0
    for group in groups:
        starts |= {block} if group else set()
        block += len(group)
    return starts


def test_exited_token_leaves_usable_state(folder: Folder) -> None:
    """A later token attends to what propagation wrote for an exited one."""
    view, rows = open_model(folder("qwen2_moe")), _tokens(6)
    cache, batch, hidden = _prefill(view, rows)
    full_depth(view, hidden, batch, cache)
    exited = view.batch(cache, [0], [[6]])
    state = view.embed(exited.pad([[9]]), exited)
    for layer in range(view.spec.layer_count):
        view.propagate(layer, state, exited, cache)
    view.propagate_tail(state, exited, cache)
    step = view.batch(cache, [0], [[7]])
    logits = view.logits(full_depth(view, view.embed(step.pad([[4]]), step), step, cache))
    assert logits.isfinite().all()


@pytest.mark.parametrize("name", DECODERS)
def test_whatif_equals_attention_where_nothing_changed(folder: Folder, name: str) -> None:
    view = open_model(folder(name))
    cache, batch, hidden = _prefill(view, _tokens(12))
    positions = torch.tensor([11, 0, 5, 5, 8])
    for layer in range(view.spec.layer_count):
        attended = view.attend(layer, hidden, batch, cache)
        before = [slab.clone() for pair in cache._slabs.values() for slab in pair]
        ours = view.attend_whatif(layer, hidden[0, positions], positions, 0, cache)
        torch.testing.assert_close(ours, attended[0, positions], atol=1e-5, rtol=0)
        after = [slab for pair in cache._slabs.values() for slab in pair]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        hidden = attended
    ended = view.tail(hidden, batch, cache)
    ours = view.tail_whatif(hidden[0, positions], positions, 0, cache)
    torch.testing.assert_close(ours, ended[0, positions], atol=1e-5, rtol=0)


def test_whatif_sees_its_own_change(folder: Folder) -> None:
    """One perturbed query is what attention gives with that token perturbed."""
    view = open_model(folder("mixtral"))
    cache, batch, hidden = _prefill(view, _tokens(8))
    view.attend(0, hidden, batch, cache)
    changed = hidden.clone()
    changed[0, 5] += 1.0
    ours = view.attend_whatif(0, changed[0, 5:6], torch.tensor([5]), 0, cache)
    other = view.new_cache(slots=1)
    theirs = view.attend(0, changed, batch, other)
    torch.testing.assert_close(ours[0], theirs[0, 5], atol=1e-5, rtol=0)


def test_context_limit_is_told(folder: Folder) -> None:
    view = open_model(folder("mixtral"))
    with pytest.raises(UserError, match="takes at most 128"):
        exact_logits(view, _tokens(129))


def test_cache_grows_and_reuses_slots(folder: Folder) -> None:
    view, long = open_model(folder("mixtral")), _tokens(100)
    cache = view.new_cache(slots=2)
    assert (cache.alloc(), cache.alloc(), cache.free_slots, cache.bytes) == (0, 1, 0, 0)
    cache.free(0)
    assert cache.alloc() == 0
    pieces = exact_logits(view, long, chunk=30)
    _close(pieces, _expected(reference(folder("mixtral")), long))


def _switch_expected(
    model: Any, sources: list[list[int]], decoded: list[list[int]]
) -> list[Tensor]:
    with torch.inference_mode():
        return [
            model(input_ids=torch.tensor([s]), decoder_input_ids=torch.tensor([d])).logits[0]
            for s, d in zip(sources, decoded, strict=True)
        ]


def test_switch_encoder(folder: Folder) -> None:
    view, rows = open_model(folder("switch")), _tokens(11, 30, 4)
    assert isinstance(view, EncoderDecoderView)
    model = reference(folder("switch"))
    with torch.inference_mode():
        theirs = [model.encoder(torch.tensor([row])).last_hidden_state[0] for row in rows]
        ours = view.encode(rows)
    _close(ours, theirs)


@pytest.mark.parametrize("name", ["switch", "switch_untied"])
def test_switch_logits(folder: Folder, name: str) -> None:
    """Also where encoder, decoder and head have embeddings of their own."""
    view, model = open_model(folder(name)), reference(folder(name))
    sources, decoded = _tokens(11, 30, 4), [[0, *row] for row in _tokens(9, 3, 17, seed=2)]
    ours = exact_logits(view, decoded, sources=sources)
    _close(ours, _switch_expected(model, sources, decoded))


def test_switch_drops_tokens_beyond_capacity(folder: Folder) -> None:
    view = open_model(folder("switch"))
    hidden = torch.randn(1, 32, generator=torch.Generator().manual_seed(3)).repeat(8, 1)
    groups = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])
    gates = view.route(0, hidden, groups=groups).gates[:, 0]
    assert (gates > 0).tolist() == [True] * 3 + [False] * 2 + [True] * 3
    assert (view.route(0, hidden).gates > 0).all()


def test_switch_decodes_token_by_token(folder: Folder) -> None:
    """In steps of one, capacity binds neither here nor in `generate`."""
    view, model = open_model(folder("switch")), reference(folder("switch"))
    sources = _tokens(11, 30, 4)
    made = greedy(view, sources, 10, stop={1}, start_token=0)
    for source, ours in zip(sources, made, strict=True):
        ids = torch.tensor([source])
        out = model.generate(ids, max_new_tokens=10, do_sample=False, decoder_start_token_id=0)
        assert out[0, 1:].tolist() == ours


def test_switch_has_no_whatif(folder: Folder) -> None:
    view = open_model(folder("switch"))
    with pytest.raises(NotImplementedError, match="no what-if attention"):
        view.attend_whatif(0, torch.zeros(1, 32), torch.tensor([0]), 0, view.new_cache(slots=1))
