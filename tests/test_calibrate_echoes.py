"""What exits do to later tokens, counted by calibration, against really decoding with exits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tiny import LAYERS, TOP_K, write_tiny_checkpoint
from trimmoe.calibrate.curves import clopper_pearson_upper
from trimmoe.calibrate.echoes import Trimmed, flipped_behind, poisson_upper
from trimmoe.calibrate.head import greedy
from trimmoe.calibrate.sampling import DROP, KEEP, forced
from trimmoe.calibrate.windows import Windows
from trimmoe.core.exit_states import ExitState
from trimmoe.models.base import MoEView
from trimmoe.models.exact import exact_logits
from trimmoe.models.load import open_model


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> MoEView:
    return open_model(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def windows() -> Windows:
    return Windows(ids=np.random.default_rng(3).integers(0, 250, size=(3, 40)))


@torch.inference_mode()
def _decoded(view: MoEView, ids: np.ndarray, trimmed: Trimmed, first: int) -> np.ndarray:
    """Predictions after every token, decoded one by one; what is done to them starts at `first`."""
    cache, predicted = view.new_cache(slots=1), []
    slot = cache.alloc()
    for position, token in enumerate(ids):
        at = first + position
        batch = view.batch(cache, [slot], [range(position, position + 1)])
        hidden = view.embed(torch.tensor([[token]]), batch)
        for layer in range(LAYERS):
            left = layer >= trimmed.exit_layer[at]
            if left and trimmed.frozen[at]:
                view.propagate(layer, hidden, batch, cache)
                continue
            flat = batch.pack(view.attend(layer, hidden, batch, cache))
            routing, routed = view.route(layer, flat), None
            if not left:
                experts = routing.experts
                if layer == trimmed.layer[at]:
                    experts = forced(experts, torch.from_numpy(trimmed.slots[at])[None])
                routed = view.experts(layer, flat, experts, routing.gates)
            hidden = batch.unpack(view.finish(layer, flat, view.shared(layer, flat), routed))
            if layer + 1 == trimmed.exit_layer[at]:
                predicted.append(int(greedy(view, batch.pack(hidden))[0]))
        assert len(predicted) == position + 1
    return np.array(predicted)


def _all_decoded(view: MoEView, windows: Windows, trimmed: Trimmed) -> np.ndarray:
    starts = range(0, windows.tokens, windows.length)
    return np.concatenate(
        [_decoded(view, ids, trimmed, at) for ids, at in zip(windows.ids, starts, strict=True)]
    )


def _nothing(windows: Windows) -> Trimmed:
    return Trimmed.nothing(windows.tokens, layers=LAYERS, top_k=TOP_K)


def _exits(windows: Windows, state: ExitState) -> Trimmed:
    """Three tokens in ten leave somewhere."""
    rng, tokens = np.random.default_rng(7), windows.tokens
    layer = np.where(rng.random(tokens) < 0.3, rng.integers(1, LAYERS, size=tokens), LAYERS)
    frozen = np.full(tokens, state is ExitState.FROZEN)
    return replace(_nothing(windows), exit_layer=layer, frozen=frozen)


def _changes(windows: Windows, slots: list[int]) -> Trimmed:
    """Three tokens in ten run `slots` somewhere."""
    rng, tokens = np.random.default_rng(6), windows.tokens
    layer = np.where(rng.random(tokens) < 0.3, rng.integers(0, LAYERS, size=tokens), -1)
    return replace(_nothing(windows), layer=layer, slots=np.tile(slots, (tokens, 1)))


WAYS = {
    "dense exits": lambda windows: _exits(windows, ExitState.DENSE),
    "frozen exits": lambda windows: _exits(windows, ExitState.FROZEN),
    "skips": lambda windows: _changes(windows, [DROP] * TOP_K),
    "drops": lambda windows: _changes(windows, [KEEP] * (TOP_K - 1) + [DROP]),
    "substitutes": lambda windows: _changes(windows, [3] + [KEEP] * (TOP_K - 1)),
}


@pytest.mark.parametrize("way", WAYS)
def test_echoes_are_what_decoding_so_really_flips(
    view: MoEView, windows: Windows, way: str
) -> None:
    trimmed = WAYS[way](windows)
    exact = _all_decoded(view, windows, _nothing(windows))
    really = _all_decoded(view, windows, trimmed)
    flipped = flipped_behind(view, windows, trimmed, exact, lambda _: None)
    assert flipped.any()
    assert np.array_equal(flipped, (really != exact) & ~trimmed.touched(LAYERS))


def test_windows_that_share_a_sweep_do_not_see_one_another(view: MoEView, windows: Windows) -> None:
    """As those of all that is tried do, the same text trimmed otherwise."""
    ways = [make(windows) for make in WAYS.values()]
    expected = np.random.default_rng(8).integers(0, 250, size=(len(ways), windows.tokens))
    expected[:, ::2] = _predicted(view, windows)[::2]
    every = windows.take(np.tile(np.arange(windows.count), len(ways)))
    found = flipped_behind(
        view, every, Trimmed.joined(ways), expected.ravel(), lambda _: None
    ).reshape(len(ways), -1)
    for trimmed, own, flips in zip(ways, expected, found, strict=True):
        alone = flipped_behind(view, windows, trimmed, own, lambda _: None)
        assert np.array_equal(flips, alone)
        assert 0 < flips.sum() < windows.tokens


def _predicted(view: MoEView, windows: Windows) -> np.ndarray:
    return torch.cat(exact_logits(view, windows.ids.tolist())).argmax(dim=1).numpy()


def test_nothing_flips_where_nothing_is_trimmed(view: MoEView, windows: Windows) -> None:
    nothing = _nothing(windows)
    exact = _all_decoded(view, windows, nothing)
    assert not flipped_behind(view, windows, nothing, exact, lambda _: None).any()


@pytest.mark.parametrize("events", [0, 3, 40])
def test_the_bound_of_a_count_is_the_binomial_one_of_a_rare_event(events: int) -> None:
    many = 10_000_000
    binomial = clopper_pearson_upper(np.array([events]), np.array([many]), 0.95)[0] * many
    assert poisson_upper(np.array(events), 0.95) == pytest.approx(binomial, rel=1e-4)
