"""What a driver tells the engine (events) and what the engine tells a driver (commands).

A wave is a batch of tokens, one per sequence, that move through the layers together. Rows are
positions in the wave as it arrived; arrays in events follow the rows of the command they answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimmoe.core.ledger import Ledger
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.core.wave import Wave


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceOpened:
    """A request was admitted: its route is fixed and its budget account opened."""

    sequence: int
    access: int
    budget: float
    """D-bar: quality loss credited per generated token, >= 0."""
    confidence: float
    """p_J: confidence its exits need; above 1 nothing exits."""
    route: int | None = None
    """Row of the engine's routes; None is the one of its access server."""
    balance: float = 0.0
    """Credit it brings along, if it was served before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceClosed:
    """A request ended; its account is dropped."""

    sequence: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensArrived:
    """The next token of each of n open sequences is ready for the first layer."""

    wave: int
    sequences: tuple[int, ...]
    draws: FloatArray
    """One uniform number in [0, 1) per token: all the randomness the engine uses, [n]."""
    guessed: BoolArray | None = None
    """Which set out on a guess, before those ahead of them have told what they spend: they may
    spend what they are credited themselves and nothing that was left, [n]. None: no token does."""
    departing: bool = False
    """Whether they enter it elsewhere, or with others: answered with `Depart`, not `Attend`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensImported:
    """Tokens came from another server: about to enter `tokens.layer`, or, if `executing`, with
    the experts of that layer running."""

    wave: int
    tokens: Wave
    executing: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensExported:
    """Rows of a wave go on elsewhere; answered with `Depart`."""

    wave: int
    rows: IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Routed:
    """Attention and router of a layer ran for the rows of an `Attend`."""

    wave: int
    experts: IntArray
    """Activated set, first expert first, [n, k]."""
    masses: FloatArray
    """Softmax mass of each activated expert, [n, k]."""
    importance: FloatArray
    """I of (4), [n]."""
    steadiness: IntArray
    """Steadiness class of the state that the router read, [n]."""
    probabilities: FloatArray | None = None
    """The router's whole softmax, [n, E], for policies that route by themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Executed:
    """The experts of a layer ran for the rows of an `Execute`."""

    wave: int
    confidence: FloatArray
    """xi of (7) on the layer's output, [n]; ignored for rows that skipped."""
    exit_at: IntArray
    """Predicted exit layer (36), 1..N, [n]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentRan:
    """Tokens that came went through layers from `tokens.layer` on in one go, where no token exits.

    Of the first `settled` of these layers every activated expert ran where the tokens are, so that
    there was nothing to decide. Of the one after them, if `experts` has one more, attention and
    router ran; answered with `Execute`. After that all rows depart, about to enter the next layer,
    unless it was the last one.
    """

    wave: int
    tokens: Wave
    experts: IntArray
    """Activated sets, first expert first, [n, L, k], L > 0."""
    settled: int
    """L or L - 1."""
    routed: Routed | None = None
    """What is known of that last layer, for a policy that decides upon it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Audited:
    """Full-depth predictions of the rows of a `Probe` are known."""

    wave: int
    agrees: BoolArray
    """Whether the prediction at the would-be exit was that of full depth, [n]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """What a finished token leaves to the account of its sequence."""

    sequence: int
    budget: float
    """What it was credited."""
    loss: float
    """What it spent."""
    delay_s: float
    exit_confidence: float | None
    """xi at its exit; None at full depth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """Tokens of sequences that were opened here finished on other servers."""

    receipts: tuple[Receipt, ...]


Event = (
    SequenceOpened
    | SequenceClosed
    | TokensArrived
    | TokensImported
    | TokensExported
    | Routed
    | Executed
    | SegmentRan
    | Audited
    | Settled
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attend:
    """Run attention and router of a layer; answer with `Routed`."""

    wave: int
    layer: int
    rows: IntArray
    server: IntArray
    """Where each row is, [n]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Execute:
    """Run the slots of a layer and gather the result; answer with `Executed`."""

    wave: int
    layer: int
    rows: IntArray
    slot_expert: IntArray
    """What each slot runs, an expert or a copy that stands in for one, as `core.stand_ins` numbers
    them; -1 = dropped, [n, k]."""
    slot_server: IntArray
    """[n, k]."""
    destination: IntArray
    """Where the result gathers, [n]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Note the prediction of these rows after `layer`; when full depth has spoken, `Audited`."""

    wave: int
    layer: int
    rows: IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Complete:
    """Predict the next token of these rows from their last hidden state.

    Rows that exited leave that state in the layers from `layer` on, as `ExitState` has it; those
    that go on whole stay in the wave, and `Trailed` tells of their end. A draft is not shown before
    that confirms it. For rows that ran to full depth `layer` is N.
    """

    wave: int
    layer: int
    rows: IntArray
    server: IntArray
    """Where each row is, [n]."""
    ledgers: tuple[Ledger, ...]
    """What each row cost, one-token ledgers."""
    receipts: tuple[Receipt, ...]
    """Of those rows whose sequence was opened elsewhere: tell that server `Settled`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trailed:
    """Rows that exited before have passed the last layer too; whether it predicts what they did is
    `Audited`."""

    wave: int
    rows: IntArray
    server: IntArray
    """Where each row is, [n]."""
    ledgers: tuple[Ledger, ...]
    """What each row cost after its exit: of no token, none of it in the token's delay."""
    missed: tuple[Ledger, ...] = ()
    """The same if its exit was a draft and wrong, so that all of it was waited for; empty where
    exits are final."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Depart:
    """Rows that left a wave, to be imported where they arrive."""

    wave: int
    tokens: Wave


@dataclass(frozen=True, kw_only=True, slots=True)
class Strand:
    """An expert of these rows has no host that is alive, and no substitute is within budget: their
    requests cannot go on."""

    wave: int
    rows: IntArray


Command = Attend | Execute | Probe | Complete | Trailed | Depart | Strand
