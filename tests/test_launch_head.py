"""Moving from one plan to another where machines have no memory for both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from trimmoe.core.errors import UserError
from trimmoe.runtime.launch import head as heads
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.deployment import Deployment
from trimmoe.runtime.launch.head import Head
from trimmoe.runtime.launch.machine import Machine
from trimmoe.runtime.launch.members import Members
from trimmoe.runtime.launch.signals import Stop
from trimmoe.runtime.launch.status import Phase, ServerStatus


@dataclass
class _Members:
    """Nobody else is there."""

    def joined(self) -> dict[str, Any]:
        return {}

    def want(self, deployments: Mapping[str, Deployment]) -> None:
        pass


@dataclass
class _Machine:
    """The head's own: what is no more wanted ends when it is asked for the next time but one."""

    bad: set[str] = field(default_factory=set)
    """What does not start."""
    servers: tuple[str, ...] = ("desk",)
    wanted: list[tuple[str, ...]] = field(default_factory=list)
    _ending: dict[str, int] = field(default_factory=dict)

    def want(self, deployments: Mapping[str, Deployment], wanted: Mapping[str, Any]) -> None:
        gone = {one for one in self.runs if one not in wanted}
        self._ending = {one: self._ending.get(one, 2) - 1 for one in gone}
        self.wanted.append(tuple(each.plan.decode() for each in deployments.values()))
        self._runs = [*wanted, *(one for one, left in self._ending.items() if left > 0)]

    _runs: list[str] = field(default_factory=list)

    @property
    def runs(self) -> tuple[str, ...]:
        return tuple(self._runs)

    def status_of(self, identity: str, name: str) -> ServerStatus:
        if identity in self.bad:
            return ServerStatus(phase=Phase.FAILED, pid=1, error="There is no memory for it.")
        return ServerStatus(phase=Phase.SERVING, pid=1, healthy=True)


def _deployment(plan: str, turn: int) -> Deployment:
    return Deployment(
        config=b"{}", profile=b"", plan=plan.encode(), machines={"desk": "10.0.0.1"}, turn=turn
    )


@pytest.fixture
def machine() -> _Machine:
    return _Machine()


@pytest.fixture
def head(machine: _Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Head:
    monkeypatch.setattr(heads, "_LOOK_S", 0.01)
    monkeypatch.setattr(
        heads, "deployment_of", lambda config, plan, machines, turn: _deployment(plan, turn)
    )
    members, own = cast(Members, _Members()), cast(Machine, machine)
    return Head(ServeConfig(), members, own, tmp_path, Stop(), lambda line: None)


def _move(head: Head, plan: Any, *, beside: bool) -> bool:
    return head.move(plan, {"desk": "10.0.0.1"}, beside=beside)


def test_servers_of_the_next_plan_start_beside_those_that_serve(
    head: Head, machine: _Machine
) -> None:
    assert _move(head, "first", beside=True)
    assert _move(head, "next", beside=True)
    assert machine.wanted == [("first",), ("first",), ("first", "next"), ("next",)]


def test_or_once_all_that_serve_have_ended(head: Head, machine: _Machine) -> None:
    assert _move(head, "first", beside=True)
    assert _move(head, "next", beside=False)
    assert machine.wanted == [("first",), ("first",), (), (), ("next",), ("next",)]
    assert head.current == _deployment("next", 1)


def test_what_served_before_serves_again_where_the_next_does_not_start(
    head: Head, machine: _Machine
) -> None:
    assert _move(head, "first", beside=True)
    machine.bad.add(_deployment("next", 1).identity)
    with pytest.raises(UserError, match="no memory"):
        _move(head, "next", beside=False)
    assert machine.wanted[-2:] == [("next",), ("first",)]
    assert head.current == _deployment("first", 0)
