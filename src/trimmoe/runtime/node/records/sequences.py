"""What a server keeps for each sequence whose route crosses it: a place in the KV cache, and up to
where every layer is written.

A place is granted at once, or waited for in order. An access server that needs places on several
servers first tries all at once without waiting; if one refuses it gives back what it got and
waits for one server after the other in ascending order, so that no two can wait for each other.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from trimmoe.models.cache import KVCache
from trimmoe.runtime.guides import Guide
from trimmoe.runtime.node.records.messages import Reserve, access_of
from trimmoe.runtime.node.records.passengers import MalformedPassengers
from trimmoe.runtime.node.records.samplings import unpack_sampling, unpack_seen
from trimmoe.runtime.sampling import Sampling
from trimmoe.runtime.seen import UNKNOWN, Seen


@dataclass(kw_only=True, slots=True)
class Written:
    """Up to where a layer's keys and values are there; states may arrive out of order."""

    length: int = 0
    beyond: set[int] = field(default_factory=set)

    def mark(self, start: int, count: int) -> None:
        """Positions `start` to `start + count` were written."""
        if start == self.length:
            self.length += count
        else:
            self.beyond.update(range(start, start + count))
        while self.length in self.beyond:
            self.beyond.remove(self.length)
            self.length += 1

    def cut(self, start: int) -> None:
        """What was written from `start` on is void."""
        self.length = min(self.length, start)
        self.beyond = {position for position in self.beyond if position < start}


@dataclass(eq=False, kw_only=True, slots=True)
class Seat:
    """One sequence on this server."""

    sequence: int
    slot: int
    route: tuple[int, ...]
    sampling: Sampling
    budget: float
    """Quality loss that a token of it may incur."""
    written: dict[int, Written]
    """By layer that this server has of the route; layer N stands for what follows the last."""
    seen: Seen | None = None
    """Its tokens, as far as they have come by; None where no draw looks back."""
    open: bool = True
    cuts: list[int] = field(default_factory=list)
    """From which position on tokens were withdrawn, time after time; ascending, since what is
    before was confirmed."""
    parked: dict[int, list[Any]] = field(default_factory=dict)
    """Units that came to a layer before the states they attend to."""
    charged_tokens: int = 0
    """Of the prompt, that stand-ins ran for; counted after the last layer."""
    charged_loss: float = 0.0
    dispatched: dict[int, int] = field(default_factory=dict)
    """Last position of which slots were sent to a server."""
    worked_s: float = -math.inf
    """When anything of it was computed here last."""

    @property
    def access(self) -> int:
        return access_of(self.sequence)

    def crosses(self, server: int) -> bool:
        return server == self.access or server in self.route

    def withdraw(self, start: int, epoch: int) -> bool:
        """What set out before the `epoch`-th time that tokens were withdrawn is void from `start`
        on; whether that is news."""
        if epoch <= len(self.cuts):
            return False
        # Whoever sets out has passed here, so no time is missed; should one be, it is covered.
        self.cuts += [start] * (epoch - len(self.cuts))
        for written in self.written.values():
            written.cut(start)
        return True

    def note(self, start: int, epoch: int, token: int) -> None:
        """What is at a position comes by; raises `MalformedPassengers` if nobody says what it is
        and draws look back."""
        if self.seen is None or self.is_void(start, epoch):
            return
        if token != UNKNOWN:
            self.seen.put(start, token)
        elif self.seen.at(start) == UNKNOWN:
            raise MalformedPassengers("a token without its name")

    def is_void(self, start: int, epoch: int) -> bool:
        """Whether a unit was withdrawn."""
        return epoch < len(self.cuts) and start >= self.cuts[epoch]

    def is_next(self, layer: int, start: int) -> bool:
        """Whether everything before position `start` is written in `layer`."""
        return self.written[layer].length == start


class Seats:
    """The places of one server; used by the event loop only."""

    def __init__(
        self, cache: KVCache, server: int, guide: Callable[[str], Guide | None] = lambda _: None
    ) -> None:
        """`guide` gives what holds an answer to a grammar."""
        self._cache, self._server, self._guide = cache, server, guide
        self._seats: dict[int, Seat] = {}
        self._waiting: deque[tuple[Reserve, Callable[[bool], None]]] = deque()

    def __iter__(self) -> Iterator[Seat]:
        return iter(list(self._seats.values()))

    def __len__(self) -> int:
        return len(self._seats)

    @property
    def free(self) -> int:
        return self._cache.free_slots

    @property
    def usage(self) -> float:
        """Share of the places that are taken."""
        return 1.0 - self._cache.free_slots / self._cache.slots

    def get(self, sequence: int) -> Seat | None:
        return self._seats.get(sequence)

    def is_waiting(self, sequence: int) -> bool:
        """Whether a sequence waits for a place."""
        return any(asked.sequence == sequence for asked, _ in self._waiting)

    def reserve(self, asked: Reserve, answer: Callable[[bool], None]) -> None:
        """Take a place now, later or not at all; `answer` is told."""
        if asked.sequence in self._seats:
            answer(True)
        elif self._cache.free_slots and not self._waiting:
            self._take(asked)
            answer(True)
        elif asked.waits:
            self._waiting.append((asked, answer))
        else:
            answer(False)

    def release(self, sequences: Iterable[int]) -> list[Seat]:
        """Free places and give them to those who wait; the seats that were taken."""
        gone = set(sequences)
        self._waiting = deque(each for each in self._waiting if each[0].sequence not in gone)
        seats = [self._seats.pop(sequence) for sequence in gone if sequence in self._seats]
        for seat in seats:
            seat.open = False
            seat.parked.clear()
            self._cache.free(seat.slot)
        while self._waiting and self._cache.free_slots:
            asked, answer = self._waiting.popleft()
            self._take(asked)
            answer(True)
        return seats

    def of_access(self, server: int) -> list[int]:
        """Sequences, seated or waiting, of one server's users."""
        known = [*self._seats, *(asked.sequence for asked, _ in self._waiting)]
        return [sequence for sequence in known if access_of(sequence) == server]

    def _take(self, asked: Reserve) -> None:
        route = tuple(asked.route)
        layers = [layer for layer, server in enumerate(route) if server == self._server]
        if route[-1] == self._server:
            layers.append(len(route))
        self._seats[asked.sequence] = Seat(
            sequence=asked.sequence,
            slot=self._cache.alloc(),
            route=route,
            sampling=unpack_sampling(asked.sampling),
            seen=unpack_seen(asked.seen, self._guide(asked.sampling.grammar)),
            budget=asked.budget,
            written={layer: Written() for layer in layers},
        )
