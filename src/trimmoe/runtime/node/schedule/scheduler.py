"""What a server computes next: all that is ready for the same step of the same layer together.

Quick steps, of which others' work follows, come before all else. Steps of generated tokens and
steps of prompts take turns, so that neither starves: between two chunks of a long prompt everybody
else's tokens move on. Of prompts what has come furthest comes first: one after the other is read,
and tokens of the first one join others' batches while the last one still waits.

Of generated tokens, slots come before a server's own layers: other servers wait for them, and they
are short. Then the lowest layer comes first, so that tokens catch up with those ahead of them and
go on together: a batch of many rows takes little longer than one row does. Guesses come last, and
of these what has come furthest comes first: else what is guessed upon guesses, which begins anew
each time, would keep a prompt that is read for its first guess waiting. What has been passed over
for `PATIENCE` batches is not passed over any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from trimmoe.cost.batching import PATIENCE
from trimmoe.runtime.node.records.work import Step, Work

_QUICK = frozenset({Step.ARRIVE, Step.FINISH, Step.CHUNK_END})
_ONE_AT_A_TIME = frozenset({Step.CHUNK, Step.CHUNK_END})
_PROMPTS = frozenset({Step.CHUNK, Step.CHUNK_SLOTS})


@dataclass(frozen=True, slots=True)
class _Queued:
    ticket: int
    served: int
    """Batches that were begun before it came."""
    rows: int
    queued_s: float
    item: Any


@dataclass(kw_only=True, slots=True)
class Scheduler:
    """Ready work; used by the event loop only."""

    max_rows: int
    """Rows of one batch, unless a single item has more."""
    now: Callable[[], float]
    waited: Callable[[float], None]
    """Told how long slots of generated tokens waited before they were begun, seconds: those of
    prompts wait for one another and say nothing of what a decision costs."""
    _queues: dict[tuple[Step, int], deque[_Queued]] = field(default_factory=dict)
    _ticket: int = 0
    _served: int = 0
    """Batches begun so far."""
    _prompts_turn: bool = False
    _taken: list[Any] = field(default_factory=list)
    """What was handed out last."""

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def put(self, step: Step, layer: int, item: Any, rows: int = 1) -> None:
        """Something is ready."""
        self._ticket += 1
        queue = self._queues.setdefault((step, layer), deque())
        queue.append(_Queued(self._ticket, self._served, rows, self.now(), item))

    def next(self) -> Work | None:
        """The batch to run now, None if there is nothing to do."""
        self._taken = []
        if not self._queues:
            return None
        key = min(self._eligible(), key=self._rank)
        self._served += 1
        self._taken = self._take(key)
        return Work(step=key[0], layer=key[1], items=self._taken, alone=not self._queues)

    def _eligible(self) -> set[tuple[Step, int]]:
        """The queues one of which comes next."""
        if quick := {key for key in self._queues if key[0] in _QUICK}:
            return quick
        of_prompts = {key for key in self._queues if key[0] in _PROMPTS}
        others = {key for key in self._queues.keys() - of_prompts if self._takes_turns(key)}
        if not of_prompts and not others:
            return set(self._queues)
        prompts = bool(of_prompts) and (self._prompts_turn or not others)
        self._prompts_turn = not prompts
        return of_prompts if prompts else others

    def _takes_turns(self, key: tuple[Step, int]) -> bool:
        """Whether prompts make way for it: for guesses only once they are passed over no more."""
        return key[0] is not Step.GUESS or self._overdue(key)

    def _overdue(self, key: tuple[Step, int]) -> bool:
        return self._served - self._queues[key][0].served >= PATIENCE

    def _rank(self, key: tuple[Step, int]) -> tuple[int, int, int]:
        """What comes first is least."""
        (step, layer), first = key, self._queues[key][0]
        if step in _QUICK or self._overdue(key):
            return (0, 0, first.ticket)
        if step in _PROMPTS:
            return (1, -layer, first.ticket)
        if step is Step.GUESS:
            return (3, -layer, first.ticket)
        return (1 if step is Step.SLOTS else 2, layer, first.ticket)

    def any(self, like: Callable[[Any], bool]) -> bool:
        """Whether an item that is ready, or being computed, is like that."""
        queued = chain.from_iterable(self._queues.values())
        return any(map(like, self._taken)) or any(like(each.item) for each in queued)

    def drop(self, gone: Callable[[Any], bool]) -> list[Any]:
        """Forget the items that are no longer wanted, which are given back."""
        dropped: list[Any] = []
        for key, queue in list(self._queues.items()):
            kept: deque[_Queued] = deque()
            for queued in queue:
                if gone(queued.item):
                    dropped.append(queued.item)
                else:
                    kept.append(queued)
            if kept:
                self._queues[key] = kept
            else:
                del self._queues[key]
        return dropped

    def _take(self, key: tuple[Step, int]) -> list[Any]:
        queue = self._queues[key]
        taken = [queue.popleft()]
        rows = taken[0].rows
        while queue and key[0] not in _ONE_AT_A_TIME and rows + queue[0].rows <= self.max_rows:
            taken.append(queue.popleft())
            rows += taken[-1].rows
        if not queue:
            del self._queues[key]
        if key[0] is Step.SLOTS:
            for queued in taken:
                self.waited(self.now() - queued.queued_s)
        return [queued.item for queued in taken]
