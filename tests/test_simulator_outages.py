"""Servers that stand still: whoever needs them waits for as long, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulated import unchanging, world
from test_simulator_queues import SERVICE_S, one_queue, single_tokens
from trimmoe.core.errors import UserError
from trimmoe.simulator.settings import Load, SimulationSettings


def test_who_comes_in_an_outage_is_served_once_it_is_over() -> None:
    """A token every 0.1 s; from 20 s on the only server stands still for 2 s."""
    sample = one_queue().run(
        single_tokens(0.1, burstiness=0.0),
        duration_s=30.0,
        max_batch=1,
        outage_every_s=20.0,
        outage_s=2.0,
    )
    finished_s = sample.all_units.finished_s
    assert not ((finished_s > 20.0 + SERVICE_S) & (finished_s < 22.0)).any()
    # Twenty-odd have come meanwhile and are served one by one, while others come.
    assert np.isclose(finished_s, 22.0 + SERVICE_S).any()
    waited = sample.token_s > SERVICE_S * 1.001
    assert 20 <= waited.sum() <= 25
    assert sample.token_s.max() == pytest.approx(2.0 + SERVICE_S, abs=0.1)


def test_outages_of_one_server_come_one_behind_the_other() -> None:
    """Every 5 s one of 8 s: the only server is behind more and more, and nothing is lost."""
    load = single_tokens(0.1, burstiness=0.0, requests=150)
    sample = one_queue().run(load, duration_s=40.0, max_batch=1, outage_every_s=5.0, outage_s=8.0)
    # Outages from 5, 10 and 15 s on end at 13, 21 and 29 s; later ones find what is left.
    finished_s = sample.all_units.finished_s
    assert not ((finished_s > 5.0 + SERVICE_S) & (finished_s < 13.0)).any()
    assert sample.request_s.size < 150


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(["exact", "trimmoe", "speculative"]), st.integers(0, 5))
def test_nothing_is_lost_nor_decided_otherwise(preset: str, seed: int) -> None:
    one = world(preset, seed=seed, **(unchanging() if preset == "trimmoe" else {}))
    load = Load(rate_per_s=2.0, requests=20, prompt_tokens=6, output_tokens=8)
    calm, rough = (
        one.run(load, duration_s=2000.0, seeds=(seed,), **changes)
        for changes in ({}, {"outage_every_s": 3.0, "outage_s": 2.0})
    )
    assert rough.request_s.size == calm.request_s.size == 20
    assert rough.output_tokens == calm.output_tokens
    assert rough.request_s.sum() > calm.request_s.sum()
    if preset != "speculative":
        # What follows guesses depends on when they are known to be right.
        assert rough.ledger.loss == pytest.approx(calm.ledger.loss)


def test_outages_that_cannot_be_are_refused() -> None:
    load = Load(rate_per_s=1.0)
    for every_s, lasts_s in ((0.0, 10.0), (5.0, 0.0)):
        with pytest.raises(UserError, match="Outages last longer"):
            SimulationSettings(load=load, outage_every_s=every_s, outage_s=lasts_s)
