"""What a server keeps for each sequence whose route crosses it: a place in the KV cache, and up to
where every layer is written.

A place is granted at once, or waited for in order. An access server that needs places on several
servers first asks all at once for one without waiting, and the prompt sets out right behind the
question. If one refuses it gives back what it got and waits for one server after the other in
ascending order, so that no two can wait for each other; until there is room at once again, prompts
wait for their places.

A sequence that is over may be *retained*: its place stays taken until somebody needs it, the one
first that was used longest ago, and another sequence that begins with the same tokens takes it
over, or copies what they have in common. Each server says how much of that it has.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trimmoe.models.cache import KVCache
from trimmoe.runtime.guides import Guide
from trimmoe.runtime.node.records.messages import Prefix, Reserve, access_of
from trimmoe.runtime.node.records.packing import MalformedMessage
from trimmoe.runtime.node.records.samplings import unpack_sampling, unpack_seen
from trimmoe.runtime.sampling import Sampling
from trimmoe.runtime.scores import Score
from trimmoe.runtime.seen import UNKNOWN, Seen

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True, slots=True)
class Written:
    """Up to where a layer's keys and values are there; states may arrive out of order."""

    length: int = 0
    beyond: set[int] = field(default_factory=set)
    due: int = 0
    """Up to where they are there or among what is computed next, in turn."""

    def __post_init__(self) -> None:
        self.due = max(self.due, self.length)

    def mark(self, start: int, count: int) -> None:
        """Positions `start` to `start + count` were written."""
        if start == self.length:
            self.length += count
        else:
            self.beyond.update(range(start, start + count))
        while self.length in self.beyond:
            self.beyond.remove(self.length)
            self.length += 1
        self.due = max(self.due, self.length)

    def cut(self, start: int) -> None:
        """What was written from `start` on is void."""
        self.length, self.due = min(self.length, start), min(self.due, start)
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
    kept: int = 0
    """Positions that were written when it took its place."""
    seen: Seen | None = None
    """Its tokens, as far as they have come by; None where no draw looks back."""
    scores: list[Score] = field(default_factory=list)
    """Of the prompt's tokens, as far as it has passed the last layer, where they are asked for."""
    open: bool = True
    cuts: list[int] = field(default_factory=list)
    """From which position on tokens were withdrawn, time after time; ascending, since what is
    before was confirmed."""
    parked: dict[int, list[Any]] = field(default_factory=dict)
    """Units that came to a layer before the states they attend to."""
    trimmed: int = 0
    """Tokens of the prompt that are decided upon, from its first one on."""
    charged_tokens: int = 0
    """Of the prompt, that stand-ins ran for or that were trimmed; counted after the last layer."""
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

    @property
    def length(self) -> int:
        """Up to where all layers are written."""
        return min(written.length for written in self.written.values())

    def cut_at(self, epoch: int) -> int:
        """From which position on what set out before the `epoch`-th time is void; 0 where nothing
        was withdrawn yet."""
        return self.cuts[epoch - 1] if epoch else 0

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
        """What is at a position comes by; raises `MalformedMessage` if nobody says what it is
        and draws look back."""
        if self.seen is None or self.is_void(start, epoch):
            return
        if token != UNKNOWN:
            self.seen.put(start, token)
        elif self.seen.at(start) == UNKNOWN:
            raise MalformedMessage("a token without its name")

    def is_void(self, start: int, epoch: int) -> bool:
        """Whether a unit was withdrawn."""
        return epoch < len(self.cuts) and start >= self.cuts[epoch]

    def is_next(self, layer: int, start: int) -> bool:
        """Whether everything before position `start` is written in `layer`."""
        return self.written[layer].length == start


