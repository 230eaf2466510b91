"""Places for sequences that ask to pass this server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from trimmoe.runtime.node.records.messages import Granted, Parcel, Reserve, access_of
from trimmoe.runtime.node.records.sequences import Seats
from trimmoe.runtime.node.watch.planner import Planner

if TYPE_CHECKING:
    from torch import Tensor


class Admission:
    """A sequence gets its place once the engine here knows its route; `post` sends the answer."""

    def __init__(self, planner: Planner, seats: Seats, post: Callable[[Parcel], None]) -> None:
        self._planner, self._seats, self._post = planner, seats, post
        self._waiting: dict[int, tuple[Reserve, tuple[Tensor, ...]]] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        """Under way, for those that wait."""

    def admit(self, asked: Reserve, tensors: tuple[Tensor, ...]) -> None:
        """Keep a place for a sequence, now or later, or refuse it; `tensors` came with it."""
        self._planner.want_route(tuple(asked.route))
        if self._planner.settled:
            self._reserve(asked, tensors)
            return
        self._waiting[asked.sequence] = asked, tensors
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
        found = self._waiting.pop(asked.sequence, None)
        if found is not None:
            self._reserve(*found)

    def _reserve(self, asked: Reserve, tensors: tuple[Tensor, ...]) -> None:
        def answer(ok: bool) -> None:
            seat = self._seats.get(asked.sequence)
            granted = Granted(asked.sequence, ok, seat.kept if seat else 0)
            self._post(Parcel(to=access_of(asked.sequence), message=granted))

        self._seats.reserve(asked, answer, tensors[0] if tensors else None)
