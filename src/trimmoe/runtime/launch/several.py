"""A cluster of several machines: one head, and those that join it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trimmoe.core.cores import available_cores
from trimmoe.core.errors import UserError
from trimmoe.models.embedded.materialise import default_cache_dir
from trimmoe.runtime.launch.addresses import Endpoint
from trimmoe.runtime.launch.artifacts import Artifacts
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.deployment import DEFAULT_PORT, Hello
from trimmoe.runtime.launch.head import Head, ServerView
from trimmoe.runtime.launch.job import Pieces
from trimmoe.runtime.launch.local import Say, announce
from trimmoe.runtime.launch.machine import Assemble, Machine
from trimmoe.runtime.launch.member import Membership, free_memory_bytes, keep, kept, kept_at
from trimmoe.runtime.launch.members import Members
from trimmoe.runtime.launch.server import TOKEN_VARIABLE
from trimmoe.runtime.launch.signals import Stop, stop_on_signal
from trimmoe.runtime.launch.timing import Timing
from trimmoe.runtime.wire.keys import SHORTEST_TOKEN, generate_token

_LOOK_S = 0.5
ALONE_S = 10.0
"""How long a head is waited for before servers start with what is on disk."""
MISSED_S = 120.0
"""How long a machine may be away until the others are planned without it."""
_ELSEWHERE = ("192.0.2.1", 9)
"""An address of nobody: the way to it shows which of its own a machine uses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadOptions:
    """What only a head is told."""

    address: str
    """Where the other machines reach it."""
    port: int
    servers: tuple[str, ...]
    """Those that run on its own machine."""
    token: str | None
    """None: its own, made once and kept."""


class Planner(Protocol):
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


def serve_head(
    config: ServeConfig, artifacts: Artifacts, pieces: Pieces, say: Say, options: HeadOptions
) -> None:
    """Wait until every server's machine has joined, then serve until Ctrl-C or SIGTERM.

    Raises `UserError`.
    """
    names = artifacts.plan.cluster.server_names
    with _leading(config, lambda _: pieces, say, options, names) as (head, members, stop):
        if not _all_there(names, members, options, stop, say):
            return
        machines = {name: _hello(members, options, name).address for name in names}
        if head.move(artifacts, machines):
            _announce(config, head, pieces.title or pieces.policy.name, say)
            head.watch(stop)


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
    plan when further ones join or some stay away. Until Ctrl-C or SIGTERM. Raises `UserError`."""
    title = assemble(config).policy.name
    with _leading(config, assemble, say, options, ("any",)) as (head, members, stop):
        at = f"{options.address}:{options.port}"
        say(f"Waiting at {at} until {count} servers are there ...")
        known: tuple[str, ...] = ()
        while not stop.is_set():
            found = _roll(members, options, known)
            if len(found) < count:
                stop.wait(_LOOK_S)
                continue
            try:
                _serve_with(config, title, head, planner, members, options, found, say)
            except UserError as error:
                if head.current is None:
                    raise
                say(f"The plan stays as it is: {error}")
            known = found
            leaving = threading.Event()
            stop.also(leaving)
            if replan:
                _Watch(members, options, known, leaving)
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
) -> None:
    """Serve with those; what was served before a head was lost is served on."""
    joined = [_hello(members, options, name) for name in names]
    machines = {name: each.address for name, each in zip(names, joined, strict=True)}
    before = kept(kept_at("head", ("any",))) if head.current is None else None
    if before is not None and before.machines == machines and head.may_take_up(before):
        say("Serving what was served before.")
        if head.take_up(before):
            _announce(config, head, title, say)
        return
    nominal = planner.nominal(dict(zip(names, joined, strict=True)))
    first = head.current is None
    if not head.move(nominal, machines):
        return
    if first:
        _announce(config, head, title, say)
    assert head.current is not None
    views = [head.view(head.current.identity, name) for name in names]
    if head.move(planner.measured(nominal, head.endpoints(), views), machines):
        say(f"Serving by what was measured of {', '.join(names)}.")


def serve_join(
    head: str, *, servers: Sequence[str], token: str | None, say: Say, assemble: Assemble
) -> None:
    """Offer this machine as `servers` to the head at `host` or `host:port`, until Ctrl-C or until
    the head ends the cluster. Raises `UserError`."""
    if token is None:
        raise UserError(
            f"Joining needs the cluster token that the head shows; set {TOKEN_VARIABLE} to it, or "
            "give --token-file."
        )
    at, names = head if ":" in head else f"{head}:{DEFAULT_PORT}", tuple(servers) or (own_name(),)
    folder = kept_at(at, names)
    machine = Machine(names, token, folder, say, assemble)
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
            machine.want(list(membership.given.values()), wanted.deployments)
            timing.take(wanted.wishes)
            newest = wanted.deployments[-1:]
            if newest and newest[0] != kept_identity and newest[0] in membership.given:
                kept_identity = newest[0]
                keep(membership.given[kept_identity], folder)
        elif not membership.heard and not machine.runs and waited_s >= ALONE_S:
            before = kept(folder)
            if before is not None:
                say(f"The head at {head} does not answer; starting with what it gave before.")
                machine.want([before], [before.identity])
            waited_s = 0.0
        membership.wait(_LOOK_S)
        waited_s += _LOOK_S


def cluster_token(path: Path | None) -> str | None:
    """The token in a file, or in the environment; None if there is neither.

    Raises `UserError` if the file cannot be read or what is found is too short to be secret.
    """
    if path is None:
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
    else:
        try:
            token = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"Cannot read the cluster token in {path} ({error}).") from error
    if not token and path is None:
        return None
    if len(token) < SHORTEST_TOKEN:
        raise UserError(
            f"The cluster token has {len(token)} characters; take the one the head shows, of at "
            f"least {SHORTEST_TOKEN}."
        )
    return token


def own_name() -> str:
    """What this machine is called unless somebody says."""
    return socket.gethostname().partition(".")[0] or "server"


def own_address() -> str:
    """The address of this machine as others on its network see it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)  # Sends nothing.
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def _kept_token(say: Say) -> str:
    """This machine's own, so that a head that starts again is the same to its members."""
    path = default_cache_dir() / "cluster-token"
    token = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    if len(token) < SHORTEST_TOKEN:
        token = generate_token()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(token, encoding="utf-8")
    say(f"The cluster token, for {TOKEN_VARIABLE} on every machine that joins:\n{token}")
    return token


