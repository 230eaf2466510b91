"""Models that call tools: a tiny one whose template knows them, and one that says what it is
told."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import openai

from serving import EOS, MODEL, Tiny
from tiny import byte_tokenizer, write_tiny_checkpoint
from trimmoe.models.load import open_model
from trimmoe.runtime.picture import Picture
from trimmoe.runtime.service import (
    GenerationRequest,
    Health,
    ServedModel,
    ServiceStats,
    TokenEvent,
    TokenStream,
)

TEMPLATE = """{%- if tools %}{{ 'Tools: ' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
Answer <tool_call>{"name": <name>, "arguments": <object>}</tool_call>
{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}assistant:"""


def open_caller(folder: Path) -> Tiny:
    """A tiny model of long context with a template that knows tools."""
    write_tiny_checkpoint(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return Tiny(folder=folder, view=open_model(folder), tokenizer=tokenizer)


def client_of(url: str) -> Any:
    """OpenAI's client; untyped, because our own fields are not in its types."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)


class _Script:
    """A stream of given tokens."""

    def __init__(self, tokens: Sequence[int], logprobs: int | None) -> None:
        self._left, self._logprobs = list(tokens), logprobs

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        if not self._left:
            raise StopAsyncIteration
        token = self._left.pop(0)
        # It is sure of itself.
        sure: Any = {"logprob": 0.0, "top_logprobs": ((token, 0.0),)}
        told: Any = {} if self._logprobs is None else sure
        return TokenEvent(token=token, finish_reason=None if self._left else "stop", **told)

    async def aclose(self) -> None:
        self._left.clear()


class Scripted:
    """A service whose model says what it is told."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        self.model = ServedModel(
            id=MODEL, tokenizer=tokenizer, context_length=4096, vocab_size=len(tokenizer),
            created=1, stop_ids=frozenset({EOS}),
        )  # fmt: skip
        self._tokens = [*tokenizer(text)["input_ids"], EOS]
        self.asked: list[GenerationRequest] = []
        self.leaving = False

    async def start(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do."""

    def submit(self, request: GenerationRequest) -> TokenStream:
        self.asked.append(request)
        left = self._tokens[len(request.received) :]
        return _Script(left, request.sampling.logprobs)

    def health(self) -> Health:
        return Health(ok=True)

    def stats(self) -> ServiceStats:
        return ServiceStats(running=0, waiting=0, kv_cache_usage=0.0)

    def picture(self) -> Picture:
        raise NotImplementedError  # Nobody looks.

    def leave(self) -> None:
        self.leaving = True
