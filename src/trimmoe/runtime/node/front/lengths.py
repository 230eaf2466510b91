"""How many tokens the answers come to that have begun at one server."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_TOKENS = 100.0
"""That an answer is taken to have before any is over; counts as one that is."""
_LATELY = 5
"""Answers that say how long the next one is."""


@dataclass(kw_only=True, slots=True)
class Lengths:
    """Counted when they begin: prompts of many that begin at once are read before any of their
    tokens are made, and yet are read for those."""

    due: float = 0.0
    """Tokens of all that have begun, by how long those were that were over then."""
    _tokens: float = FIRST_TOKENS
    _ended: int = 1

    def began(self) -> None:
        """An answer begins."""
        self.due += self._tokens

    def ended(self, tokens: int) -> None:
        """One is over, with so many tokens."""
        self._ended = min(self._ended + 1, _LATELY)
        self._tokens += (tokens - self._tokens) / self._ended
