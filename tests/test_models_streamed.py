"""A streamed view computes what one that holds everything computes, with one layer in memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import DECODERS, LAYOUTS, Folder, written_once
from trimmoe.core.errors import UserError
from trimmoe.models.base import ExpertNotLoaded, MoEView
from trimmoe.models.batch import TokenBatch
from trimmoe.models.cache import KVCache
from trimmoe.models.encoder_decoder import EncoderDecoderView
from trimmoe.models.exact import exact_logits, full_depth
from trimmoe.models.experts import ExpertStacks
from trimmoe.models.load import open_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return written_once(tmp_path_factory.mktemp)


ROWS = [[5, 9, 2, 40, 7], [11, 3, 8]]


def _logits(view: MoEView) -> list[Tensor]:
    if isinstance(view, EncoderDecoderView):
        return exact_logits(view, [[0, *row] for row in ROWS], sources=ROWS)
    return exact_logits(view, ROWS)


@pytest.mark.parametrize(("fused", "sharded"), LAYOUTS)
@pytest.mark.parametrize("name", [*DECODERS, "switch"])
def test_computes_bit_for_bit_what_the_plain_view_does(
    folder: Folder, name: str, fused: bool, sharded: bool
) -> None:
    path = folder(name, fused, sharded)
    plain, streamed = open_model(path, compiled=False), open_model(path, streamed=True)
    assert streamed.loaded == plain.loaded
    for ours, theirs in zip(_logits(streamed), _logits(plain), strict=True):
        assert torch.equal(ours, theirs)


def test_casts_as_the_plain_view_does(folder: Folder) -> None:
    path = folder("mixtral")
    views = [open_model(path, dtype=torch.bfloat16, streamed=s) for s in (True, False)]
    streamed, plain = map(_logits, views)
    assert streamed[0].dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(streamed, plain, strict=True))


@contextmanager
def _watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, frozenset[int]]]]:
    """Which layer every use of a stack asked for, and which were in memory then."""
    used: list[tuple[int, frozenset[int]]] = []
    plain = ExpertStacks.__getitem__

    def watch(self: ExpertStacks, layer: int) -> Any:
        found = plain(self, layer)
        used.append((layer, self.held))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(ExpertStacks, "__getitem__", watch)
        yield used


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_reads_a_layer_when_its_turn_comes_and_holds_no_other(
    folder: Folder, name: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = open_model(folder(name, fused), streamed=True)
    layer_bytes = view.spec.expert_bytes.sum(axis=1)
    assert view.bytes_read.dense == view.spec.dense_bytes
    assert view.bytes_read.experts == 0
    with _watched(monkeypatch) as used:
        for passes in (1, 2):
            _logits(view)
            assert view.bytes_read.experts == passes * layer_bytes.sum()
    assert [layer for layer, _ in used] == 2 * list(range(view.spec.layer_count))
    assert all(held == {layer} for layer, held in used)


def test_a_layer_in_use_is_not_read_again(folder: Folder) -> None:
    view = open_model(folder("mixtral"), streamed=True)
    asked = torch.zeros(1, 32), torch.tensor([[1, 2]]), torch.ones(1, 2)
    for _ in range(3):
        view.experts(1, *asked)
    assert view.bytes_read.experts == view.spec.expert_bytes[1].sum()


def test_only_what_can_be_read_again_is_let_go(folder: Folder) -> None:
    asked = torch.zeros(1, 32), torch.tensor([[1, 2]]), torch.ones(1, 2)
    for streamed, reads in ((True, 2), (False, 1)):
        view = open_model(folder("mixtral"), experts={0: range(4)}, streamed=streamed)
        for _ in range(2):
            view.experts(0, *asked)
            view.let_go()
        assert view.bytes_read.experts == reads * view.spec.expert_bytes[0].sum()


def test_some_experts_can_be_streamed_too(folder: Folder) -> None:
    view = open_model(folder("mixtral"), experts={0: [1, 3]}, streamed=True)
    assert view.loaded == (frozenset({1, 3}), frozenset(), frozenset())
    view.experts(0, torch.zeros(1, 32), torch.tensor([[1, 3]]), torch.ones(1, 2))
    assert view.bytes_read.experts == 2 * view.spec.expert_bytes[0, 0]
    with pytest.raises(ExpertNotLoaded, match="layer 1"):
        view.experts(1, torch.zeros(1, 32), torch.tensor([[1, 3]]), torch.ones(1, 2))


def test_what_is_missing_is_said_on_opening_and_not_hours_later(
    folder: Folder, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(folder("mixtral"), path)
    file = path / "model.safetensors"
    kept = {
        name: t
        for name, t in load_file(file).items()
        if "2.block_sparse" not in name or ("experts.3.w2" not in name)
    }
    save_file(kept, file)
    with pytest.raises(UserError, match=r"lacks the tensor .*layers\.2\..*experts\.3\.w2"):
        open_model(path, streamed=True)


def test_a_checkpoint_that_went_away_is_said_in_one_sentence(
    folder: Folder, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(folder("mixtral"), path)
    view = open_model(path, streamed=True)
    shutil.rmtree(path)
    with pytest.raises(UserError, match=r"can no longer be read; leave the checkpoint in place"):
        _logits(view)


@pytest.mark.parametrize("name", ["qwen2_moe", "switch"])
def test_a_forgotten_cache_serves_the_next_sequences_as_a_new_one_does(
    folder: Folder, name: str
) -> None:
    view = open_model(folder(name))
    rows, others = [[5, 9, 2, 40], [7, 7, 1, 3]], [[8, 1, 6, 50], [2, 4, 4, 9]]
    cache, batch, hidden = _opened(view, others)
    full_depth(view, hidden, batch, cache)
    cache.forget()
    assert cache.bytes == 0
    new, _, hidden = _opened(view, rows)
    expected = full_depth(view, hidden, batch, new)
    _attach(view, cache, rows)
    assert torch.equal(full_depth(view, hidden, batch, cache), expected)


def _opened(view: MoEView, rows: list[list[int]]) -> tuple[KVCache, TokenBatch, Tensor]:
    cache = view.new_cache(slots=len(rows))
    slots = [cache.alloc() for _ in rows]
    _attach(view, cache, rows)
    batch = view.batch(cache, slots, [range(len(row)) for row in rows])
    return cache, batch, view.embed(batch.pad(rows), batch)


def _attach(view: MoEView, cache: KVCache, rows: list[list[int]]) -> None:
    if isinstance(view, EncoderDecoderView):
        for slot, states in enumerate(view.encode(rows)):
            view.attach(cache, slot, states)
