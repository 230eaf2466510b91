"""Everything servers tell each other about sequences and the rows of their tokens.

Hidden states travel as tensors beside the message; how many rows of which unit they are, `Rows`
says. Fields that a newer minor version of the protocol has appended are passed over
(`wire.protocol`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from trimmoe.core.wave import Wave
from trimmoe.runtime.node.records.rows import Rows
from trimmoe.runtime.node.records.tokens import After, Token

if TYPE_CHECKING:
    from torch import Tensor

ANY_POSITION = -1
NOBODY = -1
NO_TOKEN = -1
_ACCESS_SHIFT = 48


def access_of(sequence: int) -> int:
    """The server whose user a sequence belongs to: part of its number."""
    return sequence >> _ACCESS_SHIFT


def first_sequence(access: int, incarnation: int) -> int:
    """Where an access server's sequence numbers begin; `incarnation` tells its lives apart."""
    return (access << _ACCESS_SHIFT) + ((incarnation & 0xFFFF_FFFF) << 16)


class SamplingSpec(msgspec.Struct, frozen=True, array_like=True):
    """`runtime.sampling.Sampling` on the wire."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stream: int
    logprobs: int | None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    grammar: str = ""
    prompt_logprobs: int | None = None


class SeenSpec(msgspec.Struct, frozen=True, array_like=True):
    """`runtime.seen.Seen` on the wire."""

    prompt: int
    tokens: list[int]


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Any of the messages below."""


class Prefix(msgspec.Struct, frozen=True, array_like=True):
    """A sequence on the same route that begins with the same tokens."""

    sequence: int
    length: int
    """How many."""
    moves: bool
    """Whether it is over and its place may be taken; else its states are copied."""


class Reserve(Message, frozen=True, tag="reserve"):
    """Access server to every server of a route: keep a place for this sequence. Where there is an
    encoder, beside it what that made of the prompt, [S, d]."""

    sequence: int
    route: list[int]
    """Server of each layer."""
    sampling: SamplingSpec
    budget: float
    """Quality loss that a token of it may incur."""
    waits: bool
    """Whether to wait for a place or to be refused if there is none."""
    seen: SeenSpec | None = None
    """What the sequence begins with, where draws look back."""
    prefix: Prefix | None = None
    """Whose states it may begin with."""
    trimmed: int = 0
    """Tokens that it begins with which may be decided upon; those after them are read exactly."""


class Granted(Message, frozen=True, tag="granted"):
    """The answer, to the access server."""

    sequence: int
    ok: bool
    kept: int = 0
    """Positions of which the states are there already."""


class Release(Message, frozen=True, tag="release"):
    """Access server to every server of a route: these sequences are over."""

    sequences: list[int]


class Retain(Message, frozen=True, tag="retain"):
    """Access server to every server of a route: these are over too, but others may begin with their
    states, for as long as nobody needs their places."""

    sequences: list[int]


class Evicted(Message, frozen=True, tag="evicted"):
    """To the access server: somebody needed the place of a sequence that was retained."""

    sequence: int


class Withdraw(Message, frozen=True, tag="withdraw"):
    """Access server to every server of a route: what set out before this `epoch`-th time is void
    from a position on."""

    sequence: int
    start: int
    epoch: int


class Prompt(Message, frozen=True, tag="prompt"):
    """Access server to kappa(0); beside it the token ids, int32 [T]."""

    sequence: int
    start: int = 0
    """Position of the first of them; the states of what is before it are there."""
    epoch: int = 0
    """As of `Rows`."""
    wants: int = 0
    """What drafts of what follows its first token are wanted, as of `Rows`."""


class Start(Message, frozen=True, tag="start"):
    """Access server to kappa(0): generated tokens enter the first layer."""

    rows: Rows
    tokens: list[int]
    wave: bytes = b""


class Dispatch(Message, frozen=True, tag="dispatch"):
    """To a server of some slots; beside it the states before the experts [n, d], the experts
    int32 [n, k], -1 where a slot runs elsewhere, and the gates float32 [n, k]."""

    layer: int
    rows: Rows
    destinations: list[int]
    """Where each unit gathers."""
    decoding: bool
    checks: int = NOBODY
    """The server whose result this is to be compared with, if that is all it is for."""


class Partial(Message, frozen=True, tag="partial"):
    """A server's slots' sum, to where the layer gathers; beside it [n, d], as `records.sums` parts
    it."""

    layer: int
    rows: Rows
    decoding: bool
    raw: bool = False
    """Whether it is the server's own share of rows that came raw, which never travels: it takes the
    place of what came."""
    wide: list[int] = []
    """Rows, ascending, for which several slots ran."""
    checks: int = NOBODY
    """As of the dispatch."""


