"""What is done to servers and supervisors, and by clients, while eight streams are under way."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from trimmoe.experiments.chaos.overload import BURST, SLOW, VANISHING, burst, slow, vanish
from trimmoe.experiments.chaos.scene import Scene

STOP_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Something that goes wrong; what it does says what else was not as it should be."""

    kind: str
    """By which it is asked for."""
    title: str
    happen: Callable[[Scene], Awaitable[list[str]]]
    after: Callable[[Scene], Awaitable[list[str]]] | None = None
    """Once streams are through and all is well."""


def failures(names: Sequence[str]) -> list[Failure]:
    """All there are, for servers by name."""
    each = [
        Failure(kind="kill", title=f"kill -9 {name}", happen=partial(_kill, index))
        for index, name in enumerate(names)
    ]
    return [
        *each,
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
    scene.stage.kill_supervisor()
    keeper = await scene.stage.keeper()
    scene.stage.kill(scene.some_server())
    return [] if keeper else ["nobody took the supervisor's place"]


async def _kill_keeper(scene: Scene) -> list[str]:
    stage = scene.stage
    stage.kill_supervisor()
    keeper = await stage.keeper()
    if keeper is None:
        return ["nobody took the supervisor's place"]
    os.kill(keeper, signal.SIGKILL)
    again = await stage.keeper(but=keeper)
    stage.kill(scene.some_server())
    return [] if again else ["nobody took the keeper's place"]


async def _serve_again(scene: Scene) -> list[str]:
    before = {scene.stage.pid(index) for index in range(len(scene.stage.names))}
    taken = await scene.stage.serve_again()
    same = before == {scene.stage.pid(index) for index in range(len(scene.stage.names))}
    faults = [] if taken else ["`trimmoe serve` did not take the servers over"]
    return faults if same else [*faults, "servers were started anew to be taken over"]
