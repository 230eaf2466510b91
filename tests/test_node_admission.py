"""A prompt sets out without waiting for its places: what overtakes the question is kept, and who is
refused a place asks first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nodes import (
    answers,
    constant_routes,
    delay,
    guessing,
    read,
    request,
    running,
    staircase_routes,
    tokens_of,
    world,
)
from serving import Tiny
from test_node_watchdog import swallow
from trimmoe.models.exact import greedy
from trimmoe.policy.presets import PRESETS
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.node.front import admission as admission_module
from trimmoe.runtime.node.front.admission import Admission
from trimmoe.runtime.node.records.messages import (
    Dispatch,
    Granted,
    Message,
    Parcel,
    Prompt,
    Reserve,
    Retain,
    SamplingSpec,
    first_sequence,
)
from trimmoe.runtime.node.records.rows import Rows
from wires import soon

LATE_S = 0.15
lossless = pytest.mark.parametrize(
    "policy", [PRESETS["exact"](), guessing(3)], ids=["exact", "guesses"]
)


@lossless
async def test_rows_that_overtake_the_question_are_kept(tiny: Tiny, policy: PolicySettings) -> None:
    profile, plan = world(tiny, servers=3, routes=staircase_routes(3))
    async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
        delay(cluster.nodes[2], lambda one: LATE_S * isinstance(one, Reserve))
        made = await answers(cluster, [(0, request([3, 4, at], 8)) for at in range(3)])
        assert cluster.nodes[0].front_end.restarts == 0
        assert not cluster.nodes[2].admission._early
        await cluster.all_free()
    for at, events in enumerate(made):
        assert tokens_of(events) == greedy(tiny.view, [[3, 4, at]], 8)[0]


@lossless
async def test_nobody_waits_for_word_of_a_place(tiny: Tiny, policy: PolicySettings) -> None:
    profile, plan = world(tiny, servers=3, routes=staircase_routes(3))
    async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
        swallow(cluster, 0, Granted, lambda: True)
        (made,) = await answers(cluster, [(0, request([3, 4, 5], 8))])
        assert cluster.nodes[0].front_end.restarts == 0
        await cluster.all_free()
    assert tokens_of(made) == greedy(tiny.view, [[3, 4, 5]], 8)[0]


@lossless
async def test_more_requests_than_places_are_all_answered(
    tiny: Tiny, policy: PolicySettings
) -> None:
    """On servers with users each, whose places run out on one another's routes."""
    profile, plan = world(tiny, servers=3, routes=staircase_routes(3))
    async with running(tiny, profile=profile, plan=plan, policy=policy, kv_slots=2) as cluster:
        asked = [(at % 3, request([3, 4, at], 6)) for at in range(9)]
        made = await answers(cluster, asked)
        assert any(node.front_end.reservations.asks_first for node in cluster.nodes.values())
        assert not any(node.front_end.restarts for node in cluster.nodes.values())
        await cluster.all_free()
    for at, events in enumerate(made):
        assert tokens_of(events) == greedy(tiny.view, [[3, 4, at]], 6)[0]


async def test_whoever_was_refused_a_place_asks_until_there_is_room_again(tiny: Tiny) -> None:
    profile, plan = world(tiny, servers=2, routes=constant_routes(2))
    async with running(tiny, profile=profile, plan=plan, kv_slots=1) as cluster:
        front_end = cluster.nodes[0].front_end
        await answers(cluster, [(0, request([3, 4, at], 4)) for at in range(3)])
        assert front_end.reservations.asks_first
        await answers(cluster, [(0, request([5, 6], 4))])
        assert not front_end.reservations.asks_first


