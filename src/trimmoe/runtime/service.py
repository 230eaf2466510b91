"""The seam between HTTP and whatever generates: one process or a cluster.

A back end turns a `GenerationRequest` into a stream of `TokenEvent`s. The API on this side knows
text, HTTP and metrics; the back end knows tokens, servers and budgets.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from trimmoe.core.ledger import Ledger
from trimmoe.core.profile import Profile
from trimmoe.core.specs import IntArray
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.counters import ExpertUse
from trimmoe.runtime.guides import guides_of
from trimmoe.runtime.picture import Picture
from trimmoe.runtime.sampling_params import Sampling
from trimmoe.runtime.scores import Score
from trimmoe.runtime.seen import Seen
from trimmoe.runtime.served import ServedModel

FinishReason = Literal["stop", "length"]
NEVER_EXIT = 2.0
"""A confidence that no exit head can reach."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One prompt, one answer."""

    request_id: str
    prompt_ids: tuple[int, ...]
    """Never empty."""
    max_new_tokens: int
    """At least 1; with those of `received`."""
    received: tuple[int, ...] = ()
    """The answer's first tokens, where it goes on that was begun elsewhere; fewer than
    `max_new_tokens`, and none that ends it."""
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: frozenset[int] = frozenset()
    """Generation ends after any of these, with finish reason `stop`."""
    quality_budget: float | None = None
    """D-bar per generated token; None takes the back end's own."""
    confidence: float | None = None
    """p_J that exits need; None takes the back end's own."""
    exact: bool = False
    """Every layer and every target expert of every token, whatever else is asked for."""

    def __post_init__(self) -> None:
        assert self.prompt_ids
        assert self.max_new_tokens >= 1
        assert len(self.received) <= self.max_new_tokens

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens that there are of the sequence."""
        return self.prompt_ids + self.received

    def seen(self, model: ServedModel) -> Seen | None:
        """What there is of the sequence, for draws that look back; None where they do not."""
        if not self.sampling.looks_back:
            return None
        return Seen(
            prompt=len(self.prompt_ids),
            tokens=list(self.ids),
            guide=guides_of(model).guide(self.sampling.grammar),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Ahead:
    """What was taken for a token before full depth had predicted it, and set out in its place."""

    kind: Literal["guess", "model", "head", "copy", "draft"]
    """Guessed by its user's server or that one's draft model, or copied from what came before, or
    predicted at an exit."""
    right: bool
    withdrawn: tuple[int, ...] = ()
    """Tokens that were withdrawn since it was wrong: itself and those that followed it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEvent:
    """One generated token."""

    token: int
    logprob: float | None = None
    """Natural logarithm; None unless `Sampling.logprobs` asked for it."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """(token, logprob), best first."""
    prompt: tuple[Score, ...] = ()
    """Of the prompt's tokens but the first, on the first event alone and only if
    `Sampling.prompt_logprobs` asked for it."""
    ledger: Ledger | None = None
    """What predicting it cost; None for the first, which the prompt predicts, unless experts of
    the prompt had to be substituted: then what that was charged."""
    ahead: Ahead | None = None
    """None if nothing set out for it before it was predicted."""
    cached_tokens: int = 0
    """Of the prompt, that were not read again since a request before began with them; told with the
    first token."""
    finish_reason: FinishReason | None = None
    """Set on the last event of a stream, and only there."""


class TokenStream(Protocol):
    """The tokens of one answer."""

    def __aiter__(self) -> AsyncIterator[TokenEvent]: ...

    async def __anext__(self) -> TokenEvent:
        """The next token; raises `Unavailable` if it can no longer be made."""
        ...

    async def aclose(self) -> None:
        """Give up the answer and free what it holds; harmless after the end.

        Returns without waiting; no work starts for this request after it. A stream that was not
        read to its end must be closed.
        """
        ...


class ServiceError(Exception):
    """A request that cannot be served now or as asked; the message is for its sender."""


class Overloaded(ServiceError):
    """Too many requests wait already (HTTP 429)."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("Too many requests are waiting; try again shortly.")
        self.retry_after_s = retry_after_s


