"""What followed the same words before: guesses that cost nothing, where an answer copies.

Summaries, code and quotations repeat spans of what was read; small models repeat themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
    pending: set[int] = field(default_factory=set)
    """Positions of those that are."""
    _after: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Where a run of tokens was last followed by another one."""
    _known: int = SHORTEST

    def learn(self, ids: Sequence[int]) -> None:
        """These are the tokens so far, those before that are among them."""
        for end in range(self._known, len(ids)):
            self._after[tuple(ids[end - SHORTEST : end])] = end
        self._known = max(self._known, len(ids))

    def guess(self, ids: Sequence[int]) -> int | None:
        """What follows tokens, the last of which may be guesses themselves; None if that is not
        known, or was wrong too often."""
        at = self._after.get(tuple(ids[-SHORTEST:]))
        if at is None or at >= len(ids) or len(self.pending) >= MOST:
            return None
        if len(self.pending) >= self.trust and not self._is_sure(ids, at):
            return None
        return ids[at]

    def checked(self, position: int, *, right: bool) -> None:
        """Word of a position has come; of the guesses behind a wrong one none will."""
        if position in self.pending:
            self.pending.remove(position)
            self.trust = min(self.trust + 1, MOST) if right else max(self.trust - _WRONG, 0)
        if not right:
            self.pending.clear()

    def _is_sure(self, ids: Sequence[int], at: int) -> bool:
        """Whether more is the same than can be by chance, and no guess of that is under way."""
        return not self.pending and at >= SURE and list(ids[at - SURE : at]) == list(ids[-SURE:])
