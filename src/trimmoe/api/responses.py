"""What responses look like: OpenAI's fields, and ours beside them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, SerializerFunctionWrapHandler, model_serializer

from trimmoe.api.traces import TokenTrace


def without_nulls(told: dict[str, Any]) -> dict[str, Any]:
    """Clients put parts of calls together field by field; a null would take the place of what came
    before."""
    return {name: value for name, value in told.items() if value is not None}


class LedgerUsage(BaseModel):
    """What the engine did to the generated tokens, summed over tokens and layers.

    The first token of an answer comes out of the prompt, which runs exactly and is not counted;
    executed, skipped and exited layers add up to layers times the other tokens.
    """

    layers_executed: int = 0
    """Token-layers that ran, with substitutes and stand-ins or without."""
    layers_substituted: int = 0
    """Those of them in which a substitute ran."""
    layers_stood_in: int = 0
    """Those of the others in which a copy in few bits stood in for an expert."""
    layers_remote: int = 0
    """Those of them in which some expert ran on another server than the token was on."""
    layers_skipped: int = 0
    layers_exited: int = 0
    hops: int = 0
    """Hidden vectors that crossed a link."""
    bytes: int = 0
    budget_spent: float = 0.0
    budget_credited: float = 0.0
    expected_delay_s: float = 0.0
    """What the cost model foresaw for them, at the cluster file's speeds, from the links and waits
    measured then: no measurement of this answer."""


class PromptTokensDetails(BaseModel):
    """Of the tokens of prompts."""

    cached_tokens: int = 0
    """Not read again, since a request before began with them."""


class Usage(BaseModel):
    """Token counts, and the ledger.

    All tokens of an answer that is continued here count; the ledger is of those made here.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    trimmoe: LedgerUsage


class CompletionLogprobs(BaseModel):
    """Logprobs as completions have them: one list per property."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(BaseModel):
    """A token of a prompt, or an alternative to it."""

    logprob: float
    rank: int
    """1 for the most probable one."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""As vLLM has them: by id, the prompt's own token and the most probable ones at each of its places;
None for the first, which nothing predicts."""


class CompletionChoice(BaseModel):
    """One answer, or a piece of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    token_ids: list[int] | None = None
    token_traces: list[TokenTrace] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(BaseModel):
    """The answer to `POST /v1/completions`, or a chunk of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    seed: int | None = None
    """Of sampled answers."""


class TopLogprob(BaseModel):
    """One alternative."""

    token: str
    logprob: float
    bytes: list[int] | None
    """None if the token is only part of a character."""


class TokenLogprob(TopLogprob):
    """One generated token."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Logprobs as chats have them: one entry per token."""

    content: list[TokenLogprob]


class CallText(BaseModel):
    """Which function is called with what; in chunks what is new of it."""

    name: str | None = None
    arguments: str

    @model_serializer(mode="wrap")
    def _without_nulls(self, nested: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_nulls(nested(self))


class Call(BaseModel):
    """A call of a tool; in chunks a part of one, whose first has `id`, `type` and `name`."""

    index: int | None = None
    """Which of the answer's, in chunks."""
    id: str | None = None
    type: Literal["function"] | None = None
    function: CallText

    @model_serializer(mode="wrap")
    def _without_nulls(self, nested: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_nulls(nested(self))


class AssistantMessage(BaseModel):
    """The model's turn; in chunks what is new of it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[Call] | None = None


class ChatChoice(BaseModel):
    """One whole answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    token_ids: list[int] | None = None
    token_traces: list[TokenTrace] | None = None


class ChatDelta(BaseModel):
    """A piece of an answer."""

    index: int
    delta: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    token_ids: list[int] | None = None
    token_traces: list[TokenTrace] | None = None


class ChatCompletion(BaseModel):
    """The answer to `POST /v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | None = None
    seed: int | None = None
    """Of sampled answers."""


class ChatChunk(BaseModel):
    """A chunk of a streamed chat answer."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatDelta]
    usage: Usage | None = None
    seed: int | None = None
    """Of sampled answers."""


class ModelCard(BaseModel):
    """One served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "trimmoe"
    max_model_len: int
    """Tokens of prompt and answer together."""


class ModelList(BaseModel):
    """`GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class HealthBody(BaseModel):
    """`GET /health`."""

    status: Literal["ok", "unavailable"]
    reason: str = ""
