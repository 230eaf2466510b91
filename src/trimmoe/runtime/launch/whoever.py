"""A cluster of servers that join: planned for as they come, moved to another plan as they drift."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trimmoe.core.errors import UserError
from trimmoe.runtime.launch.addresses import Endpoint
from trimmoe.runtime.launch.artifacts import Artifacts
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.deployment import Hello
from trimmoe.runtime.launch.head import Head, ServerView
from trimmoe.runtime.launch.local import Say, announce
from trimmoe.runtime.launch.lookout import Judge, Lookout
from trimmoe.runtime.launch.machine import Assemble
from trimmoe.runtime.launch.member import kept, kept_at
from trimmoe.runtime.launch.members import Members
from trimmoe.runtime.launch.several import HeadOptions, hello_of, leading

_LOOK_S = 0.5
MISSED_S = 120.0
"""How long a machine may be away until the others are planned without it."""
_ANY = ("any",)
"""In place of names that are not known yet."""
NO_ROOM = (
    "A better plan needs more memory than is free beside what serves at {}; it is taken when the "
    "cluster starts anew."
)
"""With the names of the servers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Roll:
    """Who a cluster is made of."""

    own: tuple[str, ...]
    """The servers of the head's machine."""
    count: int
    """So many are planned for first."""
    named: tuple[str, ...] = ()
    """Those that a cluster file names; nobody else serves. Empty: whoever joins."""

    def __post_init__(self) -> None:
        assert not self.named or set(self.own) <= set(self.named)

    def call(self, joined: Iterable[str], known: tuple[str, ...]) -> tuple[str, ...]:
        """Who is there: in the cluster file's order, or the head's own servers, those `known`
        before in their order, then new ones."""
        there = dict.fromkeys([*self.own, *sorted(joined)])
        if self.named:
            return tuple(name for name in self.named if name in there)
        return tuple(dict.fromkeys([*(name for name in known if name in there), *there]))


class Planner(Judge, Protocol):
    """Makes plans for those who have joined."""

    def nominal(self, joined: Mapping[str, Hello]) -> Artifacts:
        """A plan before anything is measured, by the machine of each server. Raises `UserError` if
        the model does not fit."""
        ...

    def measured(
        self, now: Artifacts, where: Sequence[Endpoint], servers: Sequence[ServerView]
    ) -> Artifacts:
        """Measure servers that run, and plan again. Raises `UserError`."""
        ...

    def short_beside(self, made: Artifacts, joined: Mapping[str, Hello]) -> str:
        """Servers of machines without memory for a plan beside what they serve; empty if there are
        none."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What is served, and how it was moved to."""

    artifacts: Artifacts
    machines: dict[str, str]
    """The address of each server's machine."""
    moving_s: float
    """How long it took to move there."""


