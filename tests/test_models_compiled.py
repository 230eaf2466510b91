"""Compiled decoder steps: what the modules compute, and the same bits whatever the batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from checkpoints import DECODERS, Folder, written_once
from trimmoe.core.errors import UserError
from trimmoe.core.precision import GROUP, Precision
from trimmoe.models.compiled.calls import multiply
from trimmoe.models.compiled.lanes import LANES, Format
from trimmoe.models.compiled.quantise import Packed, pack, pack_bits, pack_joined, placed
from trimmoe.models.compiled.view import CompiledView
from trimmoe.models.exact import exact_logits, greedy
from trimmoe.models.load import model_spec, open_model

QUANTISED = [Precision.INT8, Precision.INT4]
ROWS = [[5, 9, 33, 2, 71], [8, 3], [64, 12, 12, 90, 4, 7, 41]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return written_once(tmp_path_factory.mktemp)


def _open(path: Path, **options: object) -> CompiledView:
    view = open_model(path, **options)  # pyright: ignore[reportArgumentType]
    assert isinstance(view, CompiledView)
    return view


def _times(matrix: Packed, x: np.ndarray, threads: int = 1) -> np.ndarray:
    """The product with rows [n, K], [n, J]."""
    from trimmoe.models.compiled.calls import wide
    from trimmoe.models.compiled.tables import record

    rows = np.zeros((x.shape[0], matrix.padded_columns), dtype=np.float32)
    rows[:, : x.shape[1]] = x
    out = np.empty((x.shape[0], wide(matrix.shape[0])), dtype=np.float32)
    (held,) = placed([matrix])
    multiply(record(held), rows, x.shape[0], out, threads)
    return out[:, : matrix.shape[0]]


def _random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _bfloat16(values: np.ndarray) -> np.ndarray:
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def _held(weights: np.ndarray, form: Format) -> Packed:
    if form in (Format.F32, Format.BF16):
        return pack(weights, Precision.NONE)
    return pack_bits([weights], form.bits)


# Products.


@pytest.mark.parametrize("form", [each for each in Format if each is not Format.BF16])
@pytest.mark.parametrize(("outs", "columns"), [(1, 5), (16, 32), (50, 700), (200, 96)])
@pytest.mark.parametrize("count", [1, 2, 7, 50])
def test_a_product_is_that_of_what_the_matrix_stands_for(
    form: Format, outs: int, columns: int, count: int
) -> None:
    matrix = _held(_random(outs, columns), form)
    restored = matrix.restored[:outs]
    x = _random(count, columns, seed=1)
    expected = x.astype(np.float64) @ restored.astype(np.float64).T
    # States meet quantised weights as whole numbers of sixteen bits.
    step = 0.0 if form is Format.F32 else np.abs(x).max() / 65534
    room = 2e-4 + step * np.abs(restored).sum(1).max()
    np.testing.assert_allclose(_times(matrix, x)[:, :outs], expected, atol=room)


@given(count=st.integers(1, 60), seed=st.integers(0, 5), form=st.sampled_from(list(Format)))
@settings(max_examples=40, deadline=None)
def test_a_row_of_a_product_does_not_depend_on_the_others(
    count: int, seed: int, form: Format
) -> None:
    weights = _random(70, 576, seed=seed)
    if form is Format.BF16:
        weights = _bfloat16(weights)
    matrix = _held(weights, form)
    assert matrix.form is form
    x = _random(count, 576, seed=seed + 1)
    together = _times(matrix, x)
    alone = np.concatenate([_times(matrix, row[None]) for row in x])
    assert np.array_equal(together, alone)


def test_states_of_any_size_are_rounded_alike_group_by_group() -> None:
    matrix, x = pack(_random(40, 96), Precision.INT8), _random(3, 96, seed=1)
    x[1], x[2, 32:64] = 0.0, 0.0
    plain, larger = _times(matrix, x), _times(matrix, x * np.float32(2.0**40))
    assert np.array_equal(plain * np.float32(2.0**40), larger)
    assert not plain[1].any()


WRITTEN_OUT = """
import sys
import numpy as np
from trimmoe.models.compiled import lanes
lanes._PAIRS_AT_ONCE, lanes.SUMS_AT_ONCE = "", False
from trimmoe.core.precision import GROUP, Precision
from trimmoe.models.compiled.calls import multiply
from trimmoe.models.compiled.tables import record
from trimmoe.models.compiled.quantise import pack, placed
weights, x = np.load(sys.argv[1]), np.load(sys.argv[2])
out = np.empty((x.shape[0], weights.shape[0]), dtype=np.float32)
(matrix,) = placed([pack(weights, Precision.INT8)])
multiply(record(matrix), x, x.shape[0], out, 1)
np.save(sys.argv[3], out)
"""


@pytest.mark.slow
def test_processors_without_the_instruction_give_the_same_bits(tmp_path: Path) -> None:
    weights, x = _random(64, 96), _random(9, 96, seed=1)
    paths = [str(tmp_path / name) for name in ("weights.npy", "x.npy", "out.npy")]
    np.save(paths[0], weights)
    np.save(paths[1], x)
    # A process of its own that compiles anew.
    elsewhere = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", WRITTEN_OUT, *paths], check=True, env=elsewhere)
    assert np.array_equal(np.load(paths[2]), _times(pack(weights, Precision.INT8), x))


def test_threads_change_no_bit() -> None:
    matrix, x = pack(_random(512, 1024), Precision.INT8), _random(9, 1024, seed=1)
    assert np.array_equal(_times(matrix, x, threads=2), _times(matrix, x))


# Packing.


def test_weights_that_bfloat16_holds_take_half_and_lose_nothing() -> None:
    weights = _bfloat16(_random(20, 40))
    matrix = pack(weights, Precision.NONE)
    assert matrix.form is Format.BF16
    assert np.array_equal(matrix.restored, weights)
    # One weight that it does not hold, and all are kept whole.
    weights[3, 3] += np.float32(1e-7)
    assert pack(weights, Precision.NONE).form is Format.F32
    assert np.array_equal(pack(weights, Precision.NONE).restored, weights)


@given(
    outs=st.integers(1, 40),
    columns=st.integers(1, 100),
    size=st.floats(1e-6, 1e4),
    seed=st.integers(0, 9),
)
@settings(max_examples=50, deadline=None)
def test_eight_bits_are_rounded_to_nearest(outs: int, columns: int, size: float, seed: int) -> None:
    weights = _random(outs, columns, seed=seed) * np.float32(size)
    restored = pack(weights, Precision.INT8).restored
    assert restored.shape == weights.shape
    # Within half a step of the widest group there can be.
    assert np.abs(restored - weights).max() <= np.abs(weights).max() / 127 * 0.5 * 1.01


def test_eight_bits_are_those_of_the_formula() -> None:
    """Scales that half precision holds without loss of a digit are as it has them."""
    weights = _random(40, 160)
    groups = weights.reshape(40, -1, GROUP)
    largest = np.abs(groups).max(2, keepdims=True) / np.float32(127)
    scales = largest.astype(np.float16).astype(np.float32)
    expected = (np.rint(groups / scales) * scales).reshape(weights.shape)
    assert np.array_equal(pack(weights, Precision.INT8).restored, expected)


@pytest.mark.parametrize("rows", [1, 5])
def test_what_files_hold_in_eight_bits_is_held_as_it_is(rows: int) -> None:
    """Any positive number of half precision is a scale there, the smallest ones as well."""
    scales = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    scales = np.pad(scales, (0, -len(scales) % 8)).reshape(-1, 8, 1)
    numbers = np.random.default_rng(0).integers(-127, 128, size=(*scales.shape[:2], GROUP))
    numbers[..., 0] = 127
    weights = (numbers * scales).astype(np.float32).reshape(len(scales), -1)
    matrix = pack(weights, Precision.INT8)
    assert np.array_equal(matrix.restored, weights)
    # What is multiplied is what is restored: one weight of each group at a time.
    x = np.zeros((rows, weights.shape[1]), dtype=np.float32)
    x[np.arange(rows), np.arange(rows) * GROUP] = 1.0
    np.testing.assert_allclose(_times(matrix, x), x @ weights.T, rtol=1e-6)


@given(size=st.floats(2.0**-30, 2.0**16), seed=st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_small_weights_are_rounded_as_finely_as_large_ones(size: float, seed: int) -> None:
    weights = _random(16, 64, seed=seed)
    known = pack(weights, Precision.INT8).restored - weights
    off = pack(weights * np.float32(size), Precision.INT8).restored / np.float32(size) - weights
    assert np.abs(off).max() <= np.abs(known).max() * 1.1


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_fewer_bits_come_nearer_than_rounding_over_the_whole_range(bits: int, seed: int) -> None:
    weights = _random(40, 160, seed=seed)
    restored = pack_bits([weights], bits).restored[:40]
    groups = weights.reshape(40, -1, GROUP)
    low, high = groups.min(2, keepdims=True), groups.max(2, keepdims=True)
    steps = (high - low) / (2**bits - 1)
    plain = (low + np.rint((groups - low) / steps) * steps).reshape(weights.shape)
    fitted, rounded = (np.square(each - weights).sum() for each in (restored, plain))
    assert fitted < rounded
    assert np.abs(restored - weights).max() <= steps.max() * 1.5


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("columns", [160, 70])
def test_what_comes_out_is_nearer_where_it_is_known_what_goes_in(bits: int, columns: int) -> None:
    weights, rng = _random(64, columns), np.random.default_rng(1)
    sizes = rng.lognormal(sigma=1.5, size=columns)
    x = (rng.standard_normal((200, columns)) * sizes).astype(np.float32)
    plain = pack_bits([weights], bits)
    fitted = pack_bits([weights], bits, (sizes**2).astype(np.float32))
    off = [np.square(x @ (each.restored - weights).T).sum() for each in (fitted, plain)]
    assert off[0] < 0.9 * off[1]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_few_large_weights_cost_their_neighbours_little(bits: int) -> None:
    """Groups of sixteen rows have their scales in steps of the largest."""
    weights = _random(16, 512)
    off = pack_bits([weights], bits).restored - weights
    weights[3, 100] = 30.0 * np.abs(weights).max()
    beside = np.ones(weights.shape, dtype=bool)
    beside[3, 96:128] = False
    with_it = pack_bits([weights], bits).restored - weights
    assert np.square(with_it[beside]).sum() < 1.2 * np.square(off[beside]).sum()


@pytest.mark.parametrize("squares", [0.0, 3.0])
def test_what_goes_in_alike_or_never_is_as_if_nothing_were_known(squares: float) -> None:
    weights = _random(20, 96)
    plain = pack_bits([weights], 4).restored
    fitted = pack_bits([weights], 4, np.full(96, squares, dtype=np.float32)).restored
    np.testing.assert_allclose(fitted, plain, atol=1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_as_many_numbers_as_there_are_in_so_many_bits_are_held_as_they_are(bits: int) -> None:
    """Where scale and offset need no more than bfloat16 has."""
    numbers = -0.5 + 0.75 * np.arange(2**bits)
    weights = np.random.default_rng(0).choice(numbers, size=(20, 64))
    weights[:, ::GROUP], weights[:, 1::GROUP] = numbers[0], numbers[-1]
    restored = pack_bits([weights.astype(np.float32)], bits).restored[:20]
    assert np.array_equal(restored, weights.astype(np.float32))


def test_groups_of_zeros_stay_zero() -> None:
    weights = np.zeros((3, 64), dtype=np.float32)
    for precision in QUANTISED:
        assert not pack(weights, precision).restored.any()


def test_joined_matrices_keep_their_rows() -> None:
    # One in bfloat16 and one that needs more: both are held whole.
    first, second = _bfloat16(_random(5, 33)), _random(20, 33, seed=1)
    both = pack_joined([first, second], Precision.NONE)
    assert np.array_equal(both.rows(np.arange(5)), first)
    assert np.array_equal(both.rows(np.arange(16, 36)), second)


@pytest.mark.parametrize("precision", QUANTISED)
def test_sizes_are_those_of_what_is_held(folder: Folder, precision: Precision) -> None:
    plain, few = model_spec(folder("mixtral")), model_spec(folder("mixtral"), quantise=precision)
    per_weight = {Precision.INT8: 8.5 / 32, Precision.INT4: 4.5 / 32}[precision]
    np.testing.assert_allclose(few.expert_bytes, plain.expert_bytes * per_weight, rtol=0.01)
    assert few.dense_bytes == pytest.approx(plain.dense_bytes * per_weight, rel=0.01)
    held = pack(_random(64, 128), precision).nbytes
    # Two factors of each panel are not counted.
    factors = 0 if precision is Precision.INT8 else 2 * 4 * (64 // LANES)
    assert held == precision.size_bytes(64 * 128, 4) + factors


# The view.


@pytest.mark.parametrize("name", DECODERS)
def test_computes_what_the_modules_do(folder: Folder, name: str) -> None:
    ours = exact_logits(_open(folder(name)), ROWS)
    theirs = exact_logits(open_model(folder(name), compiled=False), ROWS)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, atol=1e-4, rtol=0)


def _decoded(view: CompiledView, rows: list[list[int]]) -> list[Tensor]:
    """Logits after each row's last token, the rows decoded together after their prompts."""
    cache = view.new_cache(slots=len(rows))
    slots = [cache.alloc() for _ in rows]
    settled = np.ones((view.spec.layer_count, view.spec.expert_count), dtype=bool)
    for slot, row in zip(slots, rows, strict=True):
        batch = view.batch(cache, [slot], [range(len(row) - 1)])
        hidden = batch.pack(view.embed(batch.pad([row[:-1]]), batch))
        ran = view.run(0, view.spec.layer_count, hidden, batch, cache, settled)
        view.tail(batch.unpack(ran.hidden), batch, cache)
    batch = view.batch(cache, slots, [[len(row) - 1] for row in rows])
    hidden = batch.pack(view.embed(batch.pad([row[-1:] for row in rows]), batch))
    passed = view.run(0, view.spec.layer_count, hidden, batch, cache, settled)
    assert passed.layer == view.spec.layer_count
    tail = view.tail(batch.unpack(passed.hidden), batch, cache)
    return list(view.logits(batch.pack(tail)))


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("name", DECODERS)
def test_a_row_does_not_depend_on_what_it_is_batched_with(
    folder: Folder, name: str, precision: Precision
) -> None:
    view = _open(folder(name), quantise=precision)
    together = _decoded(view, ROWS)
    for row, ours in zip(ROWS, together, strict=True):
        assert torch.equal(_decoded(view, [row])[0], ours)
    view.use_threads(2)
    assert all(map(torch.equal, _decoded(view, ROWS), together))


