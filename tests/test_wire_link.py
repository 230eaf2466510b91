"""The state machine of a link and its estimates, without a network: times are passed in."""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Sequence
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import factories
from trimmoe.runtime.wire import emulation
from trimmoe.runtime.wire.base import Arrived, Dropped, Frame, PeerDown, PeerUnreachable, PeerUp
from trimmoe.runtime.wire.emulation import EmulatedCarrier, EmulatedLink, LinkQueue, links_of
from trimmoe.runtime.wire.estimates import (
    LatenessMeter,
    LinkEstimator,
    RecentLeast,
    RunningAverage,
    TrainMeter,
)
from trimmoe.runtime.wire.link import Link, LinkSettings
from trimmoe.runtime.wire.protocol import Envelope

SETTINGS = LinkSettings(window_messages=4, window_bytes=100)
SIZE_BYTES = 10


def link(name: str, peer: str, sessions: count) -> Link:
    return Link(
        name=name, peer=peer, settings=SETTINGS, new_session=lambda previous: next(sessions)
    )


def kinds(*links: Link) -> list[str]:
    """What the links reported so far, taken out."""
    seen = [type(change).__name__ for each in links for change in each.changes]
    for each in links:
        each.changes.clear()
    return seen


def pair() -> tuple[Link, Link]:
    """Two links that are up with each other."""
    sessions = count(1)
    left, right = link("a", "b", sessions), link("b", "a", sessions)
    greet(left, right)
    assert kinds(left, right) == ["PeerUp", "PeerUp"]
    return left, right


def greet(left: Link, right: Link, now_s: float = 0.0) -> None:
    """Exchange beats until both know each other's present session."""
    for _ in range(3):
        right.hear(left.beat(now_s), SIZE_BYTES, now_s)
        left.hear(right.beat(now_s), SIZE_BYTES, now_s)


def sent(source: Link, now_s: float = 0.0) -> Envelope:
    source.check_room(SIZE_BYTES)
    envelope = source.message(now_s)
    source.sent(SIZE_BYTES)
    return envelope


def test_hearing_is_not_enough_to_be_up() -> None:
    sessions = count(1)
    left, right = link("a", "b", sessions), link("b", "a", sessions)
    left.hear(right.beat(0.0), SIZE_BYTES, 0.0)
    assert not left.up
    with pytest.raises(PeerUnreachable, match="not up"):
        left.check_room(SIZE_BYTES)
    right.hear(left.beat(0.0), SIZE_BYTES, 0.0)
    assert right.up


def test_silence_cuts_the_link_and_counts_what_is_lost() -> None:
    left, right = pair()
    right.hear(sent(left), SIZE_BYTES, 0.0)
    right.consume(SIZE_BYTES)
    left.hear(right.beat(0.0), SIZE_BYTES, 0.0)
    sent(left)
    sent(left)
    left.tick(SETTINGS.silence_s)
    assert left.up
    left.tick(SETTINGS.silence_s + 0.01)
    (change,) = left.changes
    assert isinstance(change, PeerDown)
    assert change.lost_messages == 2


def test_own_absence_is_not_the_peers_silence() -> None:
    left, _ = pair()
    left.excuse(10.0)
    left.tick(10.0)
    assert left.up


def test_a_cut_on_one_side_cuts_the_other_and_both_recover() -> None:
    left, right = pair()
    late = sent(right)
    left.cut("for a test")
    assert not left.hear(late, SIZE_BYTES, 0.0)
    greet(left, right)
    assert kinds(left) == ["PeerDown", "PeerUp"]
    assert kinds(right) == ["PeerDown", "PeerUp"]
    assert left.hear(sent(right), SIZE_BYTES, 0.0)


@pytest.mark.parametrize("notice", ["the next message", "a beat"])
def test_a_lost_message_cuts_the_link(notice: str) -> None:
    left, right = pair()
    sent(left)
    envelope = left.beat(0.0) if notice == "a beat" else sent(left)
    assert not right.hear(envelope, SIZE_BYTES, 0.0)
    assert kinds(right) == ["PeerDown"]


def test_a_restarted_peer_is_found_and_old_messages_to_it_are_void() -> None:
    left, _ = pair()
    sent(left)
    in_flight = sent(left)
    restarted = link("b", "a", count(100))
    assert not restarted.hear(in_flight, SIZE_BYTES, 0.0)
    greet(left, restarted)
    assert kinds(left) == ["PeerDown", "PeerUp"]
    assert kinds(restarted) == ["PeerUp"]


