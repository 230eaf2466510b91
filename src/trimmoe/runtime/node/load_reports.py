"""How the other servers hear what this one has to do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from trimmoe.runtime.node.outbox import Outbox
from trimmoe.runtime.node.parts import Parts
from trimmoe.runtime.node.peers import Peers
from trimmoe.runtime.node.records.messages import Message, Parcel, Running
from trimmoe.runtime.probe import used_bytes

NEWS_S = 0.02
"""After which others are told that an answer began or is over, with what else has by then."""


@dataclass(kw_only=True, slots=True)
class LoadReports:
    """Of one server that serves, every so many seconds and whenever its answers change."""

    parts: Parts
    peers: Peers
    outbox: Outbox
    lost: Callable[[], frozenset[int]]
    """Servers that are not to be reached."""
    device: torch.device
    every_s: float
    _due: bool = field(default=False, init=False)
    """Whether others are about to be told how many answers are under way."""

    async def run(self) -> None:
        """Send them as long as this server serves."""
        while True:
            self.send()
            self.parts.planner.look_ahead()
            await asyncio.sleep(self.every_s)

    def answers_changed(self) -> None:
        """An answer began or is over: whoever guesses wants to know how many are under way."""
        if self._due or not self.parts.planner.settings.guesses or not self.peers.others():
            return
        self._due = True
        asyncio.get_running_loop().call_later(NEWS_S, self._tell)

    def send(self) -> None:
        """Send one now."""
        parts, lost = self.parts, self.lost()
        vitals = parts.reporter.vitals(
            queued=len(parts.intake.scheduler),
            tokens=parts.front_end.answers.tokens,
            memory_bytes=used_bytes(self.device),
        )
        usage, running = parts.intake.seats.usage, parts.front_end.running
        due = parts.front_end.lengths.due
        load = parts.reporter.load_report(
            usage, lost, parts.worker.loss_weights, running, vitals, due
        )
        parts.planner.note(parts.server, load)
        self._post(load, lost)

    def _tell(self) -> None:
        self._due = False
        if self.parts.health().ok:
            self.parts.front_end.load_changed()
            self._post(Running(self.parts.front_end.running), self.lost())

    def _post(self, message: Message, lost: frozenset[int]) -> None:
        """To all others but those that are lost."""
        for server in self.peers.others() - lost:
            self.outbox.post(Parcel(to=server, message=message))
