"""What its access server has of an answer and does not show yet.

A token predicted early is a draft until full depth has confirmed it, be it predicted on its way or
guessed by the access server itself. The next one sets out on it at once, and may be a draft itself,
or be through before word of the first has come. Where a draft was wrong everything after it is
withdrawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from trimmoe.core.ledger import Ledger
from trimmoe.runtime.node.records.tokens import Token
from trimmoe.runtime.service import Ahead

Kind = Literal["guess", "model", "head", "copy", "draft"]
GUESSED: tuple[Kind, ...] = ("guess", "model", "head")
"""By source, as `engine.lead` numbers them."""


@dataclass(eq=False, kw_only=True, slots=True)
class Entry:
    """One token of an answer."""

    token: Token
    ledger: Ledger | None
    confirmed: bool
    kind: Kind | None = None
    """Of what came ahead of full depth."""
    ahead: Ahead | None = None
    """What became of that, once it is known."""


@dataclass(kw_only=True, slots=True)
class Pending:
    """The tokens of one attempt that are not shown yet, by position."""

    entries: deque[Entry] = field(default_factory=deque)
    checks: dict[int, tuple[Token, Ledger]] = field(default_factory=dict)
    """What full depth said of drafts that are still on their way, by position."""

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def unconfirmed(self) -> int | None:
        """Position of the first draft, None if there is none."""
        return next((one.token.position for one in self.entries if not one.confirmed), None)

    @property
    def drafts(self) -> int:
        """How many are not confirmed."""
        return sum(not one.confirmed for one in self.entries)

    @property
    def tokens(self) -> list[int]:
        return [one.token.token for one in self.entries]

    def token_at(self, position: int) -> Token | None:
        """That of this position if there is one."""
        return next((one.token for one in self.entries if one.token.position == position), None)

    def source_at(self, position: int) -> int | None:
        """What guessed the token of this position; None where no source of guesses did."""
        kinds = (one.kind for one in self.entries if one.token.position == position)
        kind = next(kinds, None)
        return GUESSED.index(kind) if kind in GUESSED else None

    def add(self, token: Token, ledger: Ledger | None, kind: Kind = "draft") -> Token:
        """The next token came, if it is ahead of full depth then so; given back as it is to be
        followed."""
        entry = Entry(
            token=token,
            ledger=ledger,
            confirmed=not token.draft,
            kind=kind if token.draft else None,
        )
        self.entries.append(entry)
        if token.position in self.checks:
            _confirm(entry, *self.checks.pop(token.position))
        return entry.token

    def check(self, token: Token, ledger: Ledger | None) -> list[Entry] | None:
        """Full depth says what goes to a draft's position, and what that cost more. None if there
        is nothing to withdraw, or else what came after the draft, which was wrong."""
        for at, entry in enumerate(self.entries):
            if entry.token.position == token.position:
                early = entry.token.token
                _confirm(entry, token, ledger)
                if early == token.token:
                    return None
                after = len(self.entries) - at - 1
                popped = [self.entries.pop() for _ in range(after)]
                in_vain = (early, *(one.token.token for one in reversed(popped)))
                if entry.ahead is not None:
                    entry.ahead = replace(entry.ahead, withdrawn=in_vain)
                return popped
        # It took the quicker way here.
        assert ledger is not None
        self.checks[token.position] = (token, ledger)
        return None

    def shown(self) -> Iterator[Entry]:
        """Those that may be shown now, and are not kept any longer."""
        while self.entries and self.entries[0].confirmed:
            yield self.entries.popleft()


def _confirm(entry: Entry, token: Token, ledger: Ledger | None) -> None:
    if entry.kind is not None:
        entry.ahead = Ahead(kind=entry.kind, right=entry.token.token == token.token)
    # A guess has cost nothing by itself.
    if entry.ledger is not None and ledger is not None:
        ledger = entry.ledger + ledger
    entry.ledger = ledger
    entry.token, entry.confirmed = token, True


@dataclass(kw_only=True, slots=True)
class Guessing:
    """How it went so far."""

    made: int = 0
    """Guesses on which something set out and of which word has come."""
    right: int = 0
    copied: int = 0
    """Guesses that were copied from what came before; no word of them need have come."""

    def checked(self, *, right: bool) -> None:
        """Word of one has come."""
        self.made += 1
        self.right += right