class Onward(Message, frozen=True, tag="onward"):
    """kappa(l) to kappa(l+1); beside it one vector per row, [n, d], as `records.sums` parts it.

    For most rows that is the residual with the shared expert and the slots that ran at kappa(l).
    For those in `raw` it is the state before the experts: the receiver runs the shared expert and
    its own slots, whose experts and gates are the last two tensors.
    """

    layer: int
    rows: Rows
    awaited: list[list[int]]
    """Servers whose partial sums each unit has to wait for."""
    raw: list[int]
    """Rows, ascending."""
    probes: list[int]
    """Token each unit would have exited with, being audited; NO_TOKEN otherwise."""
    decoding: bool
    """Whether these are generated tokens; otherwise one chunk of a prompt."""
    last: bool
    """Whether the chunk is the prompt's last."""
    spent: list[float] = []
    """Quality loss of each row of a chunk so far, where stand-ins ran; empty if none did."""
    wave: bytes = b""
    entering: bool = False
    """Whether nothing is decided where these rows gather: for the engine they are about to enter
    the next layer."""
    wide: list[int] = []
    """Rows, ascending, for which slots ran that others are to be added to."""
    checked: list[list[tuple[int, int]]] = []
    """By unit: servers awaited whose results are compared, each with who computes them a second
    time; empty if none are."""


class Propagate(Message, frozen=True, tag="propagate"):
    """Exited tokens' states [n, d], for the layers from `layer` on."""

    layer: int
    rows: Rows
    frozen: bool
    """Whether the states stand still; otherwise the receiver's layers change them, and it passes
    them on."""


class Tokens(Message, frozen=True, tag="tokens"):
    """To the access server: tokens of its users."""

    tokens: list[Token]


class Followed(Message, frozen=True, tag="followed"):
    """To the access server: tokens of its users that had exited passed the last layer, or what
    tokens cost that were withdrawn."""

    after: list[After]


class Lost(Message, frozen=True, tag="lost"):
    """To the access server: what was under way for a position may have been lost."""

    sequence: int
    position: int
    """ANY_POSITION: cached states may be lost too."""
    disputed: bool = False
    """Whether it was given up because servers gave different results."""


class Stranded(Message, frozen=True, tag="stranded"):
    """To the access server: an expert has no live host and no substitute within budget."""

    sequence: int
    layer: int
    start: int
    """Position of the first row that needs it."""
    epoch: int = 0
    """As of `Rows`."""


class Ask(Message, frozen=True, tag="ask"):
    """Access server to everybody: does anyone work at this sequence?"""

    sequence: int


class InHand(Message, frozen=True, tag="in_hand"):
    """To the access server: this server does."""

    sequence: int


class Running(Message, frozen=True, tag="running"):
    """To each server, as soon as one begins or is over: answers to the sender's users that are
    under way."""

    count: int


class Vitals(msgspec.Struct, frozen=True, array_like=True):
    """What a server says of itself for people to look at; nothing is decided with it."""

    queued: int
    """Pieces of work that wait to be computed."""
    tokens: int
    """That its users were given since it started."""
    memory_bytes: int
    uptime_s: float
    sent_bytes: list[int]
    """To each server since it started."""


class LoadReport(Message, frozen=True, tag="weather"):
    """What a server measures, told to all now and then."""

    delay_s: list[float | None]
    """To each server."""
    bandwidth_bytes_per_s: list[float | None]
    waiting_s: float
    kv_usage: float
    unreachable: list[int]
    busy: float = 0.0
    """Share of the time that it computed for tokens and prompts."""
    loss_weights: list[float] = []
    """omega_D that its users' tokens set out with."""
    running: int = 0
    """Answers to its users that are under way."""
    vitals: Vitals | None = None
    prompts: float = 0.0
    """Share of the time that it computed for prompts."""
    tokens_per_s: float = 0.0
    """That its users were shown, or will be of answers that began, whichever are more."""


MESSAGE_TYPES: tuple[type[msgspec.Struct], ...] = (
    Reserve,
    Granted,
    Release,
    Retain,
    Evicted,
    Withdraw,
    Prompt,
    Start,
    Dispatch,
    Partial,
    Onward,
    Propagate,
    Tokens,
    Followed,
    Lost,
    Stranded,
    Ask,
    InHand,
    Running,
    LoadReport,
)
"""What a node's transport has to be made for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """A message on its way to a server, perhaps this one."""

    to: int
    message: Message
    tensors: tuple[Tensor, ...] = ()
    wave: Wave | None = None
    """What `message.wave` holds, not packed yet."""
