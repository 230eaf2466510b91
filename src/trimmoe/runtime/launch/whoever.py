"""A cluster of whoever joins: planned for as they come, moved to another plan as they change."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


class Planner(Judge, Protocol):
    """Makes plans for whoever has joined."""

    def nominal(self, joined: Mapping[str, Hello]) -> Artifacts:
        """A plan before anything is measured, by the machine of each server. Raises `UserError` if
        the model does not fit."""
        ...

    def measured(
        self, now: Artifacts, where: Sequence[Endpoint], servers: Sequence[ServerView]
    ) -> Artifacts:
        """Measure servers that run, and plan again. Raises `UserError`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What is served, by what was measured."""

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
    count: int,
    replan: bool,
) -> None:
    """Wait until `count` servers are there, plan for them and serve; with `replan`, move to another
    plan when further ones join, some stay away, or machines are no more what they were. Until
    Ctrl-C or SIGTERM. Raises `UserError`."""
    title = assemble(config).policy.name
    with leading(config, assemble, say, options, _ANY) as (head, members, stop):
        at = f"{options.address}:{options.port}"
        say(f"Waiting at {at} until {count} servers are there ...")
        known: tuple[str, ...] = ()
        served: Served | None = None
        lookout: Lookout | None = None
        while not stop.is_set():
            found = _roll(members, options, known)
            if len(found) < count:
                stop.wait(_LOOK_S)
                continue
            drifted = None if lookout is None or found != known else lookout.found
            try:
                if served is not None and drifted is not None:
                    say("Moving to a plan that is better by what was measured meanwhile.")
                    served = _moved(head, drifted, served.machines) or served
                else:
                    served = _serve_with(config, title, head, planner, members, options, found, say)
            except UserError as error:
                if head.current is None:
                    raise
                say(f"The plan stays as it is: {error}")
            known = found
            leaving = threading.Event()
            stop.also(leaving)
            lookout = None
            if replan:
                _Watch(members, options, known, leaving)
                lookout = _looking_out(head, planner, served, leaving, say)
            head.watch(leaving)


def _serve_with(
    config: ServeConfig,
    title: str,
    head: Head,
    planner: Planner,
    members: Members,
    options: HeadOptions,
    names: tuple[str, ...],
    say: Say,
) -> Served | None:
    """Serve with those; what was served before a head was lost is served on. None where it is not
    known what was measured, or told to stop."""
    joined = [hello_of(members, options, name) for name in names]
    machines = {name: each.address for name, each in zip(names, joined, strict=True)}
    before = kept(kept_at("head", _ANY)) if head.current is None else None
    if before is not None and before.machines == machines and head.may_take_up(before):
        say("Serving what was served before.")
        if head.take_up(before):
            announce(config, head.endpoints(), title, say)
        return None
    nominal = planner.nominal(dict(zip(names, joined, strict=True)))
    first = head.current is None
    if not head.move(nominal, machines):
        return None
    if first:
        announce(config, head.endpoints(), title, say)
    assert head.current is not None
    views = [head.view(head.current.identity, name) for name in names]
    served = _moved(head, planner.measured(nominal, head.endpoints(), views), machines)
    if served is not None:
        say(f"Serving by what was measured of {', '.join(names)}.")
    return served


def _moved(head: Head, artifacts: Artifacts, machines: dict[str, str]) -> Served | None:
    """What is served then; None if told to stop. Raises `UserError`."""
    began_s = time.monotonic()
    if not head.move(artifacts, machines):
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


def _roll(members: Members, options: HeadOptions, known: tuple[str, ...]) -> tuple[str, ...]:
    """Who is there: the head's own servers, those known before in their order, then new ones."""
    there = [*options.servers, *sorted(members.joined())]
    return tuple(dict.fromkeys([*(name for name in known if name in there), *there]))


class _Watch:
    """Sets an event once others are there than those planned for."""

    def __init__(
        self,
        members: Members,
        options: HeadOptions,
        known: tuple[str, ...],
        leaving: threading.Event,
    ) -> None:
        self._members, self._options, self._known = members, options, known
        self._leaving = leaving
        threading.Thread(target=self._run, name="watching members", daemon=True).start()

    def _run(self) -> None:
        missed_s = 0.0
        while not self._leaving.wait(_LOOK_S):
            there = set(_roll(self._members, self._options, self._known))
            missed_s = 0.0 if there >= set(self._known) else missed_s + _LOOK_S
            if there - set(self._known) or missed_s > MISSED_S:
                self._leaving.set()