class Unavailable(ServiceError):
    """Nothing can be generated now: starting, stopping, or servers are lost (HTTP 503)."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class RequestTooLong(ServiceError):
    """Prompt and answer exceed the context (HTTP 400)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """Whether requests can be served."""

    ok: bool
    reason: str = ""
    """Why not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkStats:
    """One directed link between two servers."""

    source: str
    destination: str
    size_bytes: int
    """Hidden vectors sent since the start."""
    round_trip_s: float | None
    """There and back; None while unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceStats:
    """What `/metrics` asks a back end for at each scrape. Counts are since the start."""

    running: int
    waiting: int
    kv_cache_usage: float
    """Share of the KV cache's room that is taken, 0..1; of the fullest server in a cluster."""
    links: tuple[LinkStats, ...] = ()
    expert_executions: IntArray = field(
        default_factory=lambda: np.zeros((0, 0, len(ExpertUse)), dtype=np.int64)
    )
    """Slots by layer, activated expert and `ExpertUse`, [N, E, 6]."""
    audits: int = 0
    """Exits that were due but ran to full depth to be checked."""
    false_exits: int = 0
    """Audited exits whose prediction full depth did not share."""
    guesses: int = 0
    """Tokens that set out on a guess of their user's server and were checked."""
    right_guesses: int = 0
    prefix_queries: int = 0
    """Tokens of prompts that were looked for among what had been read."""
    prefix_hits: int = 0
    """Those of them that were not read again."""
    verified: int = 0
    """Results of other servers' experts that were compared with a second computation."""
    wrong_results: int = 0
    """Those of them that differed."""
    left_out: int = 0
    """Servers that are not asked any more for that."""


class InferenceService(Protocol):
    """A back end. Every method is called on the event loop that `start` ran on."""

    model: ServedModel

    async def start(self) -> None:
        """Begin to serve; called once."""
        ...

    async def close(self) -> None:
        """Stop; streams that are still open raise `Unavailable`. Called once, after `start`."""
        ...

    def submit(self, request: GenerationRequest) -> TokenStream:
        """Begin an answer.

        Raises `Overloaded`, `Unavailable` or `RequestTooLong`, at once or, where admission takes
        time, from the stream's first `__anext__`.
        """
        ...

    def health(self) -> Health:
        """Answers at once from what is known."""
        ...

    def stats(self) -> ServiceStats:
        """Answers at once from what is known."""
        ...

    def picture(self) -> Picture:
        """What it shows to people, from what is known."""
        ...

    @property
    def leaving(self) -> bool:
        """Whether those who only watch are to go, since the server is about to stop."""
        ...

    def leave(self) -> None:
        """From now on it is `leaving`; answers go on."""
        ...


def check_length(request: GenerationRequest, context_length: int) -> None:
    """Raise `RequestTooLong` unless prompt and answer fit the context together."""
    prompt, asked = len(request.prompt_ids), request.max_new_tokens
    if prompt + asked > context_length:
        raise RequestTooLong(
            f"The prompt has {prompt} tokens and {asked} are asked for, but the model's context "
            f"holds {context_length} together; shorten the prompt or ask for fewer."
        )


def quality(
    request: GenerationRequest, settings: PolicySettings, profile: Profile, *, copied: bool
) -> tuple[float, float]:
    """Budget D-bar and confidence p_J that a request's sequence is opened with.

    Where slots may run copies (`copied`), a request that asks for a smaller budget than the
    policy's is credited only its share of the policy's budget of it: fewer copies flip more by each
    than the policy charges (`Rung.within`). Such a request also gets fewer exits: at most half of
    what it is credited may flip by them, as calibration bounds it.
    """
    if request.exact:
        return 0.0, NEVER_EXIT
    budget = settings.budget if request.quality_budget is None else request.quality_budget
    budget = settings.allowed(budget, plain=request.sampling.is_plain)
    confidence = settings.confidence if request.confidence is None else request.confidence
    if copied and budget < settings.budget:
        budget *= budget / settings.budget
    if request.quality_budget is not None and settings.readings.exit_risk is not None:
        confidence = max(
            confidence, profile.exit_threshold_at_risk(budget / 2, settings.readings.exit_state)
        )
    return budget, confidence
