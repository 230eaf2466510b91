"""What followed the same words before: guesses that cost nothing, where an answer copies.

Summaries, code and quotations repeat spans of what was read; small models repeat themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trimmoe.engine.lead import Lead

SHORTEST, SURE = 3, 8
"""Tokens that must be the same: to guess at all, and to guess although that was wrong lately."""
MOST = 8
"""Guesses under way at once."""
_WRONG = 3
"""Right ones that one wrong one outweighs."""
_FIRST, _FIRST_COUNTS, _LATELY = 0.7, 4, 20
"""Chance that a text is taken to go on as it did before, for how many tokens of it that counts, and
the most that count at all."""


@dataclass(eq=False, kw_only=True, slots=True)
class Chance:
    """How often a text goes on as it did before."""

    chance: float = _FIRST
    counted: int = _FIRST_COUNTS

    def learn(self, right: bool) -> None:
        """It went on so, or otherwise."""
        self.counted = min(self.counted + 1, _LATELY)
        self.chance += (right - self.chance) / self.counted


@dataclass(eq=False, kw_only=True, slots=True)
class Lookup:
    """Of one sequence."""

    trust: int = 1
    """Guesses that may be under way, by how many were right lately."""
    short: Chance = field(default_factory=Chance)
    """After few tokens that are the same, by the prompt and what is confirmed of the answer."""
    long: Chance = field(default_factory=Chance)
    """After many."""
    pending: set[int] = field(default_factory=set)
    """Positions of those under way."""
    _after: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Where a run of tokens was last followed by another one."""
    _known: int = SHORTEST

    def learn(self, ids: Sequence[int]) -> None:
        """These are the tokens so far, those before that are among them."""
        for end in range(self._known, len(ids)):
            run = tuple(ids[end - SHORTEST : end])
            if (at := self._after.get(run)) is not None:
                self._chance(ids, at, end).learn(ids[at] == ids[end])
            self._after[run] = end
        self._known = max(self._known, len(ids))

    def guess(self, ids: Sequence[int], lead: Lead) -> int | None:
        """What follows tokens, the last of which may be guesses themselves; None if that is not
        known, was wrong too often, or other guesses are expected to bring the next token sooner."""
        at = self._after.get(tuple(ids[-SHORTEST:]))
        if at is None or at >= len(ids) or len(self.pending) >= MOST:
            return None
        found = self._chance(ids, at, len(ids))
        if len(self.pending) >= self.trust and (self.pending or found is self.short):
            return None
        return ids[at] if lead.pays(found.chance) else None

    def checked(self, position: int, *, right: bool) -> None:
        """Word of a position has come; of the guesses behind a wrong one none will."""
        if position in self.pending:
            self.pending.remove(position)
            self.trust = min(self.trust + 1, MOST) if right else max(self.trust - _WRONG, 0)
        if not right:
            self.pending.clear()

    def _chance(self, ids: Sequence[int], at: int, end: int) -> Chance:
        """Of what follows the tokens up to `end`, as it followed those up to `at`, by how much is
        the same: whether more than can be by chance."""
        same = at >= SURE and list(ids[at - SURE : at]) == list(ids[end - SURE : end])
        return self.long if same else self.short
