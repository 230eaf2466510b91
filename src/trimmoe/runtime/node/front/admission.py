"""Places for sequences that ask to pass this server."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from trimmoe.runtime.node.records.contents import affected
from trimmoe.runtime.node.records.messages import (
    Dispatch,
    Granted,
    Message,
    Parcel,
    Reserve,
    access_of,
)
from trimmoe.runtime.node.records.sequences import Seats
from trimmoe.runtime.node.watch.planner import Planner

if TYPE_CHECKING:
    from torch import Tensor

MOST_EARLY, MOST_EARLY_BYTES = 256, 64 << 20
"""Messages that are kept until those sequences have their places whose rows are in them."""


class Admission:
    """A sequence gets its place once the engine here knows its route; `post` sends the answer.

    Its rows set out without waiting for that, and another server may be quicker to send them than
    its access server is to ask for the place. They are kept meanwhile, and then `deliver` takes
    them as if they had just come. An access server numbers its sequences upwards and asks in that
    order, so that a number above all that it asked for is not over but to come.
    """

    def __init__(
        self,
        planner: Planner,
        seats: Seats,
        post: Callable[[Parcel], None],
        *,
        deliver: Callable[[int, Parcel], None],
        lost: Callable[[int], None],
    ) -> None:
        """`lost` is told whose rows were not kept."""
        self._planner, self._seats, self._post = planner, seats, post
        self._deliver, self._lost = deliver, lost
        self._waiting: dict[int, tuple[Reserve, tuple[Tensor, ...]]] = {}
        self._newest: dict[int, int] = {}
        """The last sequence that a place was asked for, by access server."""
        self._early: deque[tuple[int, Parcel]] = deque()
        self.tasks: set[asyncio.Task[None]] = set()
        """Under way, for those that wait."""

    def admit(self, asked: Reserve, tensors: tuple[Tensor, ...]) -> None:
        """Keep a place for a sequence, now or later, or refuse it; `tensors` came with it."""
        access = access_of(asked.sequence)
        self._newest[access] = max(asked.sequence, self._newest.get(access, 0))
        self._planner.want_route(tuple(asked.route))
        if self._planner.settled:
            self._reserve(asked, tensors)
            return
        self._waiting[asked.sequence] = asked, tensors
        task = asyncio.create_task(self._later(asked))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def is_early(self, message: Message) -> bool:
        """Whether it has rows of a sequence that is yet to get its place here."""
        return any(map(self._is_early, _crossing(message)))

    def hold(self, sender: int, parcel: Parcel) -> None:
        """Keep such a message until then; what came first makes way where it is too much."""
        self._early.append((sender, parcel))
        while len(self._early) > MOST_EARLY or self._early_bytes > MOST_EARLY_BYTES:
            _, oldest = self._early.popleft()
            for sequence in _crossing(oldest.message):
                self._lost(sequence)

    @property
    def _early_bytes(self) -> int:
        return sum(tensor.nbytes for _, parcel in self._early for tensor in parcel.tensors)

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

    def peer_down(self, server: int) -> None:
        """What was kept of a server's, or for its users, is void."""
        kept = [
            (sender, parcel)
            for sender, parcel in self._early
            if sender != server
            and all(access_of(one) != server for one in _crossing(parcel.message))
        ]
        self._early = deque(kept)

    def _is_early(self, sequence: int) -> bool:
        if self._seats.get(sequence) is not None:
            return False
        return sequence in self._waiting or sequence > self._newest.get(access_of(sequence), -1)

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
        early, self._early = self._early, deque()
        for sender, parcel in early:
            self._deliver(sender, parcel)


def _crossing(message: Message) -> list[int]:
    """The sequences that need a place where a message goes."""
    return [] if isinstance(message, Dispatch) else affected(message)
