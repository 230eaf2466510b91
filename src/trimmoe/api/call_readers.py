"""Readers of calls in other forms than Hermes': each parts an answer's text from its calls.

All of them read piece by piece, however the text is cut, and what is no call after all is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from trimmoe.api.call_texts import Whole
from trimmoe.api.calls import CallPart, JsonValue, longest_start, new_id, parted

_PATIENCE = 512
"""Characters after which what might have begun a call is text."""


class Reader(Protocol):
    """What parts text from calls."""

    count: int
    """Calls so far."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Tokens that are shown in the text though they may be special."""
        ...

    @property
    def done(self) -> bool:
        """Whether the one call that there may be is complete."""
        ...

    def push(self, text: str) -> tuple[str, tuple[CallPart, ...]]:
        """The text and the calls that may be shown now."""
        ...

    def flush(self) -> tuple[str, tuple[CallPart, ...]]:
        """What was held back, when no more text comes."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonCalls:
    """A form in which arguments are an object of JSON, shown as it comes."""

    opens: tuple[str, ...]
    """What calls begin with, anywhere; or with `at_start` only at an answer's beginning."""
    head: re.Pattern[str]
    """From behind the opening to the arguments; `name` or, as JSON, `quoted` names the tool."""
    between: re.Pattern[str]
    """What may be before a head, matching nothing too."""
    closes: tuple[str, ...] = ()
    """What ends a run of calls, so that text may follow."""
    at_start: bool = False
    make_id: Callable[[str, int], str] = field(default=new_id)
    marks: tuple[str, ...] = ()
    """Tokens of it that may be special and are part of the text here."""


class JsonReader:
    """A `Reader` of a form of JSON."""

    def __init__(self, form: JsonCalls, *, parallel: bool = True) -> None:
        self._form, self._parallel, self.marks = form, parallel, form.marks
        self._held, self._opening = "", ""
        self._inside = self._in_value = False
        self._begun = False
        """Whether any text came, or a call."""
        self._value = JsonValue()
        self.count = 0

    @property
    def done(self) -> bool:
        return not self._parallel and self.count > 0 and not self._in_value

    def push(self, text: str) -> tuple[str, tuple[CallPart, ...]]:
        self._held += text
        return parted(self._read())

    def flush(self) -> tuple[str, tuple[CallPart, ...]]:
        text, parts = parted(self._read())
        held, self._held = self._held, ""
        if self.done or self._in_value:
            return text, parts
        rest = self._form.between.sub("", held, count=1) if self._inside else held
        if self.count and not rest.strip():
            return text, parts
        return text + (self._opening if self._inside else "") + held, parts

    def _read(self) -> Iterator[str | CallPart]:
        while self._held and not self.done:
            if self._in_value:
                yield from self._arguments()
                if self._in_value:
                    return
            elif self._inside:
                before = len(self._held), self._inside
                yield from self._between()
                if (len(self._held), self._inside) == before:
                    return
            else:
                yield from self._outside()
                if not self._inside:
                    return

    def _outside(self) -> Iterator[str]:
        form, held = self._form, self._held
        if form.at_start:
            yield from self._beginning()
            return
        found = [(at, each) for each in form.opens if (at := held.find(each)) >= 0]
        if found:
            at, self._opening = min(found)
            before = held[:at].rstrip()
            self._held = held[at + len(self._opening) :]
            self._inside = True
        else:
            # White space before a call goes with it.
            keep = max(longest_start(held, each) for each in form.opens)
            before = held[: len(held) - keep].rstrip()
            self._held = held[len(before) :]
        if before:
            yield before

    def _beginning(self) -> Iterator[str]:
        """Calls stand at an answer's beginning, or there are none."""
        if self._begun:
            yield self._all()
            return
        plain = self._held.lstrip()
        if any(plain.startswith(each) for each in self._form.opens):
            self._inside = self._begun = True
        elif plain and not any(each.startswith(plain) for each in self._form.opens):
            self._begun = True
            yield self._all()

    def _all(self) -> str:
        held, self._held = self._held, ""
        return held

    def _between(self) -> Iterator[str | CallPart]:
        """A head, an end, or what may yet become one of the two."""
        form = self._form
        space = form.between.match(self._held)
        start = space.end() if space else 0
        if head := form.head.match(self._held, start):
            named = head.groupdict()
            quoted = named.get("quoted")
            name = json.loads(quoted) if quoted else str(named["name"])
            self.count += 1
            self._held, self._value, self._in_value = self._held[head.end() :], JsonValue(), True
            self._begun = True
            yield CallPart(index=self.count - 1, id=form.make_id(name, self.count - 1), name=name)
            return
        for close in form.closes:
            if self._held.startswith(close, start) and self.count:
                self._inside, self._held = False, self._held[start + len(close) :]
                return
        if len(self._held) - start > _PATIENCE:
            self._inside, opening = False, "" if self.count else self._opening
            yield opening + self._all()

    def _arguments(self) -> Iterator[CallPart]:
        end = self._value.take(self._held)
        taken = self._held if end is None else self._held[:end]
        self._held = self._held[len(taken) :]
        self._in_value = end is None
        if taken:
            yield CallPart(index=self.count - 1, arguments=taken)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCalls:
    """A form that is read block by block, since arguments are no JSON until they are whole."""

    open: str
    close: str
    read: Callable[[str], list[Whole] | None]
    """What is between the two as calls; None for text."""
    marks: tuple[str, ...] = ()
    """As in `JsonCalls`."""
    at_start: bool = False
    """Whether a block without its marks may be an answer's beginning, from `[` to its `]`."""


