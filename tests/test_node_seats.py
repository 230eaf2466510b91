"""Places in the KV cache, and remembering whose work a lost link takes along."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import torch
from torch import Tensor

from trimmoe.models.cache import KVCache
from trimmoe.runtime.node.compute import perform as perform_module
from trimmoe.runtime.node.compute.pace import Pace
from trimmoe.runtime.node.mail import Mail
from trimmoe.runtime.node.records.messages import (
    ANY_POSITION,
    Lost,
    Message,
    Parcel,
    Partial,
    Release,
    Reserve,
    SamplingSpec,
    first_sequence,
)
from trimmoe.runtime.node.records.outcome import Outcome
from trimmoe.runtime.node.records.rows import Rows
from trimmoe.runtime.node.records.sequences import Seats
from trimmoe.runtime.node.records.work import Step, Work
from trimmoe.runtime.wire.base import PeerUnreachable
from wires import until

SAMPLING = SamplingSpec(0.0, 1.0, 0, 0.0, 0, 0, None)
ROUTE = [0, 1, 0]


def seats(slots: int) -> Seats:
    cache = KVCache(
        slots=slots,
        heads=1,
        head_size=2,
        context_limit=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return Seats(cache, server=0)


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
    """Mail of server 0, its wire, and what was delivered to the server itself."""

    def __init__(self) -> None:
        self.wire, self.delivered = Wire(), []
        self.mail = Mail(
            self.wire,  # type: ignore[arg-type]
            ("s0", "s1"),
            server=0,
            deliver=lambda parcel: self.delivered.append(parcel.message),
        )

    async def send(self, message: Message, *tensors: Tensor) -> None:
        """Post to server 1 and wait until the wire has decided about it, and word is given."""
        before = len(self.wire.sent) + len(self.wire.refused)
        self.mail.post(Parcel(to=1, message=message, tensors=tensors))
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
    assert not posted.mail.returned_to(1)
    assert not posted.mail.vectors_sent


async def test_partial_sums_that_were_sent_are_remembered_until_asked_for() -> None:
    posted = Posted()
    await posted.send(PARTIAL, torch.zeros(2, 4))
    assert posted.mail.vectors_sent == {1: 2}
    assert posted.mail.returned_to(1) == {(3, 10), (4, 20)}
    assert not posted.mail.returned_to(1)


async def test_releases_are_repeated_until_a_peer_that_is_up_takes_them() -> None:
    posted = Posted()
    posted.wire.refuses = ["not up", "its queue is full", "its queue is full"]
    for sequence in (3, 4):
        posted.mail.post(Parcel(to=1, message=Release([sequence])))
    await until(lambda: posted.wire.sent)
    assert posted.wire.sent == [("s1", Release([4]))]
    assert not posted.delivered


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_an_emulated_machine_takes_that_many_times_longer(
    monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    clock, slept = iter([10.0, 12.0]), []
    monkeypatch.setattr(perform_module.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(perform_module.time, "sleep", slept.append)

    class Idle:
        pace = Pace()

        def arrive(self, items: list) -> Outcome:
            return Outcome()

    work = Work(step=Step.ARRIVE, layer=0, items=[])
    perform_module.perform(Idle(), None, work, slowdown=factor)  # type: ignore[arg-type]
    assert slept == ([] if factor == 1.0 else [4.0])
