"""The chunks of a stream put together to the response that is not one."""

from __future__ import annotations

from typing import Any

from trimmoe.api.gateway.progress import Chunk

_CHAT_CHUNK, _CHAT = "chat.completion.chunk", "chat.completion"


class Whole:
    """One response in the making, of completions or of chats."""

    def __init__(self) -> None:
        self._frame: Chunk = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def add(self, chunk: Chunk) -> None:
        """The next chunk."""
        self._frame = self._frame | {name: chunk[name] for name in chunk if name != "choices"}
        for choice in chunk["choices"]:
            self._join(choice)

    def response(self) -> dict[str, Any]:
        """All of it."""
        kind = self._frame["object"]
        frame = dict(self._frame)
        if kind == _CHAT_CHUNK:
            frame |= {"object": _CHAT, "prompt_logprobs": None}
        choices = [self._choices[index] for index in sorted(self._choices)]
        for choice in choices:
            if "message" in choice:
                _complete(choice["message"])
        return frame | {"choices": choices}

    def _join(self, piece: dict[str, Any]) -> None:
        so_far = self._choices.get(piece["index"])
        if so_far is None:
            self._choices[piece["index"]] = _first(piece)
            return
        if "delta" in piece:
            _join_message(so_far["message"], piece["delta"])
        else:
            so_far["text"] += piece["text"]
        so_far["finish_reason"] = piece["finish_reason"]
        for name in ("token_ids", "token_traces"):
            if piece.get(name) is not None:
                so_far[name] = (so_far.get(name) or []) + piece[name]
        so_far["logprobs"] = _joined(so_far["logprobs"], piece.get("logprobs"))


def _first(piece: dict[str, Any]) -> dict[str, Any]:
    made = {name: value for name, value in piece.items() if name != "delta"}
    if "delta" in piece:
        made["message"] = {"role": "assistant", "content": None, "tool_calls": None}
        _join_message(made["message"], piece["delta"])
    return made


def _join_message(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """The next part of a turn; calls of tools come in parts too."""
    message["content"] = (message["content"] or "") + (delta.get("content") or "")
    for part in delta.get("tool_calls") or ():
        calls = message["tool_calls"] = message["tool_calls"] or []
        if part["index"] == len(calls):
            calls.append({name: value for name, value in part.items() if name != "index"})
        else:
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]


def _complete(message: dict[str, Any]) -> None:
    """As servers write a turn that is only calls."""
    if message["tool_calls"] and not message["content"]:
        message["content"] = None


def _joined(
    before: dict[str, list[Any]] | None, after: dict[str, list[Any]] | None
) -> dict[str, list[Any]] | None:
    """Lists of logprobs, property by property."""
    if before is None or after is None:
        return before or after
    return {name: before[name] + after[name] for name in before}
