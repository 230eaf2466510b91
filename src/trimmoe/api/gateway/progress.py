"""How far the answer to one request has come at its client, and what to ask another server for."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

_SEED_BITS = 53
Chunk = dict[str, Any]
"""One event of a stream, as servers write them."""


def seed_of(body: Mapping[str, Any]) -> Any:
    """What an answer is drawn with, wherever its tokens are drawn."""
    given = body.get("seed")
    return secrets.randbits(_SEED_BITS) if given is None else given


class Progress:
    """One request's, over all servers that were at it."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        """Of a `continuable` body."""
        self._body = dict(body)
        self.streamed = bool(body.get("stream"))
        options = body.get("stream_options") or {}
        self._usage_wanted = not self.streamed or bool(options.get("include_usage"))
        self._ids_wanted = bool(body.get("return_token_ids"))
        self._seed = seed_of(body)
        self._tokens = [list(each) for each in _begun(body)]
        self._opened: set[int] = set()
        self._finished: set[int] = set()
        self._name: dict[str, Any] = {}
        """What tells this answer from others: the same in all of its chunks."""
        self.begun = False
        """Whether anything of it came."""
        self.over = False
        """Whether all of it came."""

    @property
    def body(self) -> dict[str, Any]:
        """What to ask a server for now."""
        options = self._body.get("stream_options") or {}
        asked = self._body | {
            "stream": True,
            "stream_options": options | {"include_usage": True},
            "return_token_ids": True,
            "seed": self._seed,
        }
        if any(self._tokens):
            asked["continue_token_ids"] = self._tokens
        return asked

    def received(self, chunk: Chunk) -> Chunk | None:
        """Book a server's chunk; what the client is to see of it."""
        self.begun = True
        choices = [each for each in chunk["choices"] if self._is_new(each)]
        usage = chunk.get("usage")
        if usage is not None:
            self.over = True
        if not choices and (usage is None or not self._usage_wanted):
            return None
        self._name = self._name or {name: chunk[name] for name in ("id", "created")}
        return chunk | self._name | {"choices": choices}

    def _is_new(self, choice: dict[str, Any]) -> bool:
        """Book a choice; whether the client has not seen it yet."""
        index = choice["index"]
        if index in self._finished:
            return False
        tokens = choice.get("token_ids") or []
        self._tokens[index] += tokens
        if not self._ids_wanted:
            choice["token_ids"] = None
        if choice.get("finish_reason") is not None:
            self._finished.add(index)
            return True
        opens = choice.get("delta", {}).get("role") is not None
        if opens and index in self._opened:
            return False
        if opens:
            self._opened.add(index)
        return True


def continuable(body: Any) -> bool:
    """Whether a body asks for something that can be continued; servers say what is wrong with those
    that do not."""
    if not isinstance(body, dict) or body.get("prompt_logprobs") is not None:
        return False
    options = body.get("stream_options")
    flags = [body.get("stream"), body.get("return_token_ids")]
    if options is not None:
        if not isinstance(options, dict) or not body.get("stream"):
            return False
        flags.append(options.get("include_usage"))
    if not are_flags(flags):
        return False
    count = _choices(body)
    return 0 < count <= _MOST_CHOICES and _fits(body.get("continue_token_ids"), count)


def are_flags(given: Sequence[Any]) -> bool:
    """Whether all of these are true, false, or not given."""
    return all(each is None or isinstance(each, bool) for each in given)


_MOST_CHOICES = 4096


def _choices(body: Mapping[str, Any]) -> int:
    """How many answers a body asks for; 0 if that makes no sense."""
    answers, prompt = body.get("n", 1), body.get("prompt", "")
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    if answers is None:
        answers = 1
    if type(answers) is not int or answers < 1:
        return 0
    return answers * (len(prompt) if several else 1)


def _fits(given: Any, choices: int) -> bool:
    if not given:
        return given is None or given == []
    if not isinstance(given, list):
        return False
    if all(type(each) is int for each in given):
        return choices == 1
    lists = all(isinstance(each, list) for each in given)
    return lists and len(given) == choices and all(type(t) is int for each in given for t in each)


def _begun(body: Mapping[str, Any]) -> list[list[int]]:
    """What the client has of every choice from elsewhere."""
    given, choices = body.get("continue_token_ids"), _choices(body)
    if not given:
        return [[] for _ in range(choices)]
    return given if isinstance(given[0], list) else [given]
