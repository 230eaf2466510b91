"""Emulated computing: what a batch is made to take, and what does not wait for it."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes import answers, read, request, running, tokens_of, world
from serving import Tiny
from trimmoe.core.specs import BATCHES, straight_times
from trimmoe.cost.batching import batch_s, row_share
from trimmoe.runtime.node.compute import pace as pace_module
from trimmoe.runtime.node.compute.pace import EmulatedPace, Pace
from trimmoe.runtime.node.records.messages import Dispatch, Onward, Parcel
from wires import until


class Clock:
    """Time that only passes by being slept through, or by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pace_module, "time", clock)
    return clock


def emulated(batch_share: float) -> EmulatedPace:
    return EmulatedPace(
        dense_s=np.array([1.0, 2.0]),
        expert_s=np.array([[3.0, 5.0, 7.0], [10.0, 20.0, 40.0]]),
        guess_s=60.0,
        batch_times=straight_times(batch_share),
        guess_times=straight_times(batch_share / 2),
    )


def test_one_row_takes_what_the_cost_model_says_and_weights_are_read_once() -> None:
    assert batch_s(4.0, 1, straight_times(0.9)) == pytest.approx(4.0)
    assert batch_s(4.0, 8, straight_times(1.0)) == pytest.approx(4.0)
    assert batch_s(4.0, 8, straight_times(0.0)) == pytest.approx(32.0)


@given(st.floats(0.0, 1.0), st.floats(1.0, 1000.0))
def test_without_a_bend_between_sizes_or_beyond_them_a_batch_has_a_share_once(
    share: float, rows: float
) -> None:
    expected_s = 2.0 * (share + (1.0 - share) * rows)
    assert batch_s(2.0, rows, straight_times(share)) == pytest.approx(expected_s)
    assert row_share(straight_times(share)) == pytest.approx(1.0 - share, abs=1e-12)


def test_a_batch_takes_what_was_measured_and_what_lies_between() -> None:
    """A second row is dear, the next ones are not, and of many each takes its time."""
    times = (1.0, 1.3, 1.5, 1.9, 6.1, 27.7)
    measured = [batch_s(10.0, rows, times) for rows in BATCHES]
    assert measured == pytest.approx([10.0, 13.0, 15.0, 19.0, 61.0, 277.0])
    between = [batch_s(10.0, rows, times) for rows in (1.5, 3, 20, 80, 224)]
    assert between == pytest.approx([11.5, 14.0, 40.0, 169.0, 493.0])
    assert row_share(times) == pytest.approx(0.9 / 7)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_batch_lasts_until_the_emulated_machine_would_be_done(clock: Clock, share: float) -> None:
    pace, times = emulated(share), straight_times(share)
    pace.begin()
    clock.now_s += 0.25  # Spent computing; not on top of the emulated time.
    pace.dense(1, rows=3)
    assert clock.now_s - 100.0 == pytest.approx(batch_s(2.0, 3, times))
    pace.experts(1, np.array([[0, -1], [2, 0], [-1, -1]]))
    experts_s = batch_s(10.0, 2, times) + batch_s(40.0, 1, times)
    assert clock.now_s - 100.0 == pytest.approx(batch_s(2.0, 3, times) + experts_s)


def test_a_guess_takes_the_emulated_machine_a_while_in_every_layer(clock: Clock) -> None:
    pace = emulated(0.5)
    pace.begin()
    pace.guess(rows=2)
    assert clock.now_s - 100.0 == pytest.approx(batch_s(60.0, 2, straight_times(0.25)))


def test_a_machine_that_was_too_slow_for_a_step_catches_up_in_the_next(clock: Clock) -> None:
    pace = emulated(0.9)
    pace.begin()
    clock.now_s += 2.5
    pace.dense(0, rows=1)
    pace.experts(0, np.array([[1]]))
    assert clock.now_s - 100.0 == pytest.approx(1.0 + 5.0)


async def test_dispatches_leave_before_the_own_slots_are_computed(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And every answer is what it is without."""
    profile, plan = world(tiny, servers=3)
    asked = [(server, request([7, 60 + server, 9], new=4)) for server in range(3)]
    story: list[tuple[str, str]] = []

    def noted(self: Pace, layer: int, experts: np.ndarray) -> None:
        del layer
        if (experts >= 0).any():
            story.append((worker[id(self)], "own slots"))

    monkeypatch.setattr(Pace, "experts", noted)
    async with running(tiny, profile=profile, plan=plan) as servers:
        worker = {id(node.worker.pace): str(index) for index, node in servers.nodes.items()}
        for index, node in servers.nodes.items():
            await until(partial(getattr, node.worker, "send"))
            send = node.worker.send
            assert send is not None

            def sent(parcels: list[Parcel], name: str = str(index), send=send) -> None:
                kinds = {type(parcel.message) for parcel in parcels}
                assert kinds <= {Dispatch, Onward}
                if Dispatch in kinds:
                    story.append((name, "dispatch"))
                send(parcels)

            node.worker.send = sent
        early = [tokens_of(events) for events in await answers(servers, asked)]
        followed = [
            [what for who, what in story if who == name] for name in dict.fromkeys(worker.values())
        ]
        assert any(pair == ("dispatch", "own slots") for one in followed for pair in pairwise(one))
        for node in servers.nodes.values():
            node.worker.send = None
        streams = [servers.nodes[access].service.submit(one) for access, one in asked]
        late = await asyncio.gather(*(read(stream) for stream in streams))
    assert early == [tokens_of(events) for events in late]
