"""What followed the same words before: guesses that cost nothing, where an answer copies.

Summaries, code and quotations repeat spans of what was read; small models repeat themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trimmoe.engine.guesses import Lead, Source

SHORTEST, SURE = 3, 8
"""Tokens that must be the same: to guess at all, and to guess although that was wrong lately."""
MOST = 8
"""Guesses under way at once."""
_WRONG = 3
"""Right ones that one wrong one outweighs."""


@dataclass(eq=False, kw_only=True, slots=True)
class Lookup:
    """Of one sequence."""

    trust: int = 1
    """Guesses that may be under way, by how many were right lately."""
    short: Source = field(default_factory=lambda: Source(guess_s=0.0))
    """Guesses after few tokens that are the same."""
    long: Source = field(default_factory=lambda: Source(guess_s=0.0))
    """Guesses after many."""
    pending: dict[int, Source] = field(default_factory=dict)
    """Those under way, by position."""
    _after: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Where a run of tokens was last followed by another one."""
    _known: int = SHORTEST

    def learn(self, ids: Sequence[int]) -> None:
        """These are the tokens so far, those before that are among them."""
        for end in range(self._known, len(ids)):
            self._after[tuple(ids[end - SHORTEST : end])] = end
        self._known = max(self._known, len(ids))

    def guess(self, ids: Sequence[int], lead: Lead) -> int | None:
        """What follows tokens, the last of which may be guesses themselves; None if that is not
        known, was wrong too often, or other guesses are expected to bring the next token sooner."""
        at = self._after.get(tuple(ids[-SHORTEST:]))
        if at is None or at >= len(ids) or len(self.pending) >= MOST:
            return None
        source = self._source(ids, at)
        if len(self.pending) >= self.trust and (self.pending or source is self.short):
            return None
        if not lead.pays(source):
            return None
        self.pending[len(ids)] = source
        return ids[at]

    def checked(self, position: int, *, right: bool) -> None:
        """Word of a position has come; of the guesses behind a wrong one none will."""
        source = self.pending.pop(position, None)
        if source is not None:
            source.learn(right)
            self.trust = min(self.trust + 1, MOST) if right else max(self.trust - _WRONG, 0)
        for other in (self.short, self.long):
            if other is not source:
                other.rest()
        if not right:
            self.pending.clear()

    def _source(self, ids: Sequence[int], at: int) -> Source:
        """By how much is the same: whether more than can be by chance."""
        same = at >= SURE and list(ids[at - SURE : at]) == list(ids[-SURE:])
        return self.long if same else self.short
