"""The same as `progress` for `/v1/responses`: events that are numbered, and items that have ids."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from trimmoe.api.gateway.progress import Chunk, are_flags, seed_of

_ENDS = ("response.completed", "response.incomplete")
_ITEM_IDS = ("id", "call_id")


class ResponseProgress:
    """One response's, over all servers that were at it.

    A server that is given the tokens which came numbers its events on from those that told of them.
    So an event that a client has is known by its number. Ids are each server's own; clients see
    those that came first.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        """Of a `response_continuable` body."""
        self._body = dict(body)
        self.streamed = bool(body.get("stream"))
        self._ids_wanted = bool(body.get("return_token_ids"))
        self._seed = seed_of(body)
        self._tokens = list(body.get("continue_token_ids") or ())
        self._next: int | None = None
        """Number of the event that is awaited; None: of whichever comes first."""
        self._name: dict[str, Any] = {}
        self._items: dict[int, dict[str, Any]] = {}
        """Ids of each item of the output."""
        self._logprobs: dict[int, list[Any]] = {}
        """Of each message's tokens; a server knows those of its own only."""
        self.begun = False
        self.over = False

    @property
    def body(self) -> dict[str, Any]:
        """What to ask a server for now."""
        asked = self._body | {"stream": True, "return_token_ids": True, "seed": self._seed}
        if self._tokens:
            asked["continue_token_ids"] = self._tokens
        return asked

    def received(self, event: Chunk) -> Chunk | None:
        """Book a server's event; what the client is to see of it."""
        self.begun = True
        number = event["sequence_number"]
        if self._next is not None and number < self._next:
            return None
        self._next = number + 1
        self.over = event["type"] in _ENDS
        self._tokens += event.get("token_ids") or ()
        if not self._ids_wanted:
            event.pop("token_ids", None)
        if event["type"] == "response.output_text.delta":
            self._logprobs.setdefault(event["output_index"], []).extend(event.get("logprobs") or ())
        self._rename(event)
        return event

    def _rename(self, event: Chunk) -> None:
        """Put what came first in the place of what this server calls it."""
        if (response := event.get("response")) is not None:
            self._name = self._name or {name: response[name] for name in ("id", "created_at")}
            response |= self._name
            for index, item in enumerate(response["output"]):
                self._rename_item(index, item)
        if "output_index" not in event:
            return
        index = event["output_index"]
        if (item := event.get("item")) is not None:
            self._rename_item(index, item)
        if "item_id" in event:
            event["item_id"] = self._items.setdefault(index, {"id": event["item_id"]})["id"]
        if (part := event.get("part")) is not None:
            self._score(index, part)
        if event["type"] == "response.output_text.done":
            self._score(index, event)

    def _rename_item(self, index: int, item: dict[str, Any]) -> None:
        ids = {name: item[name] for name in _ITEM_IDS if name in item}
        item |= self._items.setdefault(index, ids)
        for part in item.get("content") or ():
            self._score(index, part)

    def _score(self, index: int, part: dict[str, Any]) -> None:
        """All logprobs of a text that is complete."""
        if part["text"]:
            part["logprobs"] = self._logprobs.get(index, [])


def response_continuable(body: Any) -> bool:
    """Whether a body asks for something that can be continued; servers say what is wrong with those
    that do not."""
    if not isinstance(body, dict) or not are_flags(
        [body.get("stream"), body.get("return_token_ids")]
    ):
        return False
    given = body.get("continue_token_ids")
    if given is None:
        return True
    return isinstance(given, list) and all(type(token) is int for token in given)


async def whole_response(events: AsyncGenerator[Chunk]) -> dict[str, Any]:
    """What a response is that is not streamed: its last event has all of it."""
    last: Chunk = {}
    async with aclosing(events):
        async for event in events:
            last = event
    return last["response"]
