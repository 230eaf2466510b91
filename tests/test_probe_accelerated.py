"""What a server times, above all where experts run together and decode steps are recorded."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import numpy as np
import pytest
import torch

from checkpoints import Folder, written_once
from recording import Anew
from trimmoe.core.machines import BATCHES, Work
from trimmoe.models import together
from trimmoe.models.decoder_view import DecoderView
from trimmoe.models.load import open_model
from trimmoe.models.replay import Replays
from trimmoe.runtime import probe
from trimmoe.runtime.home import held_here
from trimmoe.runtime.probe import machine_name, time_work


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return written_once(tmp_path_factory.mktemp)


@pytest.fixture
def opened(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> Callable[[dict[int, set[int]] | None], tuple[DecoderView, Anew]]:
    """Opens a view as on an accelerator, with some of its experts."""
    monkeypatch.setattr(together, "can_group", lambda *_: True)
    monkeypatch.setattr(probe._Bench, "_accelerated", True)

    def of(experts: dict[int, set[int]] | None) -> tuple[DecoderView, Anew]:
        view, record = open_model(folder("mixtral"), compiled=False, experts=experts), Anew()
        assert isinstance(view, DecoderView)
        view._replays = Replays(view, record)
        return view, record

    return of


def test_layers_are_timed_as_they_are_recorded(opened: Callable) -> None:
    view, record = opened(None)
    taken = time_work(view)
    assert taken.shape == (3, len(Work), len(BATCHES))
    assert (taken > 0).all()
    # A layer up to its router, three times, and all of them whole, for every number of rows.
    assert record.made == 4 * len(BATCHES)


def test_an_expert_takes_its_share_of_what_whole_layers_take_longer(
    opened: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers 1 and 2 are whole. One row activates two experts in each, so that four of them take
    what is left of 20 ms when twice 3 ms of all else are gone."""
    view, _ = opened({0: {0, 1, 3}, 1: {0, 1, 2, 3}, 2: {0, 1, 2, 3}})
    with torch.inference_mode():
        bench = probe._Bench(view, 1)
        monkeypatch.setattr(bench, "timed", lambda work: work() and np.array([0.020]))
        assert bench._whole_layers() == range(1, 3)
        np.testing.assert_allclose(bench.expert(0.003), (0.020 - 2 * 0.003) / 4)


def test_without_a_whole_layer_an_expert_is_timed_by_itself(opened: Callable) -> None:
    view, _ = opened({0: {0, 1, 3}, 1: {0}, 2: {2, 3}})
    with torch.inference_mode():
        bench = probe._Bench(view, 1)
        assert not bench._whole_layers()
        assert (bench.expert(0.003) > 0).all()


def test_experts_are_timed_by_turns_that_no_cache_holds(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as are there and have so many bytes, but not fewer than two."""
    view = open_model(folder("mixtral"), compiled=False)
    each_bytes, held = float(view.spec.expert_bytes.mean()), int(held_here(view).sum())
    monkeypatch.setattr(probe, "_SPREAD", 2)
    for wanted, timed in ((1, 2), (held // 2, held // 2), (10 * held, held)):
        monkeypatch.setattr(probe, "_SPREAD_BYTES", int((wanted + 0.5) * each_bytes))
        with torch.inference_mode():
            bench = probe._Bench(view, 1)
            ran: list[list[tuple[int, int]]] = []
            monkeypatch.setattr(bench, "_experts", lambda chosen, *_, ran=ran: ran.append(chosen))
            bench.expert(0.003)
        assert {len(set(chosen)) for chosen in ran} == {timed}


def test_a_machine_without_a_network_card_has_one_name_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There every process draws an address of its own."""
    drawn = iter([probe._DRAWN | 1, probe._DRAWN | 2])
    monkeypatch.setattr(uuid, "getnode", lambda: next(drawn))
    monkeypatch.setattr(probe, "_boot", lambda: "since noon")
    assert machine_name() == machine_name()
    monkeypatch.setattr(uuid, "getnode", lambda: 7)
    assert machine_name().endswith(f"{7:012x}")