async def test_a_server_that_refuses_every_place_is_given_up(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is asked for ever by who is told no, whether it sets out or asks first."""
    profile, plan = world(tiny, servers=2, routes=staircase_routes(2))
    asked = 0
    async with running(tiny, profile=profile, plan=plan) as cluster:

        def refused(one: Reserve, answer: Callable[[bool], None], encoded: Any = None) -> None:
            nonlocal asked
            asked += 1
            answer(False)

        cluster.nodes[1].intake.seats.reserve = refused  # type: ignore[method-assign]
        monkeypatch.setattr("trimmoe.runtime.node.front.front_end.MOST_RESTARTS", 2)
        with pytest.raises(Exception, match="try again"):
            await soon(read(cluster.nodes[0].service.submit(request([3, 4], 4))))
        await cluster.all_free()
    assert asked > 1


OURS, THEIRS = first_sequence(0, 5), first_sequence(1, 5)


class Kept:
    """Admission of a server whose engine knows all routes or, unless `settled`, none."""

    def __init__(self, *, settled: bool = True) -> None:
        self.delivered: list[Message] = []
        self.lost: list[int] = []
        self.seats: dict[int, Any] = {}
        self.planner = SimpleNamespace(
            settled=settled, want_route=lambda _: None, until_settled=asyncio.Event().wait
        )
        seats = SimpleNamespace(get=self.seats.get, reserve=self._reserve)
        self.admission = Admission(
            self.planner,  # type: ignore[arg-type]
            seats,  # type: ignore[arg-type]
            lambda _: None,
            deliver=self.hear,
            lost=self.lost.append,
        )
        self.room = True

    def _reserve(self, asked: Reserve, answer: Callable[[bool], None], encoded: Any) -> None:
        if self.room:
            self.seats[asked.sequence] = SimpleNamespace(kept=0)
        answer(self.room)

    def hear(self, sender: int, parcel: Parcel) -> None:
        """A message of rows came."""
        if self.admission.is_early(parcel.message):
            self.admission.hold(sender, parcel)
        else:
            self.delivered.append(parcel.message)

    def ask(self, sequence: int) -> None:
        """A place is asked for."""
        asked = Reserve(sequence, [0, 1], None, 0.0, False)  # type: ignore[arg-type]
        self.admission.admit(asked, ())


def prompt(sequence: int) -> Parcel:
    return Parcel(to=1, message=Prompt(sequence), tensors=(torch.tensor([1], dtype=torch.int32),))


def test_what_is_kept_comes_in_its_order_once_there_is_a_place() -> None:
    kept = Kept()
    kept.hear(0, prompt(OURS))
    kept.hear(0, prompt(OURS + 1))
    kept.hear(0, prompt(OURS))
    assert kept.delivered == []
    kept.ask(OURS)
    assert [one.sequence for one in kept.delivered] == [OURS, OURS]  # type: ignore[attr-defined]
    kept.ask(OURS + 1)
    assert len(kept.delivered) == 3
    kept.hear(0, prompt(OURS))
    assert len(kept.delivered) == 4


def test_what_is_over_or_was_refused_is_not_kept() -> None:
    """It is handed on, and dropped as rows without a place are."""
    kept = Kept()
    kept.ask(OURS + 1)
    kept.hear(2, prompt(OURS))
    kept.room = False
    kept.hear(2, prompt(OURS + 2))
    kept.ask(OURS + 2)
    kept.hear(2, prompt(OURS + 2))
    assert len(kept.delivered) == 3
    assert not kept.admission._early


def test_another_servers_numbers_say_nothing_of_ones_own() -> None:
    kept = Kept()
    kept.ask(THEIRS + 100)
    kept.hear(2, prompt(OURS))
    assert kept.delivered == []


async def test_rows_are_kept_while_the_engine_does_not_know_the_route() -> None:
    kept = Kept(settled=False)
    kept.ask(OURS)
    kept.hear(0, prompt(OURS))
    assert kept.delivered == []
    kept.admission.forget([OURS])
    # Its request is over.
    kept.hear(0, prompt(OURS))
    assert len(kept.delivered) == 1
    for task in kept.admission.tasks:
        task.cancel()


async def test_an_answer_that_is_over_before_its_route_is_known_takes_no_place(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its user had what he wanted of it from the attempt before."""
    profile, plan = world(tiny, servers=2, routes=staircase_routes(2))
    async with running(tiny, profile=profile, plan=plan) as cluster:
        node, known = cluster.nodes[1], asyncio.Event()
        monkeypatch.setattr(type(node.planner), "settled", property(lambda _: known.is_set()))
        monkeypatch.setattr(node.planner, "until_settled", known.wait)
        sequence, route = first_sequence(0, 1), plan.routes[0].tolist()
        reserve = Reserve(sequence, route, SamplingSpec(0.0, 1.0, 0, 0.0, 0, 0, None), 0.0, False)
        node.inbox.deliver(0, Parcel(to=1, message=reserve))
        assert node.admission.keeps(sequence)
        node.inbox.deliver(0, Parcel(to=1, message=Retain([sequence])))
        known.set()
        await asyncio.gather(*node.admission.tasks)
        assert not node.snapshot().sequences


def test_experts_need_no_place() -> None:
    kept = Kept()
    kept.hear(0, Parcel(to=1, message=Dispatch(0, Rows([OURS], [0], [1], []), [1], True)))
    assert len(kept.delivered) == 1


def test_so_much_is_kept_and_whose_rows_are_not_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "MOST_EARLY", 2)
    kept = Kept()
    for at in range(3):
        kept.hear(0, prompt(OURS + at))
    assert kept.lost == [OURS]
    kept.ask(OURS + 2)
    assert [one.sequence for one in kept.delivered] == [OURS + 1, OURS + 2]  # type: ignore[attr-defined]


def test_so_many_bytes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "MOST_EARLY_BYTES", 2 * prompt(OURS).tensors[0].nbytes)
    kept = Kept()
    for at in range(3):
        kept.hear(0, prompt(OURS + at))
    assert kept.lost == [OURS]


def test_what_was_kept_for_a_server_that_is_gone_is_forgotten() -> None:
    kept = Kept()
    kept.hear(0, prompt(OURS))
    kept.hear(2, prompt(OURS))
    kept.hear(2, prompt(THEIRS))
    kept.admission.peer_down(0)
    assert [parcel.message.sequence for _, parcel in kept.admission._early] == [THEIRS]  # type: ignore[attr-defined]
