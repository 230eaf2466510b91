"""Keeps the engine up with what is known of the cluster, off the decision path."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from concurrent.futures import Executor as Pool
from dataclasses import replace
from itertools import chain
from typing import TypeVar

import numpy as np

from trimmoe.core.profile import Profile
from trimmoe.engine.feedback import Feedback
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.node.records.messages import LoadReport
from trimmoe.runtime.node.records.packing import MalformedMessage
from trimmoe.runtime.node.watch.deployments import (
    Basis,
    Built,
    Conditions,
    Route,
    build,
    changed_much,
    prepared,
)

Made = TypeVar("Made")
MOST_ROUTES = 1024
"""Beyond the plan's: one for each server's users, in any state that the cluster has been in."""
_FEWEST_TOKENS_PER_S = 1.0
"""That say what prompts take for each of them."""
BUSY_SHARE = 0.05
"""Of the time, what following mere measurements may take. Value tables take the processor that
tokens are computed with: unbounded, following the load would cause the load that is followed."""


class Planner:
    """Wishes come in from the event loop; `apply` is called there with every new engine."""

    def __init__(
        self,
        basis: Basis,
        *,
        server: int,
        pool: Pool,
        apply: Callable[[Built], None],
        feedback: Callable[[], Feedback],
        delay_s: float,
        changed_share: float | None,
    ) -> None:
        self._basis, self._server, self._pool = basis, server, pool
        self._apply, self._feedback = apply, feedback
        self._delay_s, self._changed_share = delay_s, changed_share
        count = basis.plan.cluster.server_count
        self._wanted = Conditions.planned(count)
        self._extra: dict[Route, None] = {}
        self._loads: dict[int, LoadReport] = {}
        self._news, self._changed = asyncio.Event(), asyncio.Event()
        self._urgent = asyncio.Event()
        """Set while not `settled`."""
        self._rests_until_s = -math.inf
        """Until when mere measurements change nothing."""
        self.built: Built | None = None
        self.builds = 0
        self._looking: asyncio.Task[None] | None = None

    @property
    def profile(self) -> Profile:
        return self._basis.profile

    @property
    def settings(self) -> PolicySettings:
        return self._basis.settings

    @property
    def in_force(self) -> Built:
        """What is decided with now."""
        assert self.built is not None, "built before anything is served"
        return self.built

    @property
    def settled(self) -> bool:
        """Whether what is in force knows who is alive and every route that is wanted."""
        if self.built is None:
            return False
        now, wanted = self.built.conditions, self._wanted
        alive = (now.lost, now.cut) == (wanted.lost, wanted.cut)
        return alive and self.built.known.issuperset(self._extra)

    @property
    def lost(self) -> frozenset[int]:
        """Servers that cannot be reached from here."""
        return self._wanted.lost

    async def until_settled(self) -> None:
        """Return once `settled`."""
        while not self.settled:
            await self.next_change()

    async def next_change(self) -> None:
        """Return when another engine is in force, or the one in force is right again."""
        self._changed.clear()
        await self._changed.wait()

    def want_lost(self, lost: frozenset[int]) -> None:
        """These servers cannot be reached."""
        for server in lost:
            self._loads.pop(server, None)
        self._want(replace(self._wanted, lost=lost))

    def want_route(self, route: Route) -> None:
        """A sequence came on a route; know it. Raises `MalformedMessage` for more routes than a
        cluster has use for: none is ever forgotten, and each makes the engine larger."""
        if route not in self._extra:
            if len(self._extra) >= MOST_ROUTES:
                raise MalformedMessage("too many routes")
            self._extra[route] = None
            self._news.set()
            self._mark_urgent()

    def note(self, server: int, load: LoadReport) -> None:
        """What a server, perhaps this one, measures."""
        self._loads[server] = load
        self._want(self._wanted)

    def load_of(self, server: int) -> LoadReport | None:
        """What a server said last; None if it has said nothing since it was lost."""
        return self._loads.get(server)

    @property
    def read_s(self) -> float:
        """What prompts take the server which they take most, for each token that is generated;
        nothing where none was lately."""
        loads = self._loads.values()
        tokens_per_s = sum(load.tokens_per_s for load in loads)
        if tokens_per_s < _FEWEST_TOKENS_PER_S:
            return 0.0
        return max(load.prompts for load in loads) / tokens_per_s

    @property
    def _others(self) -> frozenset[float]:
        """Loss weights that tokens come with, those of other servers' users among them."""
        told = (load.loss_weights for load in self._loads.values())
        return frozenset(chain.from_iterable(told))

    def look_ahead(self) -> None:
        """Have the tables made that feedback may ask for next; nothing if they are there."""
        idle = self._looking is None or self._looking.done()
        if idle and asyncio.get_running_loop().time() >= self._rests_until_s:
            self._looking = asyncio.create_task(self._look_ahead())

    async def _look_ahead(self) -> None:
        engine, feedback, others = self.in_force.engine, self._feedback(), self._others
        better = await self._timed(lambda: prepared(engine, feedback, others))
        if better is not engine and self.in_force.engine is engine:
            self.built = replace(self.in_force, engine=better)
            self._apply(self.built)

    def _want(self, wanted: Conditions) -> None:
        unsettled = not self.settled
        self._wanted = self._measured(wanted)
        self._mark_urgent()
        if self._is_due():
            self._news.set()
        if unsettled and self.settled:
            # What was wanted may be what is in force again before anything was built.
            self._changed.set()

    def _mark_urgent(self) -> None:
        if self.settled:
            self._urgent.clear()
        else:
            self._urgent.set()

    def _is_due(self) -> bool:
        if self.built is None or not self.settled:
            return True
        share = self._changed_share
        return share is not None and changed_much(
            self._wanted, self.built.conditions, self._basis, share
        )

    def _measured(self, wanted: Conditions) -> Conditions:
        """With everybody's measurements entered."""
        count = wanted.waiting_s.size
        clean = Conditions.planned(count)
        cut: set[tuple[int, int]] = set()
        for server, load in self._loads.items():
            for other in load.unreachable:
                if server != self._server and not {server, other} & (wanted.lost | {self._server}):
                    cut.add((min(server, other), max(server, other)))
            if self._changed_share is None:
                continue
            clean.delay_s[server] = _row(load.delay_s)
            clean.bandwidth_bytes_per_s[server] = _row(load.bandwidth_bytes_per_s)
            clean.waiting_s[server] = load.waiting_s
            clean.busy[server] = load.busy
        return replace(clean, lost=wanted.lost, cut=frozenset(cut))

    async def build_first(self) -> None:
        """The first engine, before anything is served."""
        await self._build()

    async def run(self) -> None:
        """Build whenever something is due; ends when cancelled."""
        while True:
            await self._news.wait()
            # What belongs together comes in together.
            await asyncio.sleep(self._delay_s)
            await self._rested()
            self._news.clear()
            if self._is_due() or not self.settled:
                await self._build()

    async def _rested(self) -> None:
        """Return when measurements may be followed again, or something else is due."""
        left_s = self._rests_until_s - asyncio.get_running_loop().time()
        if left_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._urgent.wait(), left_s)

    async def _timed(self, make: Callable[[], Made]) -> Made:
        """Run in the pool, and rest for so much longer than it took."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        made = await loop.run_in_executor(self._pool, make)
        now_s = loop.time()
        self._rests_until_s = now_s + (now_s - began_s) * (1.0 / BUSY_SHARE - 1.0)
        return made

    async def _build(self) -> None:
        first = self.built is None
        # Those that are known come first and in order: accounts are kept by row.
        known = () if self.built is None else self.built.added
        wanted, extra = self._wanted, tuple(dict.fromkeys((*known, *self._extra)))
        others = self._others

        def made() -> Built:
            built = build(self._basis, wanted, extra)
            feedback = built.engine.start().feedback if first else self._feedback()
            return replace(built, engine=prepared(built.engine, feedback, others))

        built = await self._timed(made)
        self.built = built
        self.builds += 1
        self._mark_urgent()
        self._apply(built)
        self._changed.set()


def _row(values: list[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values])
