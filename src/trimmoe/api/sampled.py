"""What all requests have in common: how tokens are drawn, and what is accepted.

Types are strict and unknown options are refused: an option that is silently dropped would answer
another question than the one asked. Options of other servers are accepted where they are given
with the value that changes nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "functions": ([],),
    "annotations": ([],),
    "function_call": ("none", "auto"),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "suffix": ("",),
    "parallel_tool_calls": (True, False),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
}
"""Values with which options that we do not have change nothing."""

MAX_PROMPTS, MAX_ANSWERS = 256, 16
"""In one request, and to each of them."""
MAX_CHOICES = MAX_PROMPTS * MAX_ANSWERS

# Lists stop at their first fault: a megabyte of them would make as many error records.
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
NonEmpty = Annotated[str, Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0)]
Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Prompts = Annotated[list[NonEmpty], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
Received = Annotated[list[TokenId], Field(fail_fast=True)]
ManyReceived = Annotated[list[Received], Field(max_length=MAX_CHOICES, fail_fast=True)]
ManyIds = Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


class Body(BaseModel):
    """Any JSON object of a request."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _without_what_changes_nothing(cls, data: Any) -> Any:
        """Drop nulls, which stand for defaults, and neutral values of options we do not have."""
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        kept = {}
        for name, value in data.items():
            neutral = name not in known and value in _NEUTRAL.get(name, ())
            if value is None or neutral:
                continue
            if name not in known:
                raise ValueError(f"This server has no option `{name[:64]}`; leave it out.")
            kept[name] = value
        return kept


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool = False
    """End with a chunk that has no choice but the usage."""


class JsonSchema(Body):
    """What an answer's JSON has to be like."""

    name: Annotated[str, Field(min_length=1, max_length=256)] = "answer"
    description: str | None = None
    described: Annotated[dict[str, Any], Field(alias="schema")] = Field(default_factory=dict)
    strict: bool | None = None
    """Answers are always held to the schema."""


class ResponseFormat(Body):
    """What an answer has to be like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_if_named(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("`json_schema` goes with type `json_schema`, and only with that")
        return self


class Drawn(Body):
    """How an answer's tokens are drawn, whatever asks for it."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    """Draw from so many most probable tokens; -1 or 0: from all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Draw from tokens at least this share as probable as the most probable one."""
    frequency_penalty: Penalty = 0.0
    """Taken off a token's logit for each time that the answer has it."""
    presence_penalty: Penalty = 0.0
    """Taken off a token's logit if the answer has it."""
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Makes tokens of prompt and answer less likely above 1, more likely below."""
    logit_bias: Annotated[dict[str, Bias], Field(max_length=1024)] = Field(default_factory=dict)
    """What is added to the logits of tokens, by id."""
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Nothing ends an answer before it has so many tokens."""
    guided_regex: Annotated[str, Field(min_length=1, max_length=10_000)] | None = None
    """A regular expression that answers match as a whole."""
    guided_json: dict[str, Any] | None = None
    """A JSON schema, as in `response_format`."""
    guided_choice: (
        Annotated[list[NonEmpty], Field(min_length=1, max_length=1024, fail_fast=True)] | None
    ) = None
    """Answers are one of these texts."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """What is drawn depends on it and on a token's position; without one the server draws one, and
    sampled answers tell it."""
    stop: Stop | Annotated[list[Stop], Field(max_length=64, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64, fail_fast=True)] = Field(
        default_factory=list
    )
    """An answer ends with any of these tokens, also if it goes on past the model's own end."""
    stream: bool = False
    user: str | None = None
    """Accepted and not looked at, as are the next six."""
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    store: bool = False
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    ignore_eos: bool = False
    """Go on past the model's own end."""
    quality_budget: Annotated[float, Field(ge=0, le=1)] | None = None
    """Flip rate a generated token may lose on average; the server's own if left out."""
    confidence: Annotated[float, Field(ge=0)] | None = None
    """Confidence an early exit needs; above 1 nothing exits."""
    exact: bool = False
    """Every layer and every expert of every token."""

    @field_validator("logit_bias")
    @classmethod
    def _biases_are_of_tokens(cls, given: dict[str, float]) -> dict[str, float]:
        if not all(token.isascii() and token.isdigit() and len(token) < 10 for token in given):
            raise ValueError('the names are ids of tokens, such as {"42": -100}')
        return given

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


class Sampled(Drawn):
    """What completions and chats have in common."""

    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] = 1
    response_format: ResponseFormat | None = None
    """JSON, or JSON that a schema describes."""
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    """Add `token_ids` to each choice."""
    return_token_traces: bool = False
    """Add `token_traces` to each choice: what became of each token, layer by layer."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Report what the model thinks of each token of the prompt, with so many alternatives."""
    continue_token_ids: Received | ManyReceived | None = None
    """Tokens of the answer that came already, from any server of the cluster: what follows them is
    answered, and they count towards `max_tokens` and `stop`. A list per choice if there are
    several."""

    @property
    def told_seed(self) -> int | None:
        """What the response says of the seed."""
        return self.seed if self.temperature else None

    @model_validator(mode="after")
    def _one_form(self) -> Sampled:
        free = self.response_format is None or self.response_format.type == "text"
        forms = [self.guided_regex, self.guided_json, self.guided_choice, None if free else 1]
        if len(forms) - forms.count(None) > 1:
            raise ValueError(
                "`response_format` and the `guided_` options exclude one another; give one of them."
            )
        return self

    @model_validator(mode="after")
    def _scores_come_whole(self) -> Sampled:
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("`prompt_logprobs` are not streamed; leave out `stream`.")
        return self

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Sampled:
        if self.stream_options is not None and not self.stream:
            raise ValueError("`stream_options` needs `stream: true`; set it or leave both out.")
        return self
