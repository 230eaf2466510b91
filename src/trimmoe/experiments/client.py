"""A client of one server: answers as they stream, timed by this side's clock."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from trimmoe.core.errors import UserError

Message = dict[str, str]
"""A turn of a conversation: `role` and `content`."""
_PATIENCE = httpx.Timeout(600.0, connect=5.0)
_COUNTER = re.compile(r"^trimmoe[:_]guesses(_right)?_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(kw_only=True, slots=True)
class Answer:
    """One answer, and what its client saw of it."""

    text: str = ""
    tokens: int = 0
    """As the server counts them; events with text where an answer was left off."""
    ttft_s: float = 0.0
    """From sending to the first piece of text."""
    last_s: float = 0.0
    """From sending to the last one."""
    stopped: bool = False
    """Whether its reader left off."""
    ledger: dict[str, Any] = field(default_factory=dict)
    """What the server says became of its tokens (`usage.trimmoe`); empty if it says nothing."""
    guesses: int | None = None
    """Tokens of this server that set out on a guess meanwhile; None if nobody counts them."""
    right_guesses: int = 0

    @property
    def tokens_per_s(self) -> float | None:
        """After the first token; None for answers without a second one."""
        if self.tokens < 2 or self.last_s <= self.ttft_s:
            return None
        return (self.tokens - 1) / (self.last_s - self.ttft_s)

    def share(self, kind: str) -> float:
        """Of the layers of its tokens, those that `usage.trimmoe` counts as `layers_{kind}`."""
        names = ("layers_executed", "layers_skipped", "layers_exited")
        layers = sum(self.ledger.get(name, 0) for name in names)
        return self.ledger.get(f"layers_{kind}", 0) / layers if layers else 0.0


class TooLong(UserError):
    """A conversation that the model's context no longer holds."""


class Client:
    """Talks to one server; a context, which closes its connections."""

    def __init__(
        self, url: str, *, api_key: str | None = None, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        # Proxies are for other machines' pages, not for a server of one's own.
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=_PATIENCE,
            trust_env=False,
            transport=transport,
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def model(self) -> str:
        """What the server calls its model. Raises `UserError` if there is no such server."""
        try:
            answer = self._http.get("/v1/models")
            self._require_good(answer)
            return str(answer.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            raise UserError(
                f"No OpenAI-compatible server answers at {self.url} ({error or 'no answer'}); "
                "start one with `trimmoe serve` or give its URL."
            ) from error

    def chat(
        self,
        model: str,
        messages: Sequence[Message],
        *,
        show: Callable[[str], None] = lambda _: None,
        **options: Any,
    ) -> Answer:
        """Stream an answer; each piece of its text is also given to `show`. Ctrl-C leaves off.

        Raises `UserError` with what the server says instead, `TooLong` where that is the reason.
        """
        body = {"model": model, "messages": list(messages), "stream": True} | options
        body["stream_options"] = {"include_usage": True}
        before, answer = self._guesses(), Answer()
        begun_s = time.perf_counter()
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                self._require_good(response)
                for event in _events(response):
                    _take(answer, event, time.perf_counter() - begun_s, show)
        except KeyboardInterrupt:
            answer.stopped = True
        except httpx.HTTPError as error:
            raise UserError(f"The server at {self.url} broke off ({error}); try again.") from error
        after = self._guesses()
        if before is not None and after is not None:
            answer.guesses, answer.right_guesses = after[0] - before[0], after[1] - before[1]
        return answer

    def _guesses(self) -> tuple[int, int] | None:
        """Guesses of the server since its start, and right ones, if it counts any."""
        try:
            text = self._http.get("/metrics").text
        except httpx.HTTPError:
            return None
        found = {right: int(float(value)) for right, value in _COUNTER.findall(text)}
        return (found[""], found["_right"]) if len(found) == 2 else None

    def _require_good(self, response: httpx.Response) -> None:
        if response.status_code == 200:
            return
        said = response.read().decode(errors="replace")
        try:
            error = json.loads(said)["error"]
            said, code = str(error["message"]), str(error.get("code"))
        except (ValueError, LookupError, TypeError):
            code = ""
        if response.status_code == 400 and ("context" in code or "context" in said):
            raise TooLong(said)
        raise UserError(f"The server at {self.url} says: {said[:300]}")


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        yield json.loads(data)


def _take(answer: Answer, event: dict[str, Any], now_s: float, show: Callable[[str], None]) -> None:
    """What an event adds to an answer. Raises `UserError` if it says that there was an error."""
    if "error" in event:
        raise UserError(f"The answer broke off: {event['error'].get('message', event['error'])}")
    for choice in event.get("choices", ()):
        piece = choice.get("delta", {}).get("content")
        if piece:
            answer.ttft_s = answer.ttft_s or now_s
            answer.last_s = now_s
            answer.text += piece
            answer.tokens += 1
            show(piece)
    if usage := event.get("usage"):
        answer.tokens = usage["completion_tokens"]
        answer.ledger = usage.get("trimmoe") or {}
