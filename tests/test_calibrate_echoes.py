"""What exits do to later tokens, counted by calibration, against really decoding with exits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tiny import LAYERS, write_tiny_checkpoint
from trimmoe.calibrate.curves import clopper_pearson_upper
from trimmoe.calibrate.echoes import flipped_by_exits, poisson_upper
from trimmoe.calibrate.head import greedy
from trimmoe.calibrate.windows import Windows, run_layer
from trimmoe.core.profile import EXIT_STATES, ExitState
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
def _decoded(
    view: MoEView, ids: np.ndarray, exit_layer: np.ndarray, state: ExitState = ExitState.DENSE
) -> np.ndarray:
    """Predictions after every token, decoded one by one; those that exit leave `state`."""
    cache, predicted = view.new_cache(slots=1), []
    slot = cache.alloc()
    for position, (token, leaves) in enumerate(zip(ids, exit_layer, strict=True)):
        batch = view.batch(cache, [slot], [range(position, position + 1)])
        hidden = view.embed(torch.tensor([[token]]), batch)
        for layer in range(leaves):
            flat = batch.pack(view.attend(layer, hidden, batch, cache))
            routing = view.route(layer, flat)
            hidden = batch.unpack(run_layer(view, layer, flat, routing, routing.experts))
        predicted.append(int(greedy(view, batch.pack(hidden))[0]))
        for layer in range(leaves, LAYERS):
            if state is ExitState.FROZEN:
                view.propagate(layer, hidden, batch, cache)
            else:
                flat = batch.pack(view.attend(layer, hidden, batch, cache))
                passed = view.finish(layer, flat, view.shared(layer, flat), None)
                hidden = batch.unpack(passed)
    return np.array(predicted)


@pytest.mark.parametrize("state", EXIT_STATES)
def test_echoes_are_what_decoding_with_exits_really_flips(
    view: MoEView, windows: Windows, state: ExitState
) -> None:
    rng = np.random.default_rng(7)
    shape = windows.ids.shape
    layer = np.where(rng.random(shape) < 0.3, rng.integers(1, LAYERS, size=shape), LAYERS)
    whole = np.full(shape, LAYERS)
    exact = np.stack([_decoded(view, *pair) for pair in zip(windows.ids, whole, strict=True)])
    pairs = zip(windows.ids, layer, strict=True)
    really = np.stack([_decoded(view, *pair, state=state) for pair in pairs])
    frozen = np.full(layer.size, state is ExitState.FROZEN)
    flipped = flipped_by_exits(
        view, windows, layer.ravel(), exact.ravel(), lambda _: None, frozen=frozen
    )
    assert flipped.any()
    assert np.array_equal(flipped, ((really != exact) & (layer == LAYERS)).ravel())


def test_windows_that_share_a_sweep_do_not_see_one_another(view: MoEView, windows: Windows) -> None:
    """As those of the two thresholds do, and of both states, the same text with other exits."""
    rng, tokens = np.random.default_rng(8), windows.tokens
    frozen = np.repeat([False, True], tokens)
    layers = rng.integers(1, LAYERS + 1, size=(2, tokens))
    expected = rng.integers(0, 250, size=(2, tokens))
    expected[:, ::2] = _predicted(view, windows)[::2]
    both = windows.take(np.tile(np.arange(windows.count), 2))
    found = flipped_by_exits(
        view, both, layers.ravel(), expected.ravel(), lambda _: None, frozen=frozen
    )
    rows = zip(layers, expected, found.reshape(2, -1), frozen.reshape(2, -1), strict=True)
    for layer, own, flips, still in rows:
        alone = flipped_by_exits(view, windows, layer, own, lambda _: None, frozen=still)
        assert np.array_equal(flips, alone)
        assert 0 < flips.sum() < tokens


def _predicted(view: MoEView, windows: Windows) -> np.ndarray:
    return torch.cat(exact_logits(view, windows.ids.tolist())).argmax(dim=1).numpy()


def test_nothing_flips_where_nothing_exits(view: MoEView, windows: Windows) -> None:
    whole = np.full(windows.ids.shape, LAYERS)
    exact = np.stack([_decoded(view, *pair) for pair in zip(windows.ids, whole, strict=True)])
    for still in (False, True):
        frozen = np.full(whole.size, still)
        flipped = flipped_by_exits(
            view, windows, whole.ravel(), exact.ravel(), lambda _: None, frozen=frozen
        )
        assert not flipped.any()


@pytest.mark.parametrize("events", [0, 3, 40])
def test_the_bound_of_a_count_is_the_binomial_one_of_a_rare_event(events: int) -> None:
    many = 10_000_000
    binomial = clopper_pearson_upper(np.array([events]), np.array([many]), 0.95)[0] * many
    assert poisson_upper(np.array(events), 0.95) == pytest.approx(binomial, rel=1e-4)