def serve_whoever_joins(
    config: ServeConfig,
    planner: Planner,
    assemble: Assemble,
    say: Say,
    options: HeadOptions,
    *,
    roll: Roll,
    replan: bool,
) -> None:
    """Wait until as many servers are there as `roll` says, plan for them and serve; with `replan`,
    move to another plan when further ones join, some stay away, or machines are no more what they
    were. Until Ctrl-C or SIGTERM. Raises `UserError`."""
    title, names = assemble(config).policy.name, roll.named or _ANY
    with leading(config, assemble, say, options, names) as (head, members, stop):
        at = f"{options.address}:{options.port}"
        among = f" of {', '.join(roll.named)}" if roll.named else ""
        say(f"Waiting at {at} until {roll.count} servers{among} are there ...")
        serving = _Serving(
            config=config, title=title, head=head, planner=planner, members=members,
            options=options, kept=kept_at("head", names), say=say,
        )  # fmt: skip
        known: tuple[str, ...] = ()
        served: Served | None = None
        lookout: Lookout | None = None
        while not stop.is_set():
            found = roll.call(members.joined(), known)
            if len(found) < roll.count:
                stop.wait(_LOOK_S)
                continue
            drifted = None if lookout is None or found != known else lookout.found
            try:
                if served is not None and drifted is not None:
                    say("Moving to a plan that is better by what was measured meanwhile.")
                    served = serving.moved(drifted, served.machines) or served
                else:
                    served = serving.begun(found)
            except UserError as error:
                if head.current is None:
                    raise
                say(f"The plan stays as it is: {error}")
            known = found
            leaving = threading.Event()
            stop.also(leaving)
            lookout = None
            if replan:
                _Watch(members, roll, known, leaving)
                lookout = _looking_out(head, planner, served, leaving, say)
            head.watch(leaving)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Serving:
    """What it takes to serve with those that are there."""

    config: ServeConfig
    title: str
    head: Head
    planner: Planner
    members: Members
    options: HeadOptions
    kept: Path
    """Where what is served is kept."""
    say: Say

    def begun(self, names: tuple[str, ...]) -> Served | None:
        """Serve with those; what was served before a head was lost is served on. None where it is
        not known what was measured, or told to stop."""
        head = self.head
        joined = [hello_of(self.members, self.options, name) for name in names]
        machines = {name: each.address for name, each in zip(names, joined, strict=True)}
        before = kept(self.kept) if head.current is None else None
        if before is not None and before.machines == machines and head.may_take_up(before):
            self.say("Serving what was served before.")
            if head.take_up(before):
                announce(self.config, head.endpoints(), self.title, self.say)
            return None
        there = dict(zip(names, joined, strict=True))
        nominal, first = self.planner.nominal(there), head.current is None
        if not first and (short := self.planner.short_beside(nominal, there)):
            raise UserError(NO_ROOM.format(short))
        served = self.moved(nominal, machines)
        if served is None:
            return None
        if first:
            announce(self.config, head.endpoints(), self.title, self.say)
        assert head.current is not None
        views = [head.view(head.current.identity, name) for name in names]
        better = self.planner.measured(nominal, head.endpoints(), views)
        short = self.planner.short_beside(better, there)
        if short and not first:
            self.say(NO_ROOM.format(short))
            return served
        if short:
            self.say(
                f"There is no memory for two plans at once at {short}: all servers end, and "
                "others start by what was measured. Until then nobody is let in."
            )
        served = self.moved(better, machines, beside=not short)
        if served is not None:
            self.say(f"Serving by what was measured of {', '.join(names)}.")
        return served

    def moved(
        self, artifacts: Artifacts, machines: dict[str, str], *, beside: bool = True
    ) -> Served | None:
        """What is served then; None if told to stop. Raises `UserError`."""
        began_s = time.monotonic()
        if not self.head.move(artifacts, machines, beside=beside):
            return None
        moving_s = time.monotonic() - began_s
        return Served(artifacts=artifacts, machines=machines, moving_s=moving_s)


def _looking_out(
    head: Head, planner: Planner, served: Served | None, leaving: threading.Event, say: Say
) -> Lookout | None:
    """Begin to look for drift where it is known what it was measured against."""
    if served is None or head.current is None:
        return None
    views = [head.view(head.current.identity, name) for name in served.machines]
    lookout = Lookout(views, planner, served.artifacts, served.moving_s, leaving, say)
    lookout.begin()
    return lookout


class _Watch:
    """Sets an event once others are there than those planned for."""

    def __init__(
        self,
        members: Members,
        roll: Roll,
        known: tuple[str, ...],
        leaving: threading.Event,
    ) -> None:
        self._members, self._roll, self._known = members, roll, known
        self._leaving = leaving
        threading.Thread(target=self._run, name="watching members", daemon=True).start()

    def _run(self) -> None:
        missed_s = 0.0
        while not self._leaving.wait(_LOOK_S):
            there = set(self._roll.call(self._members.joined(), self._known))
            missed_s = 0.0 if there >= set(self._known) else missed_s + _LOOK_S
            if there - set(self._known) or missed_s > MISSED_S:
                self._leaving.set()
