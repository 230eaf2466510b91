"""A machine that joins a head, for as long as it serves, and times its servers when the head wishes
it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from trimmoe.core.errors import UserError
from trimmoe.runtime.launch.deployment import DEFAULT_PORT, Timed, Wish, timed_of
from trimmoe.runtime.launch.local import Say
from trimmoe.runtime.launch.machine import Assemble, Machine
from trimmoe.runtime.launch.member import Membership, keep, kept, kept_at
from trimmoe.runtime.launch.naming import own_name
from trimmoe.runtime.launch.server import TOKEN_VARIABLE
from trimmoe.runtime.launch.signals import Stop, stop_on_signal
from trimmoe.runtime.launch.tls import Tls

_LOOK_S = 0.5
ALONE_S = 10.0
"""How long a head is waited for before servers start with what is on disk."""
_PATIENCE_S = 120.0
"""With servers that time themselves."""


class Timing:
    """Answers wishes, each once, in threads of their own."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._begun: set[int] = set()
        self._timed: dict[int, Timed] = {}

    def take(self, wishes: Sequence[Wish]) -> None:
        """What the head wishes now; the answers to other wishes have reached it."""
        wanted = {wish.number for wish in wishes}
        self._timed = {number: each for number, each in self._timed.items() if number in wanted}
        for wish in wishes:
            if wish.number not in self._begun:
                self._begun.add(wish.number)
                threading.Thread(target=self._answer, args=(wish,), daemon=True).start()

    def timed(self) -> tuple[Timed, ...]:
        """What there is to tell."""
        return tuple(self._timed.values())

    def _answer(self, wish: Wish) -> None:
        report = None
        handle = self._machine.handle(wish.deployment, wish.server)
        if handle is not None:
            handle.begin_measuring()
            report = handle.measured(_PATIENCE_S)
        self._timed[wish.number] = timed_of(wish.number, report)


def serve_join(
    head: str,
    *,
    servers: Sequence[str],
    token: str | None,
    say: Say,
    assemble: Assemble,
    tls: Tls | None = None,
) -> None:
    """Offer this machine as `servers` to the head at `host` or `host:port`, until Ctrl-C or until
    the head ends the cluster; `tls` is what it serves HTTP with. Raises `UserError`."""
    if token is None:
        raise UserError(
            f"Joining needs the cluster token that the head shows; set {TOKEN_VARIABLE} to it, or "
            "give --token-file."
        )
    at, names = head if ":" in head else f"{head}:{DEFAULT_PORT}", tuple(servers) or (own_name(),)
    folder = kept_at(at, names)
    machine = Machine(names, token, folder, say, assemble, tls)
    timing = Timing(machine)

    def told():
        return machine.runs, machine.reports(), timing.timed()

    with stop_on_signal() as stop, Membership(token, at, names, say, told) as membership:
        try:
            _follow(membership, machine, timing, folder, at, stop, say)
        finally:
            with stop.hurried():
                machine.end()
        if membership.refused:
            raise UserError(membership.refused)
        if membership.ended:
            say("The head ended the cluster.")


def _follow(
    membership: Membership,
    machine: Machine,
    timing: Timing,
    folder: Path,
    head: str,
    stop: Stop,
    say: Say,
) -> None:
    """Run what the head wants, or what it wanted last if it is silent from the start."""
    waited_s, kept_identity = 0.0, ""
    while not stop.is_set() and not membership.is_over:
        wanted = membership.wanted
        if wanted is not None:
            machine.want(membership.given, wanted.deployments)
            timing.take(wanted.wishes)
            newest = wanted.deployments[-1:]
            if newest and newest[0] != kept_identity and newest[0] in membership.given:
                kept_identity = newest[0]
                keep(membership.given[kept_identity], folder)
        elif not membership.heard and not machine.runs and waited_s >= ALONE_S:
            before = kept(folder)
            if before is not None:
                say(f"The head at {head} does not answer; starting with what it gave before.")
                kept_before = {before.identity: before}
                machine.want(kept_before, kept_before)
            waited_s = 0.0
        membership.wait(_LOOK_S)
        waited_s += _LOOK_S
