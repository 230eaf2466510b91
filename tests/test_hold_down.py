"""A server that comes and goes is left out for longer each time, if the others have what it has."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimmoe.core.specs import BoolArray
from trimmoe.runtime.node.watch.hold_down import LONGEST_HOLD_S, RECENT_S, HoldDown

SERVERS = 3
EVERYWHERE = np.ones((SERVERS, 2, 4), dtype=bool)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def flapped(hold: HoldDown, times: int, server: int = 2) -> list[float]:
    """Lost and back so many times at one moment; for how long it is left out each time."""
    holds_s = []
    for _ in range(times):
        hold.went(server)
        holds_s.append(hold.came(server))
    return holds_s


def test_the_first_return_is_believed_at_once_and_each_that_follows_later() -> None:
    hold = HoldDown(EVERYWHERE, Clock())
    assert flapped(hold, 7) == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, LONGEST_HOLD_S]


def test_it_is_left_out_until_its_time_is_over() -> None:
    clock = Clock()
    hold = HoldDown(EVERYWHERE, clock)
    (_, hold_s) = flapped(hold, 2)
    assert hold.held(frozenset()) == {2}
    clock.now_s += hold_s
    assert hold.held(frozenset()) == set()


def test_losses_are_forgotten() -> None:
    clock = Clock()
    hold = HoldDown(EVERYWHERE, clock)
    flapped(hold, 5)
    clock.now_s += RECENT_S
    assert flapped(hold, 2) == [0.0, 0.5]


def test_one_that_is_lost_is_not_held_as_well() -> None:
    hold = HoldDown(EVERYWHERE, Clock())
    flapped(hold, 3)
    assert hold.held(frozenset({2})) == set()


def test_one_that_nobody_can_stand_in_for_is_used_at_once() -> None:
    hosts = EVERYWHERE.copy()
    hosts[:2, 1, 3] = False
    hold = HoldDown(hosts, Clock())
    flapped(hold, 3)
    assert hold.held(frozenset()) == set()


@given(
    hosts=st.lists(st.booleans(), min_size=SERVERS * 8, max_size=SERVERS * 8),
    flaps=st.lists(st.integers(0, SERVERS - 1), max_size=12),
    lost=st.frozensets(st.integers(0, SERVERS - 1)),
)
def test_no_expert_loses_its_last_host(
    hosts: list[bool], flaps: list[int], lost: frozenset[int]
) -> None:
    where: BoolArray = np.array(hosts).reshape(SERVERS, 2, 4)
    hold = HoldDown(where, Clock())
    for server in flaps:
        flapped(hold, 1, server)
    held = hold.held(lost)
    assert not held & lost

    np.testing.assert_array_equal(
        np.delete(where, sorted(lost | held), axis=0).any(axis=0),
        np.delete(where, sorted(lost), axis=0).any(axis=0),
    )


@pytest.mark.parametrize("other", [0, 1])
def test_of_two_that_can_only_spare_each_other_one_stays(other: int) -> None:
    hosts = EVERYWHERE.copy()
    hosts[1 - other] = False
    hold = HoldDown(hosts, Clock())
    flapped(hold, 2)
    flapped(hold, 2, server=other)
    assert len(hold.held(frozenset())) == 1
