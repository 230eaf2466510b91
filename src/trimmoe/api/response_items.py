"""What `POST /v1/responses` answers: items of an output, and the events by which they grow."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Literal
from uuid import uuid4

from pydantic import BaseModel, SerializerFunctionWrapHandler, model_serializer

from trimmoe.api.calls import CallPart
from trimmoe.api.generation import Piece
from trimmoe.api.response_requests import ResponseRequest
from trimmoe.api.responses import LedgerUsage, TokenLogprob, Usage, without_nulls
from trimmoe.api.text import TextCodec
from trimmoe.api.wording import token_logprobs

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(BaseModel):
    """What the model said."""

    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class OutputMessage(BaseModel):
    """A turn of the model."""

    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: Status = "in_progress"
    content: list[OutputText] = []


class OutputCall(BaseModel):
    """A call of a function."""

    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: Status = "in_progress"


class InputDetails(BaseModel):
    """Of the tokens that were read."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(BaseModel):
    """Of the tokens that were made."""

    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    """Token counts, and the ledger."""

    input_tokens: int
    input_tokens_details: InputDetails = InputDetails()
    output_tokens: int
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int
    trimmoe: LedgerUsage


class Incomplete(BaseModel):
    """Why a response ends early."""

    reason: Literal["max_output_tokens"]