def test_a_peer_restarted_with_an_earlier_clock_is_found_after_the_silence() -> None:
    sessions = count(100)
    left, right = link("a", "b", sessions), link("b", "a", sessions)
    greet(left, right)
    restarted = link("b", "a", count(1))
    later_s = SETTINGS.silence_s + 1.0
    assert not left.hear(restarted.beat(later_s), SIZE_BYTES, later_s)
    left.tick(later_s)
    greet(left, restarted, later_s)
    assert left.up
    assert restarted.up


def test_the_window_is_bounded_in_messages_and_in_bytes() -> None:
    left, _ = pair()
    for _ in range(SETTINGS.window_messages):
        sent(left)
    with pytest.raises(PeerUnreachable, match="full"):
        left.check_room(1)
    left, right = pair()
    left.check_room(10 * SETTINGS.window_bytes)  # one message may be of any size
    left.sent(SETTINGS.window_bytes)
    with pytest.raises(PeerUnreachable, match="full"):
        left.check_room(1)
    assert right.up


@pytest.mark.parametrize("size_bytes", [1, SETTINGS.window_bytes // 2])
def test_what_is_consumed_makes_room_before_the_window_is_full(size_bytes: int) -> None:
    left, right = pair()
    for _ in range(3 * SETTINGS.window_messages):
        left.check_room(size_bytes)
        envelope = left.message(0.0)
        left.sent(size_bytes)
        assert right.hear(envelope, size_bytes, 0.0)
        right.consume(size_bytes)
        if right.answer_due:
            left.hear(right.beat(0.0), SIZE_BYTES, 0.0)
    assert kinds(left, right) == []
    assert not right.answer_due


def test_a_peer_that_ignores_the_window_is_cut() -> None:
    left, right = pair()
    for _ in range(SETTINGS.window_messages):
        assert right.hear(sent(left), SIZE_BYTES, 0.0)
    assert not right.hear(left.message(0.0), SIZE_BYTES, 0.0)
    assert kinds(right) == ["PeerDown"]


@given(st.lists(st.sampled_from("aabb<><>!lrt"), max_size=60))
def test_whatever_happens_order_holds_between_cuts_and_the_link_recovers(script: str) -> None:
    """a, b: send; <, >: deliver one; !: lose one; l, r: consume; t: time passes.

    Messages delivered between two changes are those sent since the peer's `PeerUp`, from the first
    on, without a gap; at the end the two find each other again.
    """
    left, right = pair()
    wires: dict[str, deque[Envelope]] = {"a": deque(), "b": deque()}
    ends = {"a": left, "b": right}
    expected = {"a": 1, "b": 1}
    now_s = 0.0
    for step in script:
        if step in "ab":
            try:
                wires[step].append(sent(ends[step], now_s))
            except PeerUnreachable:
                wires[step].append(ends[step].beat(now_s))
        elif step in "<>!":
            source = "a" if step == ">" else "b"
            if wires[source]:
                envelope = wires[source].popleft()
                receiver = ends["b" if source == "a" else "a"]
                if step == "!":
                    continue
                accepted = receiver.hear(envelope, SIZE_BYTES, now_s)
                if any(isinstance(change, PeerUp) for change in receiver.changes):
                    expected[source] = 1
                receiver.changes.clear()
                if accepted and not envelope.is_beat:
                    assert envelope.sequence == expected[source]
                    expected[source] += 1
                    receiver.consume(SIZE_BYTES)
        elif step == "t":
            now_s += 0.9
            left.tick(now_s)
            right.tick(now_s)
    wires["a"].clear()
    wires["b"].clear()
    greet(left, right, now_s)
    greet(left, right, now_s)
    assert left.up
    assert right.up
    assert right.hear(sent(left), SIZE_BYTES, now_s)


def test_running_averages_follow_time_not_the_number_of_samples() -> None:
    average = RunningAverage(half_life_s=1.0)
    assert average.mean is None
    for _ in range(3):
        average.add(1.0, 0.0)
    average.add(5.0, 10.0)
    assert average.mean == pytest.approx(5.0, rel=0.01)
    average.add(7.0, 10.0)
    assert average.mean == pytest.approx(6.0, rel=0.01)


def test_round_trips_that_cannot_be_are_ignored() -> None:
    estimator = LinkEstimator(peer="b")
    for nonsense in (-1.0, math.nan, math.inf, 1e9):
        estimator.round_trip(nonsense, 0.0)
    assert estimator.estimate().round_trip_s is None
    estimator.round_trip(0.02, 0.0)
    estimate = estimator.estimate()
    assert (estimate.round_trip_s, estimate.delay_s) == (0.02, 0.01)
    assert estimate.samples == 1


BEATS_S = np.arange(0.0, 20.0, 0.25)


@given(st.lists(st.tuples(st.floats(0.0, 8.0), st.floats(-5.0, 5.0)), min_size=1, max_size=40))
def test_the_recent_least_is_that_of_a_window(samples: list[tuple[float, float]]) -> None:
    recent, now_s, seen = RecentLeast(window_s=10.0), 0.0, []
    for pause_s, value in samples:
        now_s += pause_s
        recent.add(value, now_s)
        seen.append((now_s, value))
        assert recent.least == min(v for at_s, v in seen if at_s >= now_s - 10.0)


def test_a_busy_process_makes_no_link_longer() -> None:
    """Nine beats in ten are read 50 ms late; the link has a round trip of 4 ms throughout."""
    estimator = LinkEstimator(peer="b")
    for index, now_s in enumerate(BEATS_S.tolist()):
        estimator.round_trip(0.004 + 0.05 * (index % 10 != 0), now_s)
    estimate = estimator.estimate()
    assert estimate.delay_s == 0.002
    assert estimate.round_trip_s is not None
    assert estimate.round_trip_s > 0.04


def test_a_link_that_becomes_slow_is_measured_anew_within_the_window() -> None:
    estimator = LinkEstimator(peer="b")
    for now_s in BEATS_S.tolist():
        estimator.round_trip(0.004 if now_s < 8.0 else 0.1, now_s)
    assert estimator.estimate().delay_s == 0.05
    estimator.round_trip(0.02, 20.0)
    assert estimator.estimate().delay_s == 0.01, "what becomes quicker is believed at once"


@pytest.mark.parametrize("clocks_differ_s", [-1e6, 0.0, 3.25])
def test_lateness_is_what_beats_took_beyond_the_way(clocks_differ_s: float) -> None:
    meter = LatenessMeter()
    assert meter.mean_s is None
    for index, sent_s in enumerate(BEATS_S.tolist()):
        late_s = 0.03 * (index % 2)
        meter.read(sent_s=sent_s + clocks_differ_s, now_s=sent_s + 0.02 + late_s)
    assert meter.mean_s == pytest.approx(0.015, abs=1e-3)


def test_a_peers_nonsensical_clock_does_not_stay() -> None:
    meter = LatenessMeter(half_life_s=1.0)
    for nonsense in (math.nan, math.inf, -math.inf):
        meter.read(sent_s=nonsense, now_s=0.0)
    assert meter.mean_s is None
    meter.read(sent_s=1e12, now_s=0.0)
    for sent_s in BEATS_S.tolist():
        meter.read(sent_s=sent_s, now_s=sent_s + 0.02)
    assert meter.mean_s == pytest.approx(0.0, abs=0.1)


def test_bandwidth_is_read_from_gaps_that_the_link_made() -> None:
    meter = TrainMeter(smallest_bytes=1000)
    meter.arrived(size_bytes=2000, sent_s=0.0, now_s=100.0)
    meter.arrived(size_bytes=2000, sent_s=0.001, now_s=100.02)  # 2000 bytes in 20 ms
    meter.arrived(size_bytes=2000, sent_s=1.0, now_s=101.02)  # sent as far apart as it came
    meter.arrived(size_bytes=10, sent_s=1.0001, now_s=101.03)  # too small
    assert meter.count == 1
    assert meter.rate_bytes_per_s == pytest.approx(100_000)
    estimator = LinkEstimator(peer="b")
    estimator.bandwidth(meter.rate_bytes_per_s, meter.count, 0.0)
    estimator.bandwidth(1.0, meter.count, 5.0)  # told again, not measured again
    assert estimator.estimate().bandwidth_bytes_per_s == pytest.approx(100_000)


def test_one_late_look_does_not_spoil_the_bandwidth() -> None:
    meter = TrainMeter(smallest_bytes=1000)
    now_s = 0.0
    for index in range(9):
        now_s += 5.0 if index == 4 else 0.01
        meter.arrived(size_bytes=1000, sent_s=index * 1e-4, now_s=now_s)
    assert meter.rate_bytes_per_s == pytest.approx(100_000)


@given(
    st.lists(st.tuples(st.floats(0.0, 0.1), st.integers(1, 5000)), min_size=1, max_size=30),
    st.floats(0.0, 0.5),
    st.integers(0, 2**32 - 1),
)
def test_an_emulated_link_keeps_order_delay_and_bandwidth(
    sends: list[tuple[float, int]], jitter_share: float, seed: int
) -> None:
    emulated = EmulatedLink(delay_s=0.02, bandwidth_bytes_per_s=50_000.0, jitter_share=jitter_share)
    queue = LinkQueue(link=emulated, rng=np.random.default_rng(seed))
    now_s, arrived = 0.0, []
    sent_at = []
    for index, (pause_s, size_bytes) in enumerate(sends):
        now_s += pause_s
        sent_at.append(now_s)
        queue.put([index.to_bytes(2, "big"), bytes(size_bytes - 1)], now_s)
    while len(queue):
        due_s = queue.due_s()
        frames = queue.take(due_s)
        assert frames is not None
        arrived.append((due_s, int.from_bytes(frames[0], "big"), len(frames[1]) + 1))
    assert [index for _, index, _ in arrived] == list(range(len(sends)))
    free_s = 0.0
    for due_s, index, size_bytes in arrived:
        free_s = max(free_s, sent_at[index]) + (size_bytes + 1) / 50_000.0
        earliest_s = free_s + 0.02
        assert due_s >= earliest_s - 1e-9
        assert due_s <= earliest_s + 0.02 * jitter_share + 1e-9 or jitter_share > 0
    if jitter_share == 0:
        assert arrived[-1][0] == pytest.approx(free_s + 0.02)


def test_a_stalled_link_delivers_in_order_afterwards() -> None:
    emulated = EmulatedLink(delay_s=0.01, bandwidth_bytes_per_s=math.inf)
    queue = LinkQueue(link=emulated, rng=np.random.default_rng(0))
    queue.put([b"1"], 0.0)
    queue.stall(10.0)
    queue.put([b"2"], 5.0)
    assert queue.take(9.9) is None
    assert queue.take(10.0) == [b"1"]
    assert queue.take(10.0) == [b"2"]
    assert queue.due_s() == math.inf


def test_links_to_a_server_are_its_column_of_the_cluster() -> None:
    cluster = factories.random_cluster(np.random.default_rng(3), servers=3, symmetric=False)
    links = links_of(cluster, "s1", jitter_share=0.1)
    assert set(links) == {"s0", "s2"}
    assert links["s2"].delay_s == cluster.delay_s[2, 1]
    assert links["s2"].bandwidth_bytes_per_s == cluster.bandwidth_bytes_per_s[2, 1]
    assert links["s0"].jitter_share == 0.1


class Standing:
    """A carrier of which only the name is asked, and what is posted is kept."""

    name, address = "b", "nowhere"

    def __init__(self) -> None:
        self.posted: list[tuple[str, list[bytes]]] = []

    async def start(self, arrived: Arrived, dropped: Dropped) -> None:
        self.come = arrived

    def connect(self, peer: str, address: str) -> None: ...

    def post(self, peer: str, frames: Sequence[Frame]) -> bool:
        self.posted.append((peer, [bytes(frame) for frame in frames]))
        return True

    def reset(self, peer: str) -> None: ...

    async def close(self) -> None: ...


async def test_an_emulated_link_holds_back_where_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sends is not waited for; nor is what comes late on its own account held longer."""
    now_s = 100.0
    monkeypatch.setattr(emulation, "time", SimpleNamespace(monotonic=lambda: now_s))
    link = EmulatedLink(delay_s=30.0, bandwidth_bytes_per_s=math.inf)
    inner, came, dropped = Standing(), list[tuple[str | None, list[bytes]]](), list[str]()
    carrier = EmulatedCarrier(inner, {"a": link})
    await carrier.start(
        lambda origin, frames: came.append((origin, [bytes(frame) for frame in frames])),
        dropped.append,
    )
    assert carrier.post("a", [b"head", b"body"])
    ((peer, (stamp, *frames)),) = inner.posted
    assert (peer, frames) == ("a", [b"head", b"body"])

    def of(sender: str, sent_s: float) -> bytes:
        return stamp[:-1].replace(struct.pack("<d", 100.0), struct.pack("<d", sent_s)) + (
            sender.encode()
        )

    inner.come(None, [of("c", 100.0), b"no link"])
    inner.come("a", [of("a", 100.0), b"1"])
    now_s = 129.0
    inner.come(None, [of("a", 129.0), b"2"])
    assert came == [(None, [b"no link"])]
    now_s = 131.0
    inner.come("a", [of("a", 130.0), b"3"])
    assert came[1:] == [("a", [b"1"])], "and no sooner what was sent later"
    now_s = 165.0
    # By the clock of another machine: it is taken to have been sent when it came.
    inner.come("a", [of("a", 1e6), b"4"])
    inner.come("a", [b"short", b"5"])
    assert came[2:] == [("a", [b"2"]), ("a", [b"3"])]
    now_s = 196.0
    inner.come("a", [of("a", 196.0), b"6"])
    assert came[4:] == [("a", [b"4"])]
    assert dropped == ["not from an emulated link"]
    await carrier.close()