@contextmanager
def _leading(
    config: ServeConfig,
    assemble: Assemble,
    say: Say,
    options: HeadOptions,
    names: tuple[str, ...],
) -> Iterator[tuple[Head, Members, Stop]]:
    """A head with its members; all that was started has ended afterwards."""
    token = options.token or _kept_token(say)
    folder = kept_at("head", names)
    with (
        stop_on_signal() as stop,
        Members(token, options.address, options.port, own=options.servers) as members,
    ):
        machine = Machine(options.servers, token, folder, say, assemble)
        try:
            yield Head(config, members, machine, folder, stop, say), members, stop
            say("Stopping ...")
        finally:
            members.end()
            with stop.hurried():
                machine.end()


def _announce(config: ServeConfig, head: Head, title: str, say: Say) -> None:
    announce(config, head.endpoints(), title, say)


def _hello(members: Members, options: HeadOptions, name: str) -> Hello:
    """What is known of the machine of a server that is there."""
    if name not in options.servers:
        return members.joined()[name]
    return Hello(
        version="",
        servers=options.servers,
        address=options.address,
        memory_bytes=free_memory_bytes(),
        cores=available_cores(),
    )


def _all_there(
    names: tuple[str, ...], members: Members, options: HeadOptions, stop: Stop, say: Say
) -> bool:
    """Wait for the machine of each of the servers; False if told to stop before."""
    missing: tuple[str, ...] | None = None
    while not stop.is_set():
        there = {*members.joined(), *options.servers}
        still = tuple(name for name in names if name not in there)
        if not still:
            return True
        if still != missing:
            say(f"Waiting at {options.address}:{options.port} for {', '.join(still)} ...")
            missing = still
        stop.wait(_LOOK_S)
    return False


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