class BlockReader:
    """A `Reader` of a form of blocks."""

    def __init__(self, form: BlockCalls, *, parallel: bool = True) -> None:
        self._form, self._parallel, self.marks = form, parallel, form.marks
        self._held = ""
        self._begun = self._inside = False
        self.count = 0

    @property
    def done(self) -> bool:
        return not self._parallel and self.count > 0

    def push(self, text: str) -> tuple[str, tuple[CallPart, ...]]:
        self._held += text
        return parted(self._read())

    def flush(self) -> tuple[str, tuple[CallPart, ...]]:
        text, parts = parted(self._read())
        held, self._held = self._held, ""
        if self.done:
            return text, parts
        if self._inside:
            # Models may end with their last call, and templates may not ask for its mark.
            last, more = parted(self._calls(held, self._form.open + held))
            return text + last, parts + more
        if self.count and not held.strip():
            return text, parts
        return text + held, parts

    def _read(self) -> Iterator[str | CallPart]:
        form = self._form
        while self._held and not self.done:
            if self._inside:
                at = self._held.find(form.close)
                if at < 0:
                    return
                body, self._held = self._held[:at], self._held[at + len(form.close) :]
                self._inside = False
                yield from self._calls(body, form.open + body + form.close)
                continue
            if form.at_start and not self._begun:
                plain = self._held.lstrip()
                if not plain or (plain != form.open and form.open.startswith(plain)):
                    return
                if plain.startswith("["):
                    end = bracketed(plain)
                    if end is None:
                        return
                    self._begun, self._held = True, plain[end:]
                    yield from self._calls(plain[:end], plain[:end])
                    continue
                self._begun = True
            at = self._held.find(form.open)
            if at < 0:
                keep = longest_start(self._held, form.open)
                plain = self._held[: len(self._held) - keep].rstrip()
                self._held = self._held[len(plain) :]
                if plain:
                    yield plain
                return
            before, self._held = self._held[:at].rstrip(), self._held[at + len(form.open) :]
            self._inside = True
            if before:
                yield before

    def _calls(self, body: str, otherwise: str) -> Iterator[str | CallPart]:
        found = self._form.read(body)
        if not found:
            yield otherwise
            return
        for name, arguments in found if self._parallel else found[:1]:
            at, self.count = self.count, self.count + 1
            told = json.dumps(arguments, ensure_ascii=False)
            yield CallPart(index=at, id=new_id(name, at), name=name, arguments=told)


def bracketed(text: str) -> int | None:
    """Where the bracket that a text begins with is closed, behind it; None if it is not yet."""
    depth, quote, escaped = 0, "", False
    for at, one in enumerate(text):
        if quote:
            quote = "" if one == quote and not escaped else quote
            escaped = one == "\\" and not escaped
        elif one in "\"'":
            quote = one
        elif one in "([{":
            depth += 1
        elif one in ")]}":
            depth -= 1
            if depth == 0:
                return at + 1
    return None
