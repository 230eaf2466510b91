"""What is done to servers and supervisors, and by clients, while eight streams are under way."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from trimmoe.experiments.chaos.overload import BURST, SLOW, VANISHING, burst, slow, vanish
from trimmoe.experiments.chaos.streams import Scene

T = TypeVar("T")
STOP_S = 10.0
CUT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Something that goes wrong; what it does says what else was not as it should be."""

    kind: str
    """By which it is asked for."""
    title: str
    happen: Callable[[Scene], Awaitable[list[str]]]
    after: Callable[[Scene], Awaitable[list[str]]] | None = None
    """Once streams are through and all is well."""


def failures(
    names: Sequence[str], *, networked: bool = False, spared: int | None = None
) -> list[Failure]:
    """All there are, for servers by name but for one that is `spared`; `networked`: each of them on
    a machine of its own."""
    each = [
        Failure(kind="kill", title=f"kill -9 {name}", happen=partial(_kill, index))
        for index, name in enumerate(names)
        if index != spared
    ]
    return [
        *each,
        *(_of_machines() if networked else ()),
        Failure(kind="stop", title=f"SIGSTOP of a server for {STOP_S:.0f} s", happen=_stop),
        Failure(
            kind="supervisor",
            title="kill -9 supervisor, then a server",
            happen=_kill_supervisor,
            after=_serve_again,
        ),
        Failure(
            kind="keeper",
            title="kill -9 supervisor, keeper, a server",
            happen=_kill_keeper,
            after=_serve_again,
        ),
        Failure(kind="vanish", title=f"{VANISHING} clients vanish", happen=vanish),
        Failure(kind="burst", title=f"burst to {BURST} times capacity", happen=burst),
        Failure(kind="slow", title=f"{SLOW} idle slow connections", happen=slow),
    ]


def _of_machines() -> list[Failure]:
    return [
        Failure(kind="cut", title=f"a machine's cable out for {CUT_S:.0f} s", happen=_cut),
        Failure(kind="part", title=f"no way between two for {CUT_S:.0f} s", happen=_part),
        Failure(kind="crash", title="kill -9 of all on a machine", happen=_crash),
    ]


def schedule(known: Sequence[Failure], rng: np.random.Generator) -> Iterator[Failure]:
    """Failures without an end: all kinds before any comes again, and of a kind all there are."""
    kinds = list(dict.fromkeys(each.kind for each in known))
    of_kind = {
        kind: _shuffled([each for each in known if each.kind == kind], rng) for kind in kinds
    }
    for kind in _shuffled(kinds, rng):
        yield next(of_kind[kind])


def _shuffled(items: Sequence[T], rng: np.random.Generator) -> Iterator[T]:
    """All of them in some order, again and again."""
    while True:
        for at in rng.permutation(len(items)).tolist():
            yield items[at]


async def _kill(server: int, scene: Scene) -> list[str]:
    scene.stage.kill(server)
    return []


async def _stop(scene: Scene) -> list[str]:
    server = scene.some_server()
    scene.stage.signal(server, signal.SIGSTOP)
    try:
        await asyncio.sleep(STOP_S)
    finally:
        scene.stage.signal(server, signal.SIGCONT)
    return []


async def _kill_supervisor(scene: Scene) -> list[str]:
    server = scene.some_server()
    machine = scene.stage.machine_of(server)
    scene.stage.kill_supervisor(machine)
    keeper = await scene.stage.keeper(machine)
    scene.stage.kill(server)
    return [] if keeper else ["nobody took the supervisor's place"]


async def _kill_keeper(scene: Scene) -> list[str]:
    stage, server = scene.stage, scene.some_server()
    machine = stage.machine_of(server)
    stage.kill_supervisor(machine)
    keeper = await stage.keeper(machine)
    if keeper is None:
        return ["nobody took the supervisor's place"]
    os.kill(keeper, signal.SIGKILL)
    again = await stage.keeper(machine, but=keeper)
    stage.kill(server)
    return [] if again else ["nobody took the keeper's place"]


async def _cut(scene: Scene) -> list[str]:
    lan, server = scene.lan, scene.some_server()
    scene.notes.append(f"that of {scene.stage.names[server]}")
    lan.cut(server)
    try:
        await asyncio.sleep(CUT_S)
    finally:
        lan.mend(server)
    return []


async def _part(scene: Scene) -> list[str]:
    """The two reach all others, and clients both."""
    lan, names = scene.lan, scene.stage.names
    one, other = scene.rng.choice(len(names), 2, replace=False).tolist()
    scene.notes.append(f"{names[one]} and {names[other]}")
    lan.part(one, other)
    try:
        await asyncio.sleep(CUT_S)
    finally:
        lan.join(one, other)
    return []


async def _crash(scene: Scene) -> list[str]:
    """As by a power cut; then the machine starts again, as a service manager would have it."""
    server = scene.some_server()
    machine = scene.stage.machine_of(server)
    scene.notes.append(f"that of {scene.stage.names[server]}")
    scene.stage.crash(machine)
    scene.stage.serve(machine)
    return []


async def _serve_again(scene: Scene) -> list[str]:
    before = {scene.stage.pid(index) for index in range(len(scene.stage.names))}
    taken = await scene.stage.serve_again()
    same = before == {scene.stage.pid(index) for index in range(len(scene.stage.names))}
    faults = [] if taken else ["`trimmoe serve` did not take the servers over"]
    return faults if same else [*faults, "servers were started anew to be taken over"]
