"""Requests on their way, as the access server keeps them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trimmoe.core.events import Receipt, SequenceOpened
from trimmoe.core.ledger import Ledger
from trimmoe.engine.lead import OWN, Chunks, Lead
from trimmoe.runtime.node.front.drafts import Pending
from trimmoe.runtime.node.front.guess_prices import GuessPrices
from trimmoe.runtime.node.front.lookup import Lookup
from trimmoe.runtime.node.records.encoder import Encoder
from trimmoe.runtime.node.records.messages import Parcel, Prefix
from trimmoe.runtime.node.records.output import Arrival
from trimmoe.runtime.node.records.readings import Reading
from trimmoe.runtime.node.records.rows import wanted
from trimmoe.runtime.node.records.tokens import Token
from trimmoe.runtime.node.watch.planner import Planner
from trimmoe.runtime.picture import Picture, RequestPicture
from trimmoe.runtime.seen import Seen
from trimmoe.runtime.service import GenerationRequest, Health, ServiceStats
from trimmoe.runtime.streams import Item

if TYPE_CHECKING:
    from torch import Tensor

NO_EXPERT, REFUSED, SHORT = "no expert", "refused", "short"


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """What a sequence may begin with."""

    prefix: Prefix
    read: int
    """Up to where this server has read that by itself."""


@dataclass(eq=False, kw_only=True, slots=True)
class Attempt:
    """One sequence under way."""

    sequence: int
    route: tuple[int, ...]
    trouble: asyncio.Future[str]
    """Why it is over; empty if the answer is complete."""
    begun: Begun | None = None
    """What was read of it before."""
    grants: dict[int, asyncio.Future[bool]] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)
    """Positions of which servers have the states already."""
    expected: int | None = None
    """The same as taken for granted, where the prompt set out before servers said so."""
    prompt: int = 0
    """Tokens that it began with."""
    start: int = 0
    """Those of them that were not read again."""
    exact: int = 0
    """Up to where its states are those of tokens that were read whole."""
    position: int = 0
    """Of the token that is awaited."""
    fed: int = 0
    """First position of what is under way."""
    last_fed: int = 0
    """The last position of it."""
    heard: int = 0
    """The last position that full depth has named a token for, of those that set out since any were
    withdrawn."""
    epoch: int = 0
    """How often tokens of it were withdrawn."""
    pending: Pending = field(default_factory=Pending)
    """Tokens that came and are not shown yet."""
    unfed: Token | None = None
    """One of them that nothing follows before the drafts ahead of it are confirmed."""
    lead: Lead | None = None
    """Where this server guesses ahead: how long its tokens take by that."""
    chunks: Chunks | None = None
    """The same where so many guesses are verified at a time."""
    chunk_end: int = 0
    """Position behind the guesses that are verified together now."""
    at_home: bool = False
    """Whether all that its tokens need is on this server, so that full depth takes no longer than
    an own pass would."""
    holds: bool = False
    """Whether guesses may wait for those upon them, to set out together."""
    held: list[Token] = field(default_factory=list)
    """Those that do."""
    undrafted: int = 0
    """Tokens in a row that came without drafts, though a draft head was asked for some."""
    lookup: Lookup = field(default_factory=Lookup)
    """What it may copy."""
    early: dict[int, Token] = field(default_factory=dict)
    """Tokens that overtook the one that is awaited, by position."""
    seen: Seen | None = None
    """What guesses are drawn after, where draws look back."""
    read: int = 0
    """Up to where this server has read the sequence by itself, or is about to."""
    drafted: int = 0
    """The same of its draft model."""
    reading: Reading | None = None
    """What it is about to."""
    stranded: int | None = None
    """Position of a token under way that nobody can serve."""
    news: bool = True
    """Whether anything was heard of it since it was last looked at."""
    asked: bool = False
    """Whether everybody was asked for it since."""

    @property
    def is_through(self) -> bool:
        """Whether nothing is under way whose token has not come."""
        return self.heard > self.last_fed

    @property
    def wants(self) -> int:
        """What drafts behind its next token are wanted, as `Rows` has it."""
        lead = self.lead
        return wanted(lead.likely) if lead is not None and lead.along else 0

    @property
    def together(self) -> int:
        """How many guesses are to set out together."""
        return self.lead.together if self.holds and self.lead is not None else 1

    @property
    def servers(self) -> list[int]:
        return sorted(set(self.route))

    @property
    def has_read(self) -> int:
        """Up to where this server is through with its own reading."""
        reading = self.reading
        return self.read if reading is None or reading.by_draft_model else reading.start

    def read_by(self, source: int) -> int:
        """Up to where a source of guesses has read it, or is about to."""
        return self.read if source == OWN else self.drafted

    def goes_on_from(self, source: int, position: int) -> None:
        """Where that source reads on."""
        if source == OWN:
            self.read = position
        else:
            self.drafted = position

    def may_guess(self, position: int) -> bool:
        """Whether a guess for a position belongs to the chunk under way, which begins where there
        is word of all guesses; any may where there are no chunks."""
        if self.chunks is None:
            return True
        if not self.pending.drafts:
            self.chunk_end = position + self.chunks.guesses
        return position < self.chunk_end

    def stop_reading(self) -> None:
        """What this server is about to read by itself is not read, or another time."""
        if (reading := self.reading) is not None:
            self.goes_on_from(reading.source, reading.start)
            reading.void, self.reading = True, None

    def withdraw(self, position: int) -> None:
        """Tokens from a position on were withdrawn: they are read anew. What is read before them,
        such as a prompt, is as it was."""
        if self.reading is not None and self.reading.reaches(position):
            self.stop_reading()
        self.read, self.drafted = min(self.read, position), min(self.drafted, position)

    def strand(self) -> None:
        """It cannot go on if a stranded token is one of the answer; a draft may yet be wrong."""
        first = self.pending.unconfirmed
        if self.stranded is not None and (first is None or self.stranded < first):
            self.fail(NO_EXPERT)

    def granted(self, server: int, ok: bool, kept: int) -> None:
        """A server keeps a place for it or does not, and has the states of so many positions."""
        self.news = True
        grant = self.grants.get(server)
        if grant is None or grant.done():
            return
        self.kept[server] = kept
        grant.set_result(ok)
        if self.expected is not None and (not ok or kept < self.expected):
            self.fail(SHORT if ok else REFUSED)

    def fail(self, reason: str) -> None:
        """It cannot go on."""
        if not self.trouble.done():
            self.trouble.set_result(reason)
        for grant in self.grants.values():
            if not grant.done():
                grant.set_result(False)


@dataclass(eq=False, kw_only=True, slots=True)
class Job:
    """A request on its way."""

    request: GenerationRequest
    """As the layers read it: where there is an encoder, that reads the prompt, and they begin with
    a token of their own."""
    source: tuple[int, ...] = ()
    """What the encoder reads, if there is one."""
    encoded: Tensor | None = None
    """What it made of that, [S, d]."""
    since_s: float = 0.0
    """When it came, by the event loop's clock."""
    out: asyncio.Queue[Item] = field(default_factory=asyncio.Queue)
    tokens: list[int] = field(default_factory=list)
    """Made and handed out so far, here or where the answer began."""
    credit: float = 0.0
    """What those tokens left of their budget."""
    after: Ledger | None = None
    """What they cost after their answers, as far as it is known and was not handed out."""
    attempt: Attempt | None = None
    seated: bool = False
    refused: bool = False
    """Whether it set out in vain, so that it waits for its places from then on."""
    begun: Begun | None = None
    """What it left behind then."""
    cached: int = 0
    """Tokens of the prompt that its attempt did not read again."""
    task: asyncio.Task[None] | None = None

    def picture(self, now_s: float) -> RequestPicture:
        """How far it is."""
        made = len(self.tokens)
        begun = "answering" if made > len(self.request.received) else "reading"
        return RequestPicture(
            state=begun if self.seated else "waiting",
            prompt_tokens=len(self.request.prompt_ids),
            cached_tokens=self.cached,
            tokens=made,
            most_tokens=self.request.max_new_tokens,
            age_s=now_s - self.since_s,
        )

    def owe(self, ledger: Ledger) -> None:
        """This too is to be told with the next token."""
        self.after = ledger if self.after is None else self.after + ledger


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontEndContext:
    """What the front end needs of its server."""

    server: int
    kv_slots: int
    max_waiting: int
    patience_s: float
    ask: Callable[[int], None]
    """Ask all servers whether they work at a sequence."""
    planner: Planner
    post: Callable[[Parcel], None]
    make_way: Callable[[bool], None]
    """Have what was put out to a user sent soon; told whether before the next batch."""
    control: Callable[[Callable[[], None]], None]
    """Run something in the worker, before its next batch."""
    open_account: Callable[[SequenceOpened, tuple[int, ...]], None]
    begin_anew: Callable[[SequenceOpened, tuple[int, ...], int], None]
    """Open an account again of which tokens from a position on were withdrawn."""
    close_account: Callable[[int], None]
    prefix_cache: bool
    """Whether what was read is kept."""
    encoder: Encoder | None
    """What reads prompts, if the layers do not."""
    retire: Callable[[int, int, int], None]
    """Close an account and keep what this server has read of it, up to the first position; the
    sequence itself goes to the second one."""
    adopt: Callable[[int, Begun, int], None]
    """Have a sequence begin with what this server has read of another one, as far as a position."""
    settle: Callable[[tuple[Receipt, ...], list[bool]], None]
    arrive: Callable[[Arrival], None]
    guess: Callable[[Reading], None]
    prices: GuessPrices
    """What guesses take and are worth."""
    holds: Callable[[tuple[int, ...]], bool]
    """Whether guesses of sequences on a route gain by setting out together, and nothing that this
    server reads by itself waits for them."""
    is_home: Callable[[tuple[int, ...]], bool]
    """Whether all that tokens on a route need is here."""
    load_changed: Callable[[], None]
    """Told when an answer begins or is over."""
    chunk: int
    """Tokens of a prompt that are read at a time."""
    health: Callable[[], Health]
    stats: Callable[[int, int], ServiceStats]
    picture: Callable[[], Picture]
    ledger_shape: dict[str, int]
