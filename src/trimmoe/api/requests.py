"""What requests look like: OpenAI's fields, and ours beside them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from trimmoe.api.sampled import Body, Ids, ManyIds, NonEmpty, Prompts, Sampled


class CompletionRequest(Sampled):
    """`POST /v1/completions`."""

    prompt: NonEmpty | Prompts | Ids | ManyIds
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    """Put the prompt before each answer."""

    @model_validator(mode="after")
    def _echoes_with_logprobs_come_whole(self) -> CompletionRequest:
        if self.stream and self.echoes_logprobs:
            raise ValueError("`echo` with `logprobs` is not streamed; leave out `stream`.")
        return self

    @property
    def echoes_logprobs(self) -> bool:
        """Whether the prompt comes before each answer with its logprobs."""
        return self.echo and self.logprobs is not None


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """What a call asks for."""

    name: NonEmpty
    arguments: str = "{}"
    """A JSON object."""

    @field_validator("arguments")
    @classmethod
    def _are_an_object(cls, given: str) -> str:
        try:
            good = isinstance(json.loads(given or "{}"), dict)
        except (ValueError, RecursionError):
            good = False
        if not good:
            raise ValueError("the arguments of a call are a JSON object, as text")
        return given or "{}"


class ToolCall(Body):
    """A call that the assistant made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Accepted and not looked at."""


class Message(Body):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)] | None = None
    """Left out only of an assistant's turn that calls tools."""
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    """The call that a tool answers."""
    reasoning_content: str | None = None
    """What the assistant thought; chat templates may leave it out."""
    refusal: str | None = None
    """Accepted and not looked at."""

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only the assistant's turns have `tool_calls`")
        if self.content is None and not self.tool_calls:
            raise ValueError("a turn without `content` says nothing")
        return self

    @property
    def text(self) -> str:
        if self.content is None:
            return ""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class FunctionSpec(Body):
    """A function that a model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema; without it any object."""
    strict: bool | None = None
    """Hold the arguments of calls to the schema, also where the model is free to call or not."""


class Tool(Body):
    """A tool that a model may call."""

    type: Literal["function"] = "function"
    function: FunctionSpec

    def described(self) -> dict[str, Any]:
        """As chat templates read it."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


class ToolName(Body):
    """Of one of the tools."""

    name: NonEmpty


class NamedTool(Body):
    """The tool that has to be called."""

    type: Literal["function"] = "function"
    function: ToolName


class ChatRequest(Sampled):
    """`POST /v1/chat/completions`."""

    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    """What the model may call, if its chat template knows how."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    """Whether it has to, and which."""
    parallel_tool_calls: bool = True
    """Whether an answer may have several calls."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """The newer name of `max_tokens`; without either, as much as the context holds."""
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _no_contradictions(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("`top_logprobs` needs `logprobs: true`; set it or leave both out.")
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if self.tool_choice not in ("none", "auto") and not self.tools:
            raise ValueError("`tool_choice` needs `tools`; give some or leave it out.")
        if both and self.max_tokens != self.max_completion_tokens:
            raise ValueError("`max_tokens` and `max_completion_tokens` differ; give one of them.")
        return self
