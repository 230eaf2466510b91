"""One generated token and what became of it."""

from __future__ import annotations

from dataclasses import dataclass

from trimmoe.core.ledger import EXECUTED, REMOTE, STOOD_IN, SUBSTITUTED, Kind
from trimmoe.experiments.answering import Piece


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """One token of an answer; `str(token)` is its text.

    The first token of an answer comes out of the prompt, which runs exactly and is not accounted
    for: it has no layers and costs nothing.

    Examples:
        >>> from trimmoe import Kind, Token
        >>> layers = (Kind.LOCAL_EXACT, Kind.REMOTE_SUBSTITUTE, Kind.SKIPPED)
        >>> token = Token(text=" sea", id=5, guessed=False, layers=layers, hops=2, sent_bytes=4608,
        ...               expected_s=0.004, spent=0.01)
        >>> print(token, token.executed, token.remote, token.substituted, token.skipped)
         sea 2 1 1 1
    """

    text: str
    """What it adds to the text: often a word, sometimes nothing yet."""
    id: int
    """Its number in the model's vocabulary."""
    guessed: bool
    """Whether its user's server had guessed it, so that the next one set out at once."""
    layers: tuple[Kind, ...]
    """What became of each MoE layer when it was predicted, in order."""
    hops: int
    """Hidden states that crossed a link for it, those of wrong guesses included."""
    sent_bytes: int
    """Their size."""
    expected_s: float
    """Seconds that it takes on the plan's machines and links, by the cost model. Nothing is
    measured: answers are made in this process."""
    spent: float
    """What it was charged to the quality budget: a flip rate."""

    @classmethod
    def of(cls, piece: Piece) -> Token:
        """From what the driver says of it."""
        ledger = piece.ledger
        return cls(
            text=piece.text,
            id=piece.token,
            guessed=piece.guessed,
            layers=() if ledger is None else tuple(map(Kind, ledger.kinds.argmax(1).tolist())),
            hops=0 if ledger is None else ledger.hops,
            sent_bytes=0 if ledger is None else ledger.total_bytes,
            expected_s=0.0 if ledger is None else ledger.delay_s,
            spent=0.0 if ledger is None else ledger.loss,
        )

    @property
    def executed(self) -> int:
        """Layers that ran, with substitutes and stand-ins or without."""
        return sum(kind in EXECUTED for kind in self.layers)

    @property
    def remote(self) -> int:
        """Those of them of which some expert ran on another server than the token was on."""
        return sum(kind in REMOTE for kind in self.layers)

    @property
    def substituted(self) -> int:
        """Those of them in which a similar expert stood in for one that the router chose."""
        return sum(kind in SUBSTITUTED for kind in self.layers)

    @property
    def stood_in(self) -> int:
        """Those of them in which a copy in few bits stood in for an expert, and no other did."""
        return sum(kind in STOOD_IN for kind in self.layers)

    @property
    def skipped(self) -> int:
        """Layers whose experts were left out."""
        return self.layers.count(Kind.SKIPPED)

    @property
    def exited(self) -> int:
        """Layers that nobody waited for, since the token was sure before them."""
        return self.layers.count(Kind.EXITED)

    def __str__(self) -> str:
        return self.text
