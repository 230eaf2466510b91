"""What a user's server is told of its users' tokens: which they are, and what they cost."""

from __future__ import annotations

import msgspec

NO_KIND = 255


class LedgerSpec(msgspec.Struct, frozen=True, array_like=True):
    """A one-token ledger, or what a token cost after its answer."""

    kinds: bytes
    """One `Kind` per layer; empty after the answer. Where it `corrects`, NO_KIND in layers that are
    as they were told."""
    slots_run: int
    slots_dropped: int
    messages: bytes
    """uint16 [M, M]."""
    delay_s: float
    loss: float
    budget: float
    audits: int
    corrects: bool = False
    """Whether it turns the ledger of a token that was taken to exit into that of one that did not.
    """


class ReceiptSpec(msgspec.Struct, frozen=True, array_like=True):
    """`core.events.Receipt` on the wire, without what the message says anyway."""

    budget: float
    loss: float
    delay_s: float
    exit_confidence: float | None


class ChargeSpec(msgspec.Struct, frozen=True, array_like=True):
    """What stand-ins for experts without a live host cost a prompt."""

    tokens: int
    """Of the prompt, that any of them ran for."""
    loss: float
    """Summed over those tokens."""


class ScoreSpec(msgspec.Struct, frozen=True, array_like=True):
    """`runtime.scores.Score` on the wire."""

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class Token(msgspec.Struct, frozen=True, array_like=True):
    """The token that goes to `position` of a sequence."""

    sequence: int
    position: int
    token: int
    logprob: float | None
    top: list[tuple[int, float]]
    ledger: LedgerSpec | None
    receipt: ReceiptSpec | None
    """None if the account was settled where it is kept."""
    agrees: bool | None
    """Whether full depth agreed with an audited exit."""
    charge: ChargeSpec | None = None
    """Of the prompt that this token follows, if there is any."""
    epoch: int = 0
    """Of the unit that predicts it."""
    draft: bool = False
    """Whether full depth has not confirmed it yet."""
    scores: list[ScoreSpec] = []
    """Of the prompt that it follows, where they are asked for."""
    follows: list[int] = []
    """What a draft head takes to follow it, where that is wanted."""


class After(msgspec.Struct, frozen=True, array_like=True):
    """What became of a token that was answered before it had passed all layers."""

    sequence: int
    ledger: LedgerSpec
    agrees: bool | None
    """Whether full depth predicts what its exit did; None if it was withdrawn before."""
    token: Token | None = None
    """What full depth predicts, if its exit was a draft."""
