"""Runs in which tokens set out on drafts or on guesses: neither bookkeeping nor chance makes a
difference that it should not make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulated import World, slowed, unchanging, world
from trimmoe.simulator.settings import Load


def often_wrong(**changes: Any) -> World:
    """Drafts."""
    policy: dict[str, Any] = unchanging() | {"draft_confidence": 0.2}
    return world(layers=6, **(policy | changes))


def steered(**changes: Any) -> World:
    """Drafts again, with feedback."""
    return world(draft_confidence=0.3, **changes)


def guessed(**changes: Any) -> World:
    return world("speculative", layers=5, **changes)


@pytest.mark.parametrize(
    ("make", "output_tokens"), [(often_wrong, 4), (guessed, 6)], ids=["drafts", "guesses"]
)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**31), servers=st.integers(2, 5))
def test_when_rows_are_used_again_makes_no_difference(
    make: Callable[..., World], output_tokens: int, seed: int, servers: int
) -> None:
    """Also not those of what is withdrawn, some of which never sets out or is still under way when
    the token it follows is forgotten."""
    one = make(seed=seed, servers=servers)
    slow = replace(one, engine=slowed(one.engine, 300.0))
    load = Load(concurrency=12, output_tokens=output_tokens, prompt_tokens=3, prefill_chunk=2)
    often, once = (slow.run(load, duration_s=2.0, control_s=each) for each in (0.02, 50.0))
    np.testing.assert_array_equal(often.all_units.finished_s, once.all_units.finished_s)
    np.testing.assert_array_equal(often.all_units.expected_s, once.all_units.expected_s)
    np.testing.assert_array_equal(often.after.served, once.after.served)
    np.testing.assert_array_equal(often.after.sent, once.after.sent)


@pytest.mark.parametrize("make", [steered, guessed], ids=["drafts", "guesses"])
def test_the_same_seed_gives_the_same_run_and_another_seed_another(
    make: Callable[..., World],
) -> None:
    load, one = Load(rate_per_s=30.0, output_tokens=5, prompt_tokens=3), make()
    first, again, other = (one.run(load, duration_s=4.0, seeds=(seed,)) for seed in (1, 1, 2))
    anew = make().run(load, duration_s=4.0, seeds=(1,))
    assert first.wrong_drafts > 10
    for same in (again, anew):
        np.testing.assert_array_equal(first.token_s, same.token_s)
        np.testing.assert_array_equal(first.after.sent, same.after.sent)
        assert first.withdrawn_layers == same.withdrawn_layers
    assert first.token_s.size != other.token_s.size or (first.token_s != other.token_s).any()
