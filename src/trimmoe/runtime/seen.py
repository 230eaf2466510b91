"""What is known of a sequence's own tokens where the next one is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimmoe.runtime.guides import Guide

UNKNOWN = -1
"""In place of a token that has not come by yet."""


@dataclass(eq=False, kw_only=True, slots=True)
class Seen:
    """The tokens of one sequence by position, prompt first.

    Tokens that were only guessed may be put, and put anew once they were withdrawn: what is drawn
    for a position reads those before it only.
    """

    prompt: int
    """How many of them the user sent; what follows is the answer."""
    tokens: list[int] = field(default_factory=list)
    guide: Guide | None = None
    """What holds the answer to a grammar, if anything does."""

    def put(self, position: int, token: int) -> None:
        """The token at a position came by, perhaps before one ahead of it."""
        missing = position + 1 - len(self.tokens)
        if missing > 0:
            self.tokens += [UNKNOWN] * missing
        self.tokens[position] = token

    def at(self, position: int) -> int:
        """The token at a position, or `UNKNOWN`."""
        return self.tokens[position] if position < len(self.tokens) else UNKNOWN

    def before(self, position: int) -> Sequence[int]:
        """Prompt and answer up to a position."""
        return self.tokens[:position]

    def answer(self, position: int) -> Sequence[int]:
        """The answer up to a position."""
        return self.tokens[self.prompt : position]
