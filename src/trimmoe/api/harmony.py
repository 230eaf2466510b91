"""Answers of gpt-oss: messages in channels, of which one is for thoughts and one for calls.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f
<|constrain|>json<|message|>{...}<|call|>`. What is thought is not shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from trimmoe.api.calls import CallPart, longest_start, new_id, parted

_CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START, _CHANNEL)
HARMONY_MARKS = (_CHANNEL, _MESSAGE, _START, "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
_TO = re.compile(r"to=functions\.([^\s<]+)")


class HarmonyReader:
    """A `Reader`."""

    marks = HARMONY_MARKS

    def __init__(self, *, parallel: bool = True) -> None:
        self._parallel = parallel
        self._held = ""
        self._header: str | None = ""
        """Of the message that begins; None within its body."""
        self._shown = self._calling = False
        """What the body is."""
        self.count = 0

    @property
    def done(self) -> bool:
        """Whether the one call that there may be is complete."""
        return not self._parallel and self.count > 0 and not self._calling

    def push(self, text: str) -> tuple[str, tuple[CallPart, ...]]:
        """The text and the calls that may be shown now."""
        self._held += text
        return parted(self._read(whole=False))

    def flush(self) -> tuple[str, tuple[CallPart, ...]]:
        """What was held back, when no more text comes."""
        text, parts = parted(self._read(whole=True))
        held, self._held = self._held, ""
        # A model that writes no header at all says plain text.
        return text + (held if self._header == "" and not self.count else ""), parts

    def _read(self, *, whole: bool) -> Iterator[str | CallPart]:
        while self._held and not self.done:
            if self._header is not None:
                at = self._held.find(_MESSAGE)
                if at < 0:
                    if self._is_plain():
                        self._header, self._shown = None, True
                        continue
                    return
                header, self._held = self._held[:at], self._held[at + len(_MESSAGE) :]
                yield from self._begin(header)
                continue
            ends = [(at, each) for each in _ENDS if (at := self._held.find(each)) >= 0]
            at, mark = min(ends) if ends else (self._safe(whole=whole), "")
            body, self._held = self._held[:at], self._held[at + len(mark) :]
            if body:
                yield from self._body(body)
            if not mark:
                return
            self._header, self._calling = "", False

    def _is_plain(self) -> bool:
        """Whether what is held cannot be a header."""
        text = self._held.lstrip()
        first = not self.count and not self._shown
        begins = any(text.startswith(m) or m.startswith(text) for m in HARMONY_MARKS)
        return first and bool(text) and not begins and not "assistant".startswith(text[:9])

    def _safe(self, *, whole: bool) -> int:
        """How much of what is held is surely of the body."""
        if whole:
            return len(self._held)
        return len(self._held) - max(longest_start(self._held, each) for each in _ENDS)

    def _begin(self, header: str) -> Iterator[CallPart]:
        self._header = None
        called = _TO.search(header)
        self._calling = called is not None
        # Preambles of calls are meant for users too.
        self._shown = "analysis" not in header and called is None
        if called is not None:
            at, self.count = self.count, self.count + 1
            yield CallPart(index=at, id=new_id(called[1], at), name=called[1])

    def _body(self, body: str) -> Iterator[str | CallPart]:
        if self._calling:
            yield CallPart(index=self.count - 1, arguments=body)
        elif self._shown:
            yield body
