"""`POST /v1/responses`: what is asked, and the chat that it is."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from trimmoe.api.errors import ApiError
from trimmoe.api.requests import ChatRequest, FunctionSpec
from trimmoe.api.sampled import Body, Drawn, NonEmpty, Received

_INCLUDABLE = "message.output_text.logprobs"


class InputText(Body):
    """A piece of a turn."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    """Accepted and not looked at, as is the next one."""
    logprobs: list[Any] | None = None


Texts = str | Annotated[list[InputText], Field(min_length=1, fail_fast=True)]


class InputMessage(Body):
    """A turn of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Texts
    id: str | None = None
    """Accepted and not looked at, as are the next two."""
    status: str | None = None
    phase: str | None = None


class InputCall(Body):
    """A call that the assistant made."""

    type: Literal["function_call"]
    call_id: NonEmpty
    name: NonEmpty
    arguments: str
    id: str | None = None
    """Accepted and not looked at, as is the next one."""
    status: str | None = None


class InputResult(Body):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: NonEmpty
    output: Texts
    id: str | None = None
    """Accepted and not looked at, as is the next one."""
    status: str | None = None


class ResponseTool(FunctionSpec):
    """A function that a model may call."""

    type: Literal["function"] = "function"


class NamedFunction(Body):
    """The function that has to be called."""

    type: Literal["function"]
    name: NonEmpty


class TextForm(Body):
    """What the answer has to be like."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    described: dict[str, Any] | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None
    """Answers are always held to the schema."""


class TextOptions(Body):
    """What the answer has to be like."""

    format: TextForm | None = None


class ResponseStreamOptions(Body):
    """Options of a streamed answer."""

    include_obfuscation: bool = False
    """Accepted and not looked at."""


Item = InputMessage | InputCall | InputResult


class ResponseRequest(Drawn):
    """`POST /v1/responses`."""

    input: NonEmpty | Annotated[list[Item], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    """What comes before the conversation, as the system's turn."""
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """Without it as much as the context holds."""
    text: TextOptions | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction = "auto"
    parallel_tool_calls: bool = True
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["disabled"] = "disabled"
    """Conversations that are too long are refused, never cut."""
    background: Literal[False] = False
    previous_response_id: str | None = None
    """Refused: nothing of a response is kept."""
    return_token_ids: bool = False
    """Add `token_ids` to events, of the tokens since the last event that had some."""
    continue_token_ids: Received | None = None
    """Tokens of the answer that came already, from any server of the cluster: events go on behind
    those that told of them, under ids of their own."""

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or _INCLUDABLE in (self.include or ())


def as_chat(body: ResponseRequest) -> ChatRequest:
    """The chat that a response answers; raises `ApiError`."""
    if body.previous_response_id is not None:
        raise ApiError(
            400,
            "No response is kept here; leave out `previous_response_id` and send the conversation "
            "as `input`.",
            param="previous_response_id",
        )
    common = {name: getattr(body, name) for name in Drawn.model_fields}
    choice = body.tool_choice
    if isinstance(choice, NamedFunction):
        choice = {"type": "function", "function": {"name": choice.name}}
    asked = {
        "messages": _messages(body),
        "tools": [_tool(tool) for tool in body.tools or ()] or None,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _form(body),
        "max_tokens": body.max_output_tokens,
        "logprobs": body.wants_logprobs,
        "top_logprobs": (body.top_logprobs or 0) if body.wants_logprobs else None,
        "continue_token_ids": body.continue_token_ids,
    }
    try:
        return ChatRequest.model_validate(common | asked)
    except ValidationError as error:
        said = error.errors()[0]["msg"].removeprefix("Value error, ").rstrip(".")
        raise ApiError(400, f"This is no conversation: {said}.", param="input") from error


def _messages(body: ResponseRequest) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    if body.instructions is not None:
        turns.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*turns, {"role": "user", "content": body.input}]
    for item in body.input:
        match item:
            case InputMessage():
                turns.append({"role": item.role, "content": _text(item.content)})
            case InputResult():
                turn = {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
                turns.append(turn)
            case InputCall():
                # A turn's calls are items beside its text.
                if not turns or turns[-1]["role"] != "assistant":
                    turns.append({"role": "assistant"})
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                turns[-1].setdefault("tool_calls", []).append(call)
    return turns


def _text(content: Texts) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _tool(tool: ResponseTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"})}


def _form(body: ResponseRequest) -> dict[str, Any] | None:
    form = None if body.text is None else body.text.format
    if form is None or form.type != "json_schema":
        return None if form is None else {"type": form.type}
    schema = {"name": form.name, "schema": form.described or {}}
    return {"type": form.type, "json_schema": schema}
