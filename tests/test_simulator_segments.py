"""The simulator takes tokens through many layers at a time where nothing is decided, to the same
end as one by one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulated import LENGTH, World, world
from trimmoe.core.events import TokensImported
from trimmoe.engine.guesses import DraftsAlong
from trimmoe.simulator import ahead, journey
from trimmoe.simulator.feed import TraceFeed
from trimmoe.simulator.journey import TRAVELLING, Itinerary, pass_layers
from trimmoe.simulator.settings import Load

SETTLES = ["auto", "exact", "speculative", "trimming", "guessing"]


def of(preset: str, seed: int, layers: int) -> World:
    """A world whose policy leaves nothing to decide where experts are where the token is."""
    return world(preset, seed=seed, layers=layers, servers=3)


def by_layer(engine, state, wave, feed, tokens, last) -> Itinerary:  # pyright: ignore
    """The journey as of policies that decide upon every layer."""
    blank = Itinerary.blank(tokens.size, engine.cost.layer_count, feed.trace.experts.shape[2])
    event = TokensImported(wave=TRAVELLING, tokens=wave, executing=False)
    return pass_layers(engine, state, event, wave, feed, tokens, last, blank)


@given(
    seed=st.integers(0, 200), layers=st.integers(1, 7), count=st.integers(1, 5),
    preset=st.sampled_from(SETTLES),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_journeys_are_those_of_one_layer_at_a_time(
    seed: int, layers: int, count: int, preset: str
) -> None:
    one = of(preset, seed, layers)
    assert one.engine.settled is not None
    asked: dict[str, Any] = {"feed": TraceFeed(trace=one.trace), "engine": one.engine}
    rng, found = np.random.default_rng(seed), []
    access = rng.integers(0, one.engine.cost.server_count, count)
    tokens = rng.integers(0, one.trace.token_count, count)
    for way in (journey.travel, by_layer):
        asked["along"] = DraftsAlong.none(one.engine.cost.server_count)
        states = ahead.Ahead(seed=seed, budget=0.05, confidence=0.9, streams=count, **asked)
        for request, server in enumerate(access.tolist()):
            states.open(request, server)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ahead, "travel", way)
            numbers, last = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=bool)
            found.append(
                states.decide(np.arange(count), numbers, tokens, tokens, last, prompted=last)
            )
    once, one_by_one = map(asdict, found)
    np.testing.assert_equal(once, one_by_one)


def test_a_whole_run_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    one, load = of("exact", 3, 6), Load(rate_per_s=2.0, output_tokens=float(LENGTH))
    once = one.run(load, duration_s=20.0)
    monkeypatch.setattr(ahead, "travel", by_layer)
    again = one.run(load, duration_s=20.0)
    assert once.token_s.size > 0
    assert np.array_equal(once.token_s, again.token_s)


def test_policies_that_decide_upon_every_layer_travel_as_before() -> None:
    assert of("trimmoe", 0, 4).engine.settled is None
