"""What an access server remembers of its users' sequences, so that nobody reads them again.

The states of a sequence are on the servers of its route. When it is over its places are retained
there, and a request whose prompt begins with the same tokens goes on from what they have in common:
it takes the places over where next to nothing else is in them, else it copies. Prompts that have
been read are copied too while their answers are under way. Only states of tokens that were read
whole are used, so that they are a matter of the tokens alone.

A server that needs a place evicts what was used longest ago and says so; the others on the route
give it up too. Nothing rests on that: every server says what it has when it grants a place, and
reading begins with what one of them lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimmoe.core.ledger import Ledger
from trimmoe.runtime.node.front.jobs import Attempt, Begun, FrontEndContext, Job
from trimmoe.runtime.node.records.messages import Parcel, Prefix, Release, Retain
from trimmoe.runtime.prefixes import BLOCK, Prefixes, is_exact


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """A sequence whose states are there."""

    route: tuple[int, ...]
    attempt: Attempt | None
    """None if it is over."""
    read: int = 0
    """Up to where this server had read it by itself."""


class Memory:
    """Of one access server."""

    def __init__(self, context: FrontEndContext) -> None:
        self._context = context
        self._prefixes = Prefixes()
        self._kept: dict[int, _Kept] = {}
        self.asked = 0
        """Tokens of prompts so far."""
        self.hits = 0
        """Prompts that began with what had been read."""
        self.tokens = 0
        """Of them that were not read again."""

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._kept

    def match(self, route: tuple[int, ...], ids: Sequence[int]) -> Begun | None:
        """What a prompt may begin with on a route; a token is left to be read, since it says what
        follows."""
        found = self._prefixes.find(route, ids) if self._context.prefix_cache else None
        if found is None:
            return None
        kept, length = self._kept[found.key], min(found.length, len(ids) - 1)
        read = kept.read if kept.attempt is None else kept.attempt.has_read
        moves = found.whole and kept.attempt is None
        if moves:
            self._drop(found.key)
        prefix = Prefix(found.key, length, moves)
        return Begun(prefix=prefix, read=min(read, length))

    def began(self, job: Job, attempt: Attempt, start: int) -> None:
        """A prompt is about to be read from a position on."""
        self.asked += attempt.prompt
        self.hits += start > 0
        self.tokens += start
        job.cached = start

    def shown(self, job: Job, attempt: Attempt, position: int, ledger: Ledger | None) -> None:
        """The token at a position is confirmed, after tokens that `ledger` says more of."""
        if position == attempt.prompt:
            attempt.exact = attempt.start if ledger is not None else position
            self._read(job, attempt)
        elif attempt.exact == position - 1 and ledger is not None:
            drafts = self._context.planner.settings.drafts
            attempt.exact += is_exact(ledger, exits=drafts)

    def ended(self, job: Job, attempt: Attempt) -> bool:
        """An answer is over: whether its states are retained."""
        self.forget(attempt.sequence)
        length = attempt.exact
        failed = attempt.trouble.done() and attempt.trouble.result()
        if not self._context.prefix_cache or length < BLOCK or failed:
            return False
        kept = self._retain(attempt, length)
        self._keep(attempt.sequence, _ids(job)[:length], kept)
        return True

    def put_off(self, attempt: Attempt) -> Begun:
        """An attempt took more for granted than is there of what it began with: what the next one
        begins with instead, see `resume`."""
        assert attempt.begun is not None
        prefix, sequence = attempt.begun.prefix, attempt.sequence
        length = prefix.length
        if prefix.moves:
            # It may be put off before it has taken over what this server had read of that.
            source = prefix.sequence
            self._context.control(lambda: self._context.close_account(source))
        # Nobody else finds it.
        kept = self._kept[sequence] = self._retain(attempt, length)
        return Begun(prefix=Prefix(sequence, length, moves=True), read=kept.read)

    def resume(self, begun: Begun, route: tuple[int, ...]) -> Begun | None:
        """What an attempt on a route has of what the one before it left behind: nothing if that
        was lost meanwhile or is elsewhere."""
        sequence = begun.prefix.sequence
        kept = self._kept.get(sequence)
        if kept is None or kept.route != route:
            self.let_go(begun)
            return None
        self._drop(sequence)
        return begun

    def let_go(self, begun: Begun) -> None:
        """No attempt begins with what the one before it left behind."""
        sequence = begun.prefix.sequence
        if (kept := self._kept.get(sequence)) is not None:
            self._let_go(sequence, kept)

    def _retain(self, attempt: Attempt, length: int) -> _Kept:
        """Have so many positions of a sequence that is over retained, here and on its route."""
        sequence, context = attempt.sequence, self._context
        kept = _Kept(route=attempt.route, attempt=None, read=min(attempt.has_read, length))
        for server in attempt.servers:
            context.post(Parcel(to=server, message=Retain([sequence])))
        context.control(lambda: context.retire(sequence, kept.read, length))
        return kept

    def forget(self, sequence: int) -> None:
        """A sequence under way begins no others any more."""
        self._drop(sequence)

    def evicted(self, server: int, sequence: int) -> None:
        """A server needed the place of a sequence that it had retained."""
        kept = self._kept.get(sequence)
        if kept is not None and kept.attempt is None:
            self._let_go(sequence, kept, spared=server)

    def server_lost(self, server: int) -> None:
        """What crosses a server is gone there."""
        for sequence, kept in list(self._kept.items()):
            if server not in kept.route:
                continue
            if kept.attempt is None:
                self._let_go(sequence, kept, spared=server)
            else:
                self._drop(sequence)

    def _read(self, job: Job, attempt: Attempt) -> None:
        """A prompt was read: it may begin others."""
        if self._context.prefix_cache and attempt.exact >= BLOCK:
            kept = _Kept(route=attempt.route, attempt=attempt)
            self._keep(attempt.sequence, _ids(job)[: attempt.exact], kept)

    def _keep(self, sequence: int, ids: Sequence[int], kept: _Kept) -> None:
        self._kept[sequence] = kept
        self._prefixes.keep(sequence, kept.route, ids)

    def _drop(self, sequence: int) -> None:
        self._kept.pop(sequence, None)
        self._prefixes.drop(sequence)

    def _let_go(self, sequence: int, kept: _Kept, *, spared: int | None = None) -> None:
        """Free the places of a retained sequence, but for a server that has done so."""
        self._drop(sequence)
        for server in sorted(set(kept.route) - {spared}):
            self._context.post(Parcel(to=server, message=Release([sequence])))
        self._context.control(lambda: self._context.close_account(sequence))


def _ids(job: Job) -> list[int]:
    return [*job.request.prompt_ids, *job.tokens]
