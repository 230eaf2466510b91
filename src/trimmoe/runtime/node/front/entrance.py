"""Places for sequences that ask to pass this server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from trimmoe.runtime.node.records.messages import Granted, Parcel, Reserve, access_of
from trimmoe.runtime.node.records.sequences import Seats
from trimmoe.runtime.node.watch.planner import Planner


class Entrance:
    """A sequence gets its place once the engine here knows its route; `post` sends the answer."""

    def __init__(self, planner: Planner, seats: Seats, post: Callable[[Parcel], None]) -> None:
        self._planner, self._seats, self._post = planner, seats, post
        self._waiting: dict[int, Reserve] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        """Under way, for those that wait."""

    def admit(self, asked: Reserve) -> None:
        """Keep a place for a sequence, now or later, or refuse it."""
        self._planner.want_route(tuple(asked.route))
        if self._planner.settled:
            self._reserve(asked)
            return
        self._waiting[asked.sequence] = asked
        task = asyncio.create_task(self._later(asked))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def keeps(self, sequence: int) -> bool:
        """Whether it waits here."""
        return sequence in self._waiting

    def of_access(self, server: int) -> list[int]:
        """Those that wait for users of a server."""
        return [sequence for sequence in self._waiting if access_of(sequence) == server]

    def forget(self, sequences: Iterable[int]) -> None:
        """They are wanted no more."""
        for sequence in sequences:
            self._waiting.pop(sequence, None)

    async def _later(self, asked: Reserve) -> None:
        await self._planner.until_settled()
        if self._waiting.pop(asked.sequence, None) is not None:
            self._reserve(asked)

    def _reserve(self, asked: Reserve) -> None:
        def answer(ok: bool) -> None:
            seat = self._seats.get(asked.sequence)
            granted = Granted(asked.sequence, ok, seat.kept if seat else 0)
            self._post(Parcel(to=access_of(asked.sequence), message=granted))

        self._seats.reserve(asked, answer)
