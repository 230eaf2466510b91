"""One answer: token events become pieces of text, a ledger and measurements."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Literal

from trimmoe.api.call_readers import Reader
from trimmoe.api.calls import CallPart, joined
from trimmoe.api.detokenise import StopStrings
from trimmoe.api.metrics import ApiMetrics, Measured
from trimmoe.api.responses import LedgerUsage, PromptTokensDetails, Usage
from trimmoe.api.text import TextCodec
from trimmoe.core.ledger import EXECUTED, REMOTE, STOOD_IN, SUBSTITUTED, Kind, Ledger
from trimmoe.runtime.service import (
    FinishReason,
    GenerationRequest,
    InferenceService,
    ServiceError,
    TokenEvent,
)

EndReason = FinishReason | Literal["tool_calls"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of an answer."""

    text: str
    """What may be shown now; often not that of the piece's own tokens."""
    tokens: tuple[TokenEvent, ...]
    finish_reason: EndReason | None = None
    """Set on the last piece."""
    calls: tuple[CallPart, ...] = ()
    """Of tools, what is new of them."""


class Answer:
    """The answer to one request: submitted when made, and to be read once, by `pieces`."""

    def __init__(
        self,
        service: InferenceService,
        metrics: ApiMetrics,
        codec: TextCodec,
        request: GenerationRequest,
        stop: Sequence[str],
        calls: Reader | None = None,
    ) -> None:
        """`calls` reads those of tools out of the text. Raises `ServiceError` if the service
        refuses at once."""
        self.request = request
        self.made = self.cached_tokens = 0
        """Tokens of the answer, with those made elsewhere, and of the prompt that were kept."""
        self.replayed: list[Piece] = []
        """What the tokens made elsewhere gave, a piece each."""
        self.ledger: Ledger | None = None
        self._calls = calls
        self._text = codec.stream(() if calls is None else calls.marks)
        self._stops = StopStrings(stop)
        self._over: EndReason | None = self._replayed()
        self._metrics = metrics
        self._measured = Measured(
            prompt_tokens=len(request.prompt_ids), started_s=time.perf_counter()
        )
        self._stream = None if self._over else service.submit(request)

    async def pieces(self) -> AsyncGenerator[Piece]:
        """The answer as it grows, a piece per token. Closing this cancels the request."""
        if self._stream is None:
            await self._end(self._over or "abort")
            yield Piece(text="", tokens=(), finish_reason=self._over)
            return
        try:
            async for event in self._stream:
                self._count(event)
                piece = self._read((event,), *self._shown(event.token, event.finish_reason))
                if piece.finish_reason is not None:
                    await self._end(piece.finish_reason)
                yield piece
                if piece.finish_reason is not None:
                    return
        except ServiceError:
            await self._end("error")
            raise
        finally:
            await self._end("abort")

    def _replayed(self) -> EndReason | None:
        """Take up text, stop strings and calls where the tokens that came already left them; why
        the answer is over, if it is."""
        request = self.request
        for token in request.received:
            self.made += 1
            reason: FinishReason | None = None
            if token in request.stop_ids:
                reason = "stop"
            elif self.made == request.max_new_tokens:
                reason = "length"
            piece = self._read((), *self._shown(token, reason))
            self.replayed.append(piece)
            if piece.finish_reason is not None:
                return piece.finish_reason
        return None

    def _read(self, events: tuple[TokenEvent, ...], text: str, reason: EndReason | None) -> Piece:
        """What may be shown, parted into text and calls."""
        parts: tuple[CallPart, ...] = ()
        if self._calls is not None:
            text, parts = self._calls.push(text)
            if reason is not None:
                more, last = self._calls.flush()
                text, parts = text + more, parts + last
            if self._calls.done or (reason == "stop" and self._calls.count):
                reason = "tool_calls"
        return Piece(text=text, tokens=events, finish_reason=reason, calls=parts)

    def _shown(self, token: int, reason: FinishReason | None) -> tuple[str, FinishReason | None]:
        """The text that may be shown now, and whether it is the last."""
        text = "" if reason == "stop" else self._text.push(token)
        if self.made < self.request.sampling.min_tokens:
            return text, reason
        text = self._stops.push(text)
        if self._stops.stopped:
            return text, "stop"
        if reason is not None:
            text += self._stops.flush()
        return text, reason

    def _count(self, event: TokenEvent) -> None:
        self.made += 1
        self.cached_tokens += event.cached_tokens
        self._metrics.token(self._measured, time.perf_counter(), event.ledger)
        if event.ledger is not None:
            self.ledger = event.ledger if self.ledger is None else self.ledger + event.ledger

    async def close(self) -> None:
        """Give the answer up; harmless after its end."""
        await self._end("abort")

    async def _end(self, reason: str) -> None:
        """Close the stream and the measurement; the first reason counts."""
        if self._stream is not None:
            await self._stream.aclose()
        self._metrics.end(self._measured, time.perf_counter(), reason)


async def submit_all(
    service: InferenceService,
    metrics: ApiMetrics,
    codec: TextCodec,
    requests: Sequence[GenerationRequest],
    stop: Sequence[str],
    reader: Callable[[], Reader | None] = lambda: None,
) -> list[Answer]:
    """Submit all requests or none; `reader` makes what reads calls out of an answer."""
    answers: list[Answer] = []
    async with AsyncExitStack() as undo:
        for request in requests:
            answer = Answer(service, metrics, codec, request, stop, reader())
            undo.push_async_callback(answer.close)
            answers.append(answer)
        undo.pop_all()
    return answers


async def collect(pieces: AsyncGenerator[Piece]) -> Piece:
    """A whole answer as one piece."""
    text: list[str] = []
    tokens: list[TokenEvent] = []
    calls: list[CallPart] = []
    reason: EndReason | None = None
    async with aclosing(pieces):
        async for piece in pieces:
            text.append(piece.text)
            tokens += piece.tokens
            calls += piece.calls
            reason = piece.finish_reason
    return Piece(
        text="".join(text), tokens=tuple(tokens), finish_reason=reason, calls=joined(calls)
    )


def usage(answers: Sequence[Answer], prompt_tokens: int) -> Usage:
    """Counts of all answers to one HTTP request."""
    made = sum(answer.made for answer in answers)
    # Of several answers to one prompt the first may have to read what the others need not.
    kept: dict[tuple[int, ...], int] = {}
    for answer in answers:
        ids = answer.request.prompt_ids
        kept[ids] = min(kept.get(ids, len(ids)), answer.cached_tokens)
    cached = sum(kept.values())
    ledgers = [answer.ledger for answer in answers if answer.ledger is not None]
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=made,
        total_tokens=prompt_tokens + made,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        trimmoe=ledger_usage(ledgers),
    )


def ledger_usage(ledgers: Sequence[Ledger]) -> LedgerUsage:
    """The sum of ledgers, as the API shows it."""
    if not ledgers:
        return LedgerUsage()
    total = sum(ledgers[1:], start=ledgers[0])
    by_kind = total.kinds.sum(0)
    return LedgerUsage(
        layers_executed=int(by_kind[list(EXECUTED)].sum()),
        layers_substituted=int(by_kind[list(SUBSTITUTED)].sum()),
        layers_stood_in=int(by_kind[list(STOOD_IN)].sum()),
        layers_remote=int(by_kind[list(REMOTE)].sum()),
        layers_skipped=int(by_kind[Kind.SKIPPED]),
        layers_exited=int(by_kind[Kind.EXITED]),
        hops=total.hops,
        bytes=total.total_bytes,
        budget_spent=total.loss,
        budget_credited=total.budget,
        expected_delay_s=total.delay_s,
    )