@pytest.mark.parametrize("name", DECODERS)
def test_segments_are_layers_one_after_another(folder: Folder, name: str) -> None:
    view = _open(folder(name))
    last = [logits[-1] for logits in exact_logits(view, ROWS)]
    for ours, theirs in zip(_decoded(view, ROWS), last, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_rows_stop_where_a_slot_does_not_run_here(folder: Folder) -> None:
    view = _open(folder("mixtral"))
    cache = view.new_cache(slots=1)
    batch = view.batch(cache, [cache.alloc()], [range(3)])
    hidden = batch.pack(view.embed(batch.pad([ROWS[0][:3]]), batch))
    settled = np.ones((3, 4), dtype=bool)
    settled[1] = False
    passed = view.run(0, 3, hidden, batch, cache, settled)
    assert passed.layer == 1
    assert passed.routing is not None
    assert passed.experts.shape == (3, 1, 2)
    # What the layer goes on with is what it would have been asked for by itself.
    again = view.route(1, passed.hidden)
    assert torch.equal(again.experts, passed.routing.experts)
    assert torch.equal(again.gates, passed.routing.gates)
    passed = view.run(0, 2, hidden, batch, cache, np.ones((3, 4), dtype=bool))
    assert (passed.layer, passed.routing) == (2, None)


@pytest.mark.parametrize("precision", QUANTISED)
def test_quantised_is_what_those_weights_give(folder: Folder, precision: Precision) -> None:
    """The head's weights are restored and multiplied by torch: the same but for rounding."""
    view = _open(folder("qwen2_moe"), quantise=precision)
    hidden = torch.from_numpy(_random(3, 32))
    torch.testing.assert_close(
        view.logits(hidden), torch.nn.functional.linear(*view.head(hidden)), atol=1e-4, rtol=0
    )
    plain = _open(folder("qwen2_moe"))
    ours, exact = torch.cat(exact_logits(view, ROWS)), torch.cat(exact_logits(plain, ROWS))
    cosines = torch.cosine_similarity(ours, exact)
    assert cosines.median() > {Precision.INT8: 0.999, Precision.INT4: 0.8}[precision]
    assert not torch.equal(ours, exact)


def test_an_expert_may_run_in_every_slot(folder: Folder) -> None:
    view, modules = _open(folder("qwen2_moe")), open_model(folder("qwen2_moe"), compiled=False)
    hidden, gates = torch.from_numpy(_random(5, 32)), torch.full((5, 3), 0.5)
    experts = torch.full((5, 3), 2)
    ours, theirs = (one.experts(0, hidden, experts, gates) for one in (view, modules))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_quantised_answers_are_the_same_in_any_company(folder: Folder) -> None:
    view = _open(folder("olmoe"), quantise=Precision.INT4)
    assert greedy(view, ROWS, 8) == [greedy(view, [row], 8)[0] for row in ROWS]


def test_whatif_queries_leave_the_cache_as_it_was(folder: Folder) -> None:
    view, modules = _open(folder("mixtral")), open_model(folder("mixtral"), compiled=False)
    queries, positions = torch.from_numpy(_random(3, 32)), torch.tensor([2, 4, 2])
    given = []
    for one in (view, modules):
        cache = one.new_cache(slots=1)
        batch = one.batch(cache, [cache.alloc()], [range(6)])
        one.attend(0, one.embed(batch.pad([ROWS[2][:6]]), batch), batch, cache)
        before = [slab.clone() for slab in cache._slabs[0]]
        given.append(one.attend_whatif(0, queries, positions, 0, cache))
        assert all(map(torch.equal, cache._slabs[0], before))
    torch.testing.assert_close(*given, atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{"dtype": torch.bfloat16}, {"streamed": True}])
def test_what_is_not_compiled_cannot_be_quantised(
    folder: Folder, options: dict[str, object]
) -> None:
    with pytest.raises(UserError, match="cannot be quantised here"):
        open_model(folder("mixtral"), quantise=Precision.INT8, **options)  # pyright: ignore
    with pytest.raises(UserError, match="cannot be quantised here"):
        open_model(folder("switch"), quantise=Precision.INT8)
