"""From tokens to text piece by piece: whole characters only, and nothing past a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_BROKEN = "\ufffd"
"""What a tokenizer shows for bytes that are no character, or not one yet."""
_PATIENCE = 64
"""Tokens without a whole character at their end after which they are taken for what they are."""

Decode = Callable[[Sequence[int]], str]


class TextStream:
    """Text of a growing list of tokens.

    A character spread over several tokens appears once it is whole; if its rest never comes, it
    does not appear at all.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        """Recent tokens: what was last shown, as context, and what came since."""
        self._since = 0
        """Index in the window of the first token that came since."""
        self._shown = 0
        """Characters of the window's text that were shown."""

    def push(self, token: int) -> str:
        """The text that this token completes; often a word, sometimes nothing."""
        self._window.append(token)
        text = self._decode(self._window)
        # All of a broken end, not its last bytes only: some tokenizers show a run of bytes as
        # broken, whole characters in it too, until its last character is whole.
        patient = len(self._window) - self._since < _PATIENCE
        whole = len(text.rstrip(_BROKEN)) if patient else len(text)
        piece = text[self._shown : whole]
        self._shown = max(self._shown, whole)
        if whole == len(text):
            self._slide()
        return piece

    def _slide(self) -> None:
        """Forget old tokens, but for those whose text a tokenizer may want to see before."""
        self._window = self._window[self._since :]
        self._since = len(self._window)
        self._shown = len(self._decode(self._window))


class StopStrings:
    """Passes text on until one of the strings has appeared in full.

    Where several would appear, the one that is complete first counts, however the text is cut.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        assert all(strings)
        self._strings = tuple(strings)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The part that may be shown; sets `stopped` at a stop string, which is not shown."""
        assert not self.stopped
        self._held += text
        found = [
            (at + len(string), at)
            for string in self._strings
            if (at := self._held.find(string)) >= 0
        ]
        if found:
            self.stopped = True
            return self._held[: min(found)[1]]
        return self._release(len(self._held) - self._possible_start())

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        return self._release(len(self._held))

    def _release(self, count: int) -> str:
        out, self._held = self._held[:count], self._held[count:]
        return out

    def _possible_start(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        longest = max((len(string) for string in self._strings), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if self._strings and any(s.startswith(self._held[-length:]) for s in self._strings):
                return length
        return 0