class ResponseBody(BaseModel):
    """The answer to `POST /v1/responses`."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    error: None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[OutputMessage | OutputCall] = []
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None


class ResponseEvent(BaseModel):
    """An event of a streamed response; which fields it has hangs on its type."""

    type: str
    sequence_number: int
    response: ResponseBody | None = None
    item: OutputMessage | OutputCall | None = None
    item_id: str | None = None
    output_index: int | None = None
    content_index: int | None = None
    part: OutputText | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    logprobs: list[TokenLogprob] | None = None
    token_ids: list[int] | None = None

    @model_serializer(mode="wrap")
    def _without_nulls(self, nested: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_nulls(nested(self))


class Transcript:
    """A response as it grows: pieces of an answer in, events out."""

    def __init__(self, body: ResponseRequest, codec: TextCodec) -> None:
        self._codec, self._logprobs = codec, body.wants_logprobs
        self._ids_wanted, self._untold = body.return_token_ids, list[int]()
        self._count = 0
        self._items: list[OutputMessage | OutputCall] = []
        choice = body.tool_choice
        form = None if body.text is None else body.text.format
        self.response = ResponseBody(
            id=f"resp_{uuid4().hex}",
            created_at=int(time.time()),
            status="in_progress",
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=body.model,
            parallel_tool_calls=body.parallel_tool_calls,
            temperature=body.temperature,
            text={"format": {"type": "text"} if form is None else _given(form)},
            tool_choice=choice if isinstance(choice, str) else _given(choice),
            tools=[_given(tool) for tool in body.tools or ()],
            top_p=body.top_p,
        )

    def open(self) -> Iterator[ResponseEvent]:
        """What comes before the first piece."""
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self.response)

    def replay(self, pieces: Sequence[Piece]) -> None:
        """Nobody is told again of what came from elsewhere, but all that follows counts on."""
        events = [self.open(), *(self.push(piece) for piece in pieces)] if pieces else []
        for _ in chain(*events):
            pass

    def push(self, piece: Piece) -> Iterator[ResponseEvent]:
        """A piece came."""
        self._untold += [event.token for event in piece.tokens]
        if piece.text:
            yield from self._say(piece)
        for part in piece.calls:
            yield from self._call(part, is_last=part is piece.calls[-1])

    def close(self, reason: str | None, counts: Usage) -> Iterator[ResponseEvent]:
        """The answer is over."""
        if not self._items:
            yield from self._begin_message()
        whole = reason != "length"
        yield from self._end_item("completed" if whole else "incomplete")
        response = self.response
        response.output = self._items
        response.status = "completed" if whole else "incomplete"
        if not whole:
            response.incomplete_details = Incomplete(reason="max_output_tokens")
        response.usage = ResponseUsage(
            input_tokens=counts.prompt_tokens,
            input_tokens_details=InputDetails(
                cached_tokens=counts.prompt_tokens_details.cached_tokens
            ),
            output_tokens=counts.completion_tokens,
            total_tokens=counts.total_tokens,
            trimmoe=counts.trimmoe,
        )
        yield self._event(f"response.{response.status}", response=response)

    def _say(self, piece: Piece) -> Iterator[ResponseEvent]:
        if not self._items or not isinstance(self._items[-1], OutputMessage):
            yield from self._begin_message()
        message = self._items[-1]
        assert isinstance(message, OutputMessage)
        told = token_logprobs(piece, self._codec) if self._logprobs else []
        (said,) = message.content
        said.text += piece.text
        said.logprobs += told
        tokens = None if piece.calls else self._tokens()
        yield self._of_text("delta", message, delta=piece.text, logprobs=told, token_ids=tokens)

    def _tokens(self) -> list[int] | None:
        """Those that whoever has the piece's last event has all of: an answer is continued behind
        them."""
        told, self._untold = self._untold, []
        return told if self._ids_wanted else None

    def _call(self, part: CallPart, *, is_last: bool) -> Iterator[ResponseEvent]:
        if part.id is not None:
            assert part.name is not None
            yield from self._begin(
                OutputCall(id=f"fc_{uuid4().hex}", call_id=part.id, name=part.name)
            )
        if part.arguments:
            call = self._items[-1]
            assert isinstance(call, OutputCall)
            call.arguments += part.arguments
            tokens = self._tokens() if is_last else None
            yield self._of_arguments("delta", call, delta=part.arguments, token_ids=tokens)

    def _begin_message(self) -> Iterator[ResponseEvent]:
        message = OutputMessage(id=f"msg_{uuid4().hex}")
        yield from self._begin(message)
        message.content = [OutputText()]
        yield self._of_part("added", message)

    def _begin(self, item: OutputMessage | OutputCall) -> Iterator[ResponseEvent]:
        """An item follows; the one before it is complete."""
        yield from self._end_item("completed")
        self._items.append(item)
        yield self._of_item("added", item)

    def _end_item(self, status: Status) -> Iterator[ResponseEvent]:
        if not self._items:
            return
        item = self._items[-1]
        if isinstance(item, OutputMessage):
            (said,) = item.content
            yield self._of_text("done", item, text=said.text, logprobs=said.logprobs)
            yield self._of_part("done", item)
        else:
            yield self._of_arguments("done", item, name=item.name, arguments=item.arguments)
        item.status = status
        yield self._of_item("done", item)

    def _of_item(self, what: str, item: OutputMessage | OutputCall) -> ResponseEvent:
        return self._event(f"response.output_item.{what}", item=item, output_index=self._at)

    def _of_part(self, what: str, message: OutputMessage) -> ResponseEvent:
        return self._in_message(f"content_part.{what}", message, part=message.content[0])

    def _of_text(self, what: str, message: OutputMessage, **told: Any) -> ResponseEvent:
        return self._in_message(f"output_text.{what}", message, **told)

    def _of_arguments(self, what: str, call: OutputCall, **told: Any) -> ResponseEvent:
        name = f"response.function_call_arguments.{what}"
        return self._event(name, item_id=call.id, output_index=self._at, **told)

    def _in_message(self, what: str, message: OutputMessage, **told: Any) -> ResponseEvent:
        return self._event(
            f"response.{what}", item_id=message.id, output_index=self._at, content_index=0, **told
        )

    @property
    def _at(self) -> int:
        return len(self._items) - 1

    def _event(self, kind: str, **told: Any) -> ResponseEvent:
        """The next event, of what there is now: it is written down before anything changes."""
        number, self._count = self._count, self._count + 1
        return ResponseEvent(type=kind, sequence_number=number, **told)


def _given(part: BaseModel) -> dict[str, Any]:
    """A part of a request as it is told back."""
    return part.model_dump(exclude_none=True, by_alias=True)
