"""What became of each token of an answer, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel

from trimmoe.api.text import TextCodec
from trimmoe.core.ledger import STOOD_IN, SUBSTITUTED, Kind, Ledger
from trimmoe.core.specs import IntArray
from trimmoe.runtime.service import TokenEvent

Became = Literal[
    "prompt",
    "local",
    "remote",
    "skipped",
    "stand-in",
    "substitute",
    "exited",
    "guessed",
    "withdrawn",
]
LETTERS = {
    Kind.LOCAL_EXACT: "l",
    Kind.LOCAL_SUBSTITUTE: "s",
    Kind.REMOTE_EXACT: "r",
    Kind.REMOTE_SUBSTITUTE: "S",
    Kind.SKIPPED: "-",
    Kind.EXITED: "x",
    Kind.LOCAL_STAND_IN: "c",
    Kind.REMOTE_STAND_IN: "C",
}
"""What stands for a layer in `TokenTrace.layers`."""
_WORDS: tuple[tuple[Became, tuple[Kind, ...]], ...] = (
    ("exited", (Kind.EXITED,)),
    ("substitute", SUBSTITUTED),
    ("skipped", (Kind.SKIPPED,)),
    ("stand-in", STOOD_IN),
    ("remote", (Kind.REMOTE_EXACT,)),
)
"""The word for a token some of whose layers are of these kinds; the first that is true."""


class TokenTrace(BaseModel):
    """What became of one generated token."""

    token: int
    text: str
    """Of this token alone; only part of a character may be broken."""
    became: Became
    """The one word for it. `prompt`: it came out of the prompt, which runs exactly. `guessed`: its
    server had guessed it, and rightly; `withdrawn`: something else had set out in its place and was
    withdrawn; else what is least like the exact model on one server in its layers."""
    layers: str = ""
    """A letter per layer: `l` local, `r` with an expert on another server, `s` with a substitute,
    `S` both, `c` with the stand-in of an expert, `C` that and an expert on another server, `-`
    skipped, `x` exited before it; empty for a token out of the prompt."""
    ahead: Literal["guess", "model", "head", "copy", "draft"] | None = None
    """Whether something set out for it before full depth had predicted it: a guess of its server, a
    copy of what came before, or the draft of an exit."""
    withdrawn: list[str] = []
    """Texts of the tokens that were withdrawn for it."""
    hops: int = 0
    """Hidden vectors that crossed a link for it, those sent in vain included."""
    budget_spent: float = 0.0
    expected_delay_s: float = 0.0


def traces(events: Sequence[TokenEvent], codec: TextCodec) -> list[TokenTrace]:
    """Of some tokens."""
    return [trace_of(event, codec) for event in events]


def trace_of(event: TokenEvent, codec: TextCodec) -> TokenTrace:
    """Of one token."""
    kinds = None if event.ledger is None else _kinds(event.ledger)
    ahead, told = (
        event.ahead,
        TokenTrace(
            token=event.token, text=codec.token_text(event.token), became=_became(event, kinds)
        ),
    )
    if kinds is not None:
        told.layers = "".join(LETTERS[Kind(kind)] for kind in kinds.tolist())
    if event.ledger is not None:
        told.hops = event.ledger.hops
        told.budget_spent = event.ledger.loss
        told.expected_delay_s = event.ledger.delay_s
    if ahead is not None:
        told.ahead = ahead.kind
        told.withdrawn = [codec.token_text(one) for one in ahead.withdrawn]
    return told


def _became(event: TokenEvent, kinds: IntArray | None) -> Became:
    ahead = event.ahead
    if ahead is not None and not ahead.right:
        return "withdrawn"
    if ahead is not None and ahead.kind != "draft":
        return "guessed"
    if kinds is None:
        return "prompt"
    there = {Kind(kind) for kind in kinds.tolist()}
    for word, some in _WORDS:
        if there.intersection(some):
            return word
    return "local"


def _kinds(ledger: Ledger) -> IntArray | None:
    """The `Kind` of each layer, [N]; None for a ledger that is not of one generated token."""
    # What followed tokens before it may be told along with it, and has no layers of its own.
    single = ledger.tokens == 1 and (ledger.kinds.sum(1) == 1).all()
    return ledger.kinds.argmax(1) if single else None