class Seats:
    """The places of one server; used by the event loop only."""

    def __init__(
        self,
        cache: KVCache,
        server: int,
        guide: Callable[[str], Guide | None] = lambda _: None,
        *,
        copy: Callable[[int, int, int], None] | None = None,
        evicted: Callable[[int], None] | None = None,
        attach: Callable[[int, Tensor, list[int]], None] | None = None,
    ) -> None:
        """`guide` gives what holds an answer to a grammar; `copy` is told which slot's first
        positions another one is to hold, and how many; `evicted` which retained sequence had to
        make way; `attach` which slot is to attend to what an encoder made of a prompt, in which
        layers, where there is an encoder."""
        self._cache, self._server, self._guide = cache, server, guide
        self._copy, self._evicted, self._attach = copy or cache.copy, evicted, attach
        self._seats: dict[int, Seat] = {}
        self._retained: dict[int, Seat] = {}
        """Used longest ago first."""
        self._waiting: deque[tuple[Reserve, Callable[[bool], None], Tensor | None]] = deque()

    def __iter__(self) -> Iterator[Seat]:
        return iter(list(self._seats.values()))

    def __len__(self) -> int:
        return len(self._seats)

    @property
    def free(self) -> int:
        return self._cache.free_slots + len(self._retained)

    @property
    def usage(self) -> float:
        """Share of the places that are taken; one that is retained is as good as free."""
        return 1.0 - self.free / self._cache.slots

    @property
    def retained(self) -> int:
        """Sequences that are over and whose states are kept."""
        return len(self._retained)

    def get(self, sequence: int) -> Seat | None:
        return self._seats.get(sequence)

    def is_waiting(self, sequence: int) -> bool:
        """Whether a sequence waits for a place."""
        return any(asked.sequence == sequence for asked, *_ in self._waiting)

    def reserve(
        self, asked: Reserve, answer: Callable[[bool], None], encoded: Tensor | None = None
    ) -> None:
        """Take a place now, later or not at all; `answer` is told. `encoded` is what an encoder
        made of the prompt, [S, d]."""
        if asked.sequence in self._seats:
            answer(True)
        elif self.free and not self._waiting:
            self._take(asked, encoded)
            answer(True)
        elif asked.waits:
            self._waiting.append((asked, answer, encoded))
        else:
            answer(False)

    def release(self, sequences: Iterable[int]) -> list[Seat]:
        """Free places and give them to those who wait; the seats that were taken."""
        gone = set(sequences)
        self._forget_waiting(gone)
        seats = [self._seats.pop(sequence) for sequence in gone if sequence in self._seats]
        for seat in seats:
            _close(seat)
        seats += [self._retained.pop(sequence) for sequence in gone & self._retained.keys()]
        for seat in seats:
            self._cache.free(seat.slot)
        self._seat_waiting()
        return seats

    def retain(self, sequences: Iterable[int]) -> None:
        """These are over; their places are kept until somebody needs them. Those that wait for one
        need none any more."""
        gone = list(sequences)
        self._forget_waiting(gone)
        for sequence in gone:
            if (seat := self._seats.pop(sequence, None)) is not None:
                _close(seat)
                self._retained[sequence] = seat
        self._seat_waiting()

    def of_access(self, server: int) -> list[int]:
        """Sequences, seated, retained or waiting, of one server's users."""
        known = [*self._seats, *self._retained, *(asked.sequence for asked, *_ in self._waiting)]
        return [sequence for sequence in known if access_of(sequence) == server]

    def _forget_waiting(self, gone: Collection[int]) -> None:
        self._waiting = deque(each for each in self._waiting if each[0].sequence not in gone)

    def _seat_waiting(self) -> None:
        while self._waiting and self.free:
            asked, answer, encoded = self._waiting.popleft()
            self._take(asked, encoded)
            answer(True)

    def _begun(self, prefix: Prefix | None, route: tuple[int, ...]) -> Seat | None:
        """The sequence that another one on a route may begin with, if it is known here."""
        if prefix is None:
            return None
        seat = self._seats.get(prefix.sequence) or self._retained.get(prefix.sequence)
        return seat if seat is not None and seat.route == route else None

    def _slot(self, source: Seat | None, *, moves: bool) -> int:
        """A slot to take: that of `source` if it moves or nothing else is left to take."""
        if moves and source is not None and self._retained.pop(source.sequence, None):
            return source.slot
        if self._cache.free_slots:
            return self._cache.alloc()
        oldest = next((seat for seat in self._retained.values() if seat is not source), source)
        assert oldest is not None
        del self._retained[oldest.sequence]
        if self._evicted is not None:
            self._evicted(oldest.sequence)
        return oldest.slot

    def _take(self, asked: Reserve, encoded: Tensor | None) -> None:
        route = tuple(asked.route)
        layers = [layer for layer, server in enumerate(route) if server == self._server]
        own = list(layers)
        if route[-1] == self._server:
            layers.append(len(route))
        prefix = asked.prefix
        source = self._begun(prefix, route)
        slot = self._slot(source, moves=prefix is not None and prefix.moves)
        kept = 0
        if prefix is not None and source is not None:
            kept = min(source.length, prefix.length)
            if source.slot != slot:
                self._copy(source.slot, slot, kept)
            if source.sequence in self._retained:
                self._retained[source.sequence] = self._retained.pop(source.sequence)
        if encoded is not None and self._attach is not None:
            self._attach(slot, encoded, own)
        self._seats[asked.sequence] = Seat(
            sequence=asked.sequence,
            slot=slot,
            route=route,
            sampling=unpack_sampling(asked.sampling),
            seen=unpack_seen(asked.seen, self._guide(asked.sampling.grammar)),
            budget=asked.budget,
            written={layer: Written(length=kept) for layer in layers},
            kept=kept,
            trimmed=asked.trimmed,
        )


def _close(seat: Seat) -> None:
    """Nothing more is done for a sequence."""
    seat.open = False
    seat.parked.clear()
