"""Places in the KV cache, and remembering whose work a lost link takes along."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import torch
from torch import Tensor

from trimmoe.models.cache import KVCache
from trimmoe.runtime.node.compute import run_batch as run_batch_module
from trimmoe.runtime.node.compute.pace import Pace
from trimmoe.runtime.node.outbox import Outbox
from trimmoe.runtime.node.records.messages import (
    ANY_POSITION,
    Lost,
    Message,
    Parcel,
    Partial,
    Prefix,
    Release,
    Reserve,
    SamplingSpec,
    first_sequence,
)
from trimmoe.runtime.node.records.output import BatchOutput
from trimmoe.runtime.node.records.rows import Rows
from trimmoe.runtime.node.records.sequences import Seat, Seats
from trimmoe.runtime.node.records.work import Step, Work
from trimmoe.runtime.wire.base import PeerUnreachable
from wires import until

SAMPLING = SamplingSpec(0.0, 1.0, 0, 0.0, 0, 0, None)
ROUTE = [0, 1, 0]


def small_cache(slots: int, *, context_limit: int = 8) -> KVCache:
    return KVCache(
        slots=slots,
        heads=1,
        head_size=2,
        context_limit=context_limit,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def seats(slots: int) -> Seats:
    return Seats(small_cache(slots), server=0)


def ask(places: Seats, sequence: int, *, waits: bool) -> list[bool]:
    """Reserve; the answers that came, and those that come later."""
    answers: list[bool] = []
    places.reserve(Reserve(sequence, ROUTE, SAMPLING, 0.1, waits), answers.append)
    return answers


def test_places_are_granted_refused_or_waited_for_in_order() -> None:
    places = seats(2)
    assert ask(places, 1, waits=False) == ask(places, 2, waits=True) == [True]
    assert ask(places, 3, waits=False) == [False]
    fourth, fifth = ask(places, 4, waits=True), ask(places, 5, waits=True)
    assert fourth == fifth == []
    places.release([1])
    assert (fourth, fifth) == ([True], [])
    # Nobody overtakes those who wait.
    assert ask(places, 6, waits=False) == [False]
    places.release([2, 4])
    assert fifth == [True]
    assert places.usage == 0.5
    assert [seat.sequence for seat in places] == [5]


def test_who_gives_up_waiting_is_passed_over() -> None:
    places = seats(1)
    ask(places, 1, waits=True)
    second, third = ask(places, 2, waits=True), ask(places, 3, waits=True)
    places.release([2])
    places.release([1])
    assert (second, third) == ([], [True])


def test_who_is_over_before_a_place_is_free_gets_none() -> None:
    places = seats(1)
    ask(places, 1, waits=True)
    waiting = ask(places, 2, waits=True)
    places.retain([2])
    places.release([1])
    assert waiting == []
    assert (len(places), places.free, places.retained) == (0, 1, 0)


def test_asking_again_takes_no_second_place_and_slots_are_used_again() -> None:
    places = seats(1)
    assert ask(places, 1, waits=False) == ask(places, 1, waits=False) == [True]
    first = places.get(1)
    places.release([1, 99])
    assert places.free == 1
    ask(places, 2, waits=False)
    second = places.get(2)
    assert first is not None
    assert second is not None
    assert (first.open, second.open) == (False, True)
    assert first.slot == second.slot
    assert set(second.written) == {0, 2, 3}


def test_sequences_of_one_access_server_are_found_seated_or_waiting() -> None:
    places = seats(1)
    ours, theirs = first_sequence(0, 5), first_sequence(1, 5)
    ask(places, ours, waits=True)
    ask(places, theirs, waits=True)
    assert places.of_access(0) == [ours]
    assert places.of_access(1) == [theirs]


class Wire:
    """A transport on which some messages do not get through."""

    name = "s0"

    def __init__(self) -> None:
        self.sent: list[tuple[str, msgspec.Struct]] = []
        self.refuses: list[str] = []
        self.refused: list[str] = []

    def post(self, peer: str, message: msgspec.Struct, tensors: tuple[Tensor, ...]) -> None:
        if self.refuses:
            self.refused.append(self.refuses.pop(0))
            raise PeerUnreachable(peer, self.refused[-1])
        self.sent.append((peer, message))


class Posted:
    """Outbox of server 0, its wire, and what was delivered to the server itself."""

    def __init__(self) -> None:
        self.wire, self.delivered = Wire(), []
        self.outbox = Outbox(
            self.wire,  # type: ignore[arg-type]
            ("s0", "s1"),
            server=0,
            deliver=lambda parcel: self.delivered.append(parcel.message),
        )

    async def send(self, message: Message, *tensors: Tensor) -> None:
        """Post to server 1 and wait until the wire has decided about it, and word is given."""
        before = len(self.wire.sent) + len(self.wire.refused)
        self.outbox.post(Parcel(to=1, message=message, tensors=tensors))
        await until(lambda: not self.wire.refuses)
        await until(lambda: len(self.wire.sent) + len(self.wire.refused) > before)
        await asyncio.sleep(0)


PARTIAL = Partial(
    layer=1, rows=Rows([3, 4], [10, 20], [1, 1], []), decoding=True
)  # of two sequences of server 0's users


async def test_what_is_not_sent_is_reported_lost() -> None:
    posted = Posted()
    posted.wire.refuses = ["not up"]
    await posted.send(PARTIAL, torch.zeros(2, 4))
    assert posted.delivered == [Lost(3, ANY_POSITION), Lost(4, ANY_POSITION)]
    assert not posted.outbox.returned_to(1)
    assert not posted.outbox.vectors_sent


async def test_partial_sums_that_were_sent_are_remembered_until_asked_for() -> None:
    posted = Posted()
    await posted.send(PARTIAL, torch.zeros(2, 4))
    assert posted.outbox.vectors_sent == {1: 2}
    assert posted.outbox.returned_to(1) == {(3, 10), (4, 20)}
    assert not posted.outbox.returned_to(1)


async def test_releases_are_repeated_until_a_peer_that_is_up_takes_them() -> None:
    posted = Posted()
    posted.wire.refuses = ["not up", "its queue is full", "its queue is full"]
    for sequence in (3, 4):
        posted.outbox.post(Parcel(to=1, message=Release([sequence])))
    await until(lambda: posted.wire.sent)
    assert posted.wire.sent == [("s1", Release([4]))]
    assert not posted.delivered


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_an_emulated_machine_takes_that_many_times_longer(
    monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    clock, slept = iter([10.0, 12.0]), []
    monkeypatch.setattr(run_batch_module.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(run_batch_module.time, "sleep", slept.append)

    class Idle:
        pace = Pace()

        def arrive(self, items: list) -> BatchOutput:
            return BatchOutput()

    work = Work(step=Step.ARRIVE, layer=0, items=[])
    run_batch_module.run_batch(Idle(), None, work, slowdown=factor)  # type: ignore[arg-type]
    assert slept == ([] if factor == 1.0 else [4.0])


def begin(places: Seats, sequence: int, prefix: Prefix | None, route: list[int] = ROUTE) -> Seat:
    """Reserve at once; the seat."""
    answers: list[bool] = []
    asked = Reserve(sequence, route, SAMPLING, 0.1, False, prefix=prefix)
    places.reserve(asked, answers.append)
    assert answers == [True]
    seat = places.get(sequence)
    assert seat is not None
    return seat


def write(seat: Seat, length: int) -> None:
    for written in seat.written.values():
        written.mark(written.length, length - written.length)


def recording(slots: int) -> tuple[Seats, list[tuple[int, int, int]], list[int]]:
    """Places, and what was copied and evicted."""
    copied: list[tuple[int, int, int]] = []
    evicted: list[int] = []

    def copy(source: int, slot: int, length: int) -> None:
        copied.append((source, slot, length))

    return Seats(small_cache(slots), 0, copy=copy, evicted=evicted.append), copied, evicted


def test_a_sequence_that_is_over_leaves_its_place_to_one_that_begins_alike() -> None:
    places, copied, evicted = recording(2)
    first = begin(places, 1, None)
    write(first, 6)
    places.retain([1, 99])
    assert (first.open, places.retained, places.usage, len(places)) == (False, 1, 0.0, 0)
    second = begin(places, 2, Prefix(1, 4, True))
    assert (second.slot, second.kept, second.length) == (first.slot, 4, 4)
    assert (places.retained, copied, evicted) == (0, [], [])
    # Void is what was beyond, not what comes next.
    assert second.is_next(0, 4)
    places.release([2])
    assert places.free == 2


def test_what_is_shared_is_copied_from_one_under_way_or_over() -> None:
    places, copied, evicted = recording(3)
    source = begin(places, 1, None)
    write(source, 5)
    second = begin(places, 2, Prefix(1, 4, False))
    places.retain([1])
    third = begin(places, 3, Prefix(1, 9, False))
    assert (second.kept, third.kept) == (4, 5)
    assert copied == [(source.slot, second.slot, 4), (source.slot, third.slot, 5)]
    assert len({source.slot, second.slot, third.slot}) == 3
    assert (places.retained, evicted) == (1, [])


def test_the_longest_unused_make_way_and_what_is_shared_last() -> None:
    places, copied, evicted = recording(3)
    for sequence in (1, 2, 3):
        write(begin(places, sequence, None), 3)
    for sequence in (1, 2, 3):
        places.retain([sequence])
    assert begin(places, 4, Prefix(1, 3, False)).kept == 3
    assert evicted == [2]
    # The first has been used since the third was.
    begin(places, 5, None)
    assert evicted == [2, 3]
    last = begin(places, 6, Prefix(1, 2, False))
    assert (evicted, last.kept) == ([2, 3, 1], 2)
    assert len(copied) == 1
    assert ask(places, 7, waits=False) == [False]


def test_a_place_is_not_kept_from_those_who_wait() -> None:
    places, _, evicted = recording(1)
    begin(places, 1, None)
    second = ask(places, 2, waits=True)
    places.retain([1])
    assert (second, evicted, places.retained) == ([True], [1], 0)


def test_what_is_not_there_or_of_another_route_is_not_begun_with() -> None:
    places, copied, _ = recording(5)
    write(begin(places, 1, None), 5)
    for sequence, prefix, route in (
        (2, Prefix(9, 5, True), ROUTE),
        (3, Prefix(1, 5, False), [1, 0, 0]),
    ):
        assert begin(places, sequence, prefix, route).kept == 0
    assert copied == []
    places.retain([1])
    assert begin(places, 4, Prefix(1, 5, True), [0, 0, 1]).kept == 0
    places.release([1])
    assert begin(places, 5, Prefix(1, 5, True)).kept == 0


def test_a_slot_is_copied_in_all_blocks_as_far_as_it_is_written() -> None:
    cache = small_cache(3, context_limit=200)
    for block, length in ((0, 5), (2, 130)):
        keys = torch.arange(2.0 * length).reshape(1, 1, length, 2) + 1
        cache.write_slot(block, 1, keys, -keys)
    cache.copy(1, 2, 100)
    for block, length in ((0, 5), (2, 100)):
        ours, theirs = (cache.read_slot(block, slot, length) for slot in (2, 1))
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)
            assert one.all()
    assert not cache.read_slot(2, 2, 130)[0][:, :, 100:].any()
    assert not cache.read_slot(0, 0, 5)[0].any()
