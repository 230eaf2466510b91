"""No request hangs for good, and none is given up because machines are slow."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from nodes import Servers, read, request, running, tokens_of, world
from serving import Tiny
from trimmoe.models.exact import greedy
from trimmoe.runtime.node.front.jobs import Attempt
from trimmoe.runtime.node.front.watchdog import stalled
from trimmoe.runtime.node.records.messages import Granted, Message, Onward
from trimmoe.runtime.service import Unavailable
from wires import soon

STALL_S = 0.15
ROUTES = [[0, 1, 1, 0], [1, 1, 1, 1]]


def swallow(servers: Servers, server: int, kind: type[Message], wanted: Callable[[], bool]) -> None:
    """Messages of a kind vanish on arrival, as if by a fault that nobody thought of."""
    node = servers.nodes[server]
    deliver = node._deliver

    def faulty(sender: int, parcel: Any) -> None:
        if not (isinstance(parcel.message, kind) and wanted()):
            deliver(sender, parcel)

    node._deliver = faulty  # type: ignore[method-assign]


class Nth:
    """True once, when asked for the n-th time."""

    def __init__(self, number: int) -> None:
        self.number, self.asked = number, 0

    def __call__(self) -> bool:
        self.asked += 1
        return self.asked == self.number


@pytest.mark.parametrize(
    ("server", "kind", "number"),
    [(1, Onward, 1), (1, Onward, 5), (0, Onward, 4), (0, Granted, 1)],
    ids=["prompt", "token", "token on its way back", "place"],
)
async def test_an_answer_goes_on_whatever_vanished(
    tiny: Tiny, server: int, kind: type[Message], number: int
) -> None:
    profile, plan = world(tiny, servers=2, routes=ROUTES)
    async with running(tiny, profile=profile, plan=plan, stall_s=STALL_S) as cluster:
        swallow(cluster, server, kind, Nth(number))
        front_end = cluster.nodes[0].front_end
        # Else nobody waits for word of a place.
        front_end.reservations.asks_first = kind is Granted
        made = await soon(read(cluster.nodes[0].service.submit(request([3, 4, 5], 20))))
        assert front_end.stalls == front_end.restarts == 1
        await cluster.all_free()
    assert tokens_of(made) == greedy(tiny.view, [[3, 4, 5]], 20)[0]


async def test_what_vanishes_again_and_again_ends_the_request(tiny: Tiny) -> None:
    profile, plan = world(tiny, servers=2, routes=ROUTES)
    async with running(tiny, profile=profile, plan=plan, stall_s=STALL_S) as cluster:
        swallow(cluster, 1, Onward, lambda: True)
        with pytest.raises(Unavailable, match="try again"):
            await soon(read(cluster.nodes[0].service.submit(request([3, 4, 5], 20))))
        await cluster.all_free()


async def test_slow_servers_and_full_ones_are_no_stall(tiny: Tiny) -> None:
    """A batch takes longer than two looks, and two of three requests wait for a place."""
    profile, plan = world(tiny, servers=2, routes=ROUTES)
    slow = {"stall_s": STALL_S, "kv_slots": 1}
    async with running(tiny, profile=profile, plan=plan, **slow) as cluster:
        worker = cluster.nodes[1].worker
        states = worker.states

        def slowly(*args: Any) -> Any:
            time.sleep(3 * STALL_S)
            return states(*args)

        worker.states = slowly  # type: ignore[method-assign]
        streams = [cluster.nodes[0].service.submit(request([3, 4, i], 4)) for i in range(3)]
        made = [await soon(read(stream)) for stream in streams]
        assert cluster.nodes[0].front_end.stalls == 0
        await cluster.all_free()
    for index, events in enumerate(made):
        assert tokens_of(events) == greedy(tiny.view, [[3, 4, index]], 4)[0]


def test_only_silence_after_a_question_is_a_stall() -> None:
    attempt = Attempt(sequence=7, route=(0,), trouble=None)  # type: ignore[arg-type]
    asked: list[int] = []

    def look() -> list[Attempt]:
        return stalled([attempt], asked.append)

    assert (look(), asked) == ([], [])  # It was begun just now.
    assert (look(), asked) == ([], [7])
    attempt.news = True
    assert (look(), asked) == ([], [7])
    assert (look(), asked) == ([], [7, 7])
    assert look() == [attempt]
