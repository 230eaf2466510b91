"""Calls of tools, read out of an answer's text as it grows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""Of a call, as Hermes and Qwen write."""
_BEGINS = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')


@dataclass(frozen=True, kw_only=True, slots=True)
class CallPart:
    """What is new of a call."""

    index: int
    """Which of the answer's."""
    arguments: str = ""
    """Text of JSON."""
    id: str | None = None
    """Of the first part, as is the next one."""
    name: str | None = None


@dataclass(eq=False, slots=True)
class JsonValue:
    """A JSON object that comes in pieces."""

    depth: int = 0
    in_string: bool = False
    escaped: bool = False

    def take(self, text: str) -> int | None:
        """How many characters of a text are its last ones; None if it goes on."""
        for at, one in enumerate(text):
            if self.in_string:
                ends = one == '"' and not self.escaped
                self.escaped = one == "\\" and not self.escaped
                self.in_string = not ends
            elif one == '"':
                self.in_string = True
            elif one in "{[":
                self.depth += 1
            elif one in "}]":
                self.depth -= 1
                if self.depth == 0:
                    return at + 1
            elif one == "<":
                # No JSON; what it is, its reader may say.
                return at
        return None


class CallReader:
    """Parts text from calls, piece by piece, however the text is cut.

    What is no call after all is text.
    """

    marks = (OPEN, CLOSE)
    """Tokens that are shown in the text though they may be special."""

    def __init__(self, *, parallel: bool = True) -> None:
        self._parallel = parallel
        self._held = ""
        self._value: JsonValue | None = None
        """The arguments under way."""
        self._inside = False
        self._named = False
        self.count = 0
        """Calls so far."""

    @property
    def done(self) -> bool:
        """Whether the one call that there may be is complete."""
        return not self._parallel and self.count > 0 and not self._inside

    def push(self, text: str) -> tuple[str, tuple[CallPart, ...]]:
        """The text and the calls that may be shown now."""
        self._held += text
        return parted(self._read())

    def flush(self) -> tuple[str, tuple[CallPart, ...]]:
        """What was held back, when no more text comes."""
        text, parts = parted(self._read())
        held, self._held = self._held, ""
        if self.done or (self.count and not held.strip()):
            held = ""
        if self._inside and not self._named:
            whole = self._whole(held)
            if whole is None:
                return text + OPEN + held, parts
            return text, (*parts, whole)
        return (text, parts) if self._inside else (text + held, parts)

    def _read(self) -> Iterator[str | CallPart]:
        """Go on as far as the text that is held allows."""
        while self._held and not self.done:
            if not self._inside:
                yield from self._outside()
                if not self._inside:
                    return
            elif self._value is not None:
                yield from self._arguments()
                if self._value is not None:
                    return
            elif not self._named and (begun := _BEGINS.match(self._held)):
                yield self._new(json.loads(begun[1]), "")
                self._held, self._value = self._held[begun.end() :], JsonValue()
            elif (at := self._held.find(CLOSE)) >= 0:
                yield from self._close(at)
            else:
                return

    def _outside(self) -> Iterator[str]:
        at = self._held.find(OPEN)
        if at >= 0:
            before, self._held = self._held[:at].rstrip(), self._held[at + len(OPEN) :]
            self._inside, self._named = True, False
        else:
            # White space before a call goes with it.
            keep = longest_start(self._held, OPEN)
            plain = self._held[: len(self._held) - keep].rstrip()
            before, self._held = plain, self._held[len(plain) :]
        if before:
            yield before

    def _arguments(self) -> Iterator[CallPart]:
        assert self._value is not None
        end = self._value.take(self._held)
        taken = self._held if end is None else self._held[:end]
        self._held = self._held[len(taken) :]
        if end is not None:
            self._value = None
        if taken:
            yield CallPart(index=self.count - 1, arguments=taken)

    def _close(self, at: int) -> Iterator[str | CallPart]:
        body, self._held = self._held[:at], self._held[at + len(CLOSE) :]
        self._inside = False
        if not self._named:
            yield self._whole(body) or OPEN + body + CLOSE

    def _whole(self, body: str) -> CallPart | None:
        """A call that is complete but not in the usual order."""
        try:
            call: Any = json.loads(body)
        except ValueError:
            return None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        given = call.get("arguments", {})
        return self._new(call["name"], given if isinstance(given, str) else json.dumps(given))

    def _new(self, name: str, arguments: str) -> CallPart:
        self._named, self.count = True, self.count + 1
        at = self.count - 1
        return CallPart(index=at, id=new_id(name, at), name=name, arguments=arguments)


def joined(parts: Sequence[CallPart]) -> tuple[CallPart, ...]:
    """Whole calls out of their parts."""
    whole: dict[int, CallPart] = {}
    for part in parts:
        before = whole.get(part.index)
        if before is not None:
            part = replace(before, arguments=before.arguments + part.arguments)
        whole[part.index] = part
    return tuple(whole.values())


def longest_start(text: str, mark: str) -> int:
    """Length of the longest end of a text with which `mark` begins, not all of it."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0


def new_id(_name: str, _at: int) -> str:
    """Of a call."""
    return f"call_{uuid4().hex[:24]}"


def parted(read: Iterator[str | CallPart]) -> tuple[str, tuple[CallPart, ...]]:
    """What was read, its text apart from its calls."""
    text, parts = "", list[CallPart]()
    for one in read:
        if isinstance(one, str):
            text += one
        else:
            parts.append(one)
    return text, tuple(parts)
