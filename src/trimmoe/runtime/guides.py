"""Answers held to a grammar: a JSON schema, a regular expression, the form of a tool call.

llguidance says which tokens may follow an answer. A guide takes tokens back where guesses were
withdrawn, so what it allows hangs on the answer that it is asked about and on nothing before.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from trimmoe.core.specs import BoolArray, IntArray
from trimmoe.runtime.served import ServedModel

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


_log = logging.getLogger(__name__)
_SPACE = r"( |\n[ \t]{0,16})?"
"""Between the parts of a JSON text: as JSON is written by hand. Without a bound, models may go on
with nothing else."""
_KEPT = 64
"""Grammars that are kept compiled."""


class Ungrammatical(ValueError):
    """A grammar that cannot be held to; the message says why."""


class Guide:
    """Of one answer; used by one thread at a time."""

    def __init__(self, guides: Guides, grammar: str) -> None:
        self._guides, self._grammar = guides, grammar
        self._matcher: LLMatcher | None = None
        self._taken: list[int] = []
        """What the matcher has gone through."""

    def allowed(self, answer: Sequence[int]) -> BoolArray:
        """Which tokens may follow an answer, bool [V] of the tokenizer's; one at least."""
        try:
            matcher = self._matcher or self._guides.matcher(self._grammar)
        except Ungrammatical as error:
            # Whoever took the request has checked the grammar; a server that disagrees lives on.
            _log.warning("A grammar is given up: %s", error)
            return self._guides.only_ends
        self._matcher = matcher
        if self._go_to(matcher, list(answer)):
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            mask = np.unpackbits(bits, bitorder="little").astype(bool)[: self._guides.size]
            if mask.any():
                return mask
        if matcher.is_error():
            _log.warning("A grammar is given up: %s", matcher.get_error())
        return self._guides.only_ends

    def _go_to(self, matcher: LLMatcher, answer: list[int]) -> bool:
        """Have the matcher at the end of an answer; whether the grammar lets it get there."""
        common = next(
            (at for at, (a, b) in enumerate(zip(self._taken, answer, strict=False)) if a != b),
            min(len(self._taken), len(answer)),
        )
        if common < len(self._taken):
            matcher.rollback(len(self._taken) - common)
            del self._taken[common:]
        rest = answer[common:]
        count = matcher.try_consume_tokens(rest) if rest else 0
        self._taken += rest[:count]
        return count == len(rest) and not matcher.is_error()


@dataclass(eq=False, kw_only=True, slots=True)
class Guides:
    """Of one model; used by several threads."""

    tokenizer: Any
    vocab_size: int
    stop_ids: tuple[int, ...]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _prepared: LLTokenizer | None = None
    _compiled: dict[str, LLMatcher] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Of what guides give."""
        return max(self.vocab_size, len(self.tokenizer))

    @property
    def only_ends(self) -> BoolArray:
        """Where nothing may follow, bool [V]."""
        ends = np.zeros(self.size, dtype=bool)
        ends[list(self.stop_ids)] = True
        return ends

    def check(self, grammar: str) -> None:
        """Raise `Ungrammatical` if answers cannot be held to a grammar."""
        self.matcher(grammar)

    def guide(self, grammar: str) -> Guide | None:
        """For one answer; None without a grammar. It is compiled while the prompt is read, so that
        nobody else's tokens wait for that."""
        if not grammar:
            return None
        if grammar not in self._compiled:
            threading.Thread(target=self._prepare, args=(grammar,), daemon=True).start()
        return Guide(self, grammar)

    def _prepare(self, grammar: str) -> None:
        with suppress(Ungrammatical):
            # Whoever needs it is told again.
            self.matcher(grammar)

    def matcher(self, grammar: str) -> LLMatcher:
        """At the beginning of an answer; compiling may take some 0.1 s, once."""
        with self._lock:
            if grammar not in self._compiled:
                if len(self._compiled) >= _KEPT:
                    del self._compiled[next(iter(self._compiled))]
                self._compiled[grammar] = self._compile(grammar)
            return self._compiled[grammar].deep_copy()

    def _compile(self, grammar: str) -> LLMatcher:
        # Takes a tenth of a second to import, and few requests need it.
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokens(), grammar, log_level=0)
        if matcher.is_error():
            raise Ungrammatical(_first_line(matcher.get_error()))
        return matcher

    def _tokens(self) -> LLTokenizer:
        """The tokenizer as llguidance reads it; takes a second for a large vocabulary."""
        if self._prepared is None:
            from llguidance.hf import from_tokenizer

            if not self.stop_ids:
                raise Ungrammatical("the model has no token that ends a text")
            try:
                self._prepared = from_tokenizer(
                    self.tokenizer, n_vocab=self.size, eos_token=list(self.stop_ids)
                )
            except ValueError as error:
                raise Ungrammatical(f"the model's tokenizer cannot be used ({error})") from error
        return self._prepared


@lru_cache(maxsize=4)
def guides_of(model: ServedModel) -> Guides:
    """Shared by all who serve a model in this process."""
    return Guides(
        tokenizer=model.tokenizer,
        vocab_size=model.vocab_size,
        stop_ids=tuple(sorted(model.stop_ids)),
    )


def json_grammar(schema: dict[str, Any]) -> str:
    """JSON that a schema describes."""
    return json.dumps({"grammars": [{"json_schema": spaced(schema)}]})


def spaced(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema whose texts have bounded space between their parts."""
    return schema | {"x-guidance": {"whitespace_pattern": _SPACE}}


def regex_grammar(regex: str) -> str:
    """What a regular expression matches as a whole."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(regex)


def choice_grammar(choices: Sequence[str]) -> str:
    """One of some texts."""
    return lark_grammar("start: " + " | ".join(quoted(choice) for choice in choices))


def lark_grammar(lark: str) -> str:
    """A grammar in llguidance's variant of Lark's notation."""
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def quoted(text: str) -> str:
    """A text in Lark's notation."""
    return json.dumps(text, ensure_ascii=False)


def _first_line(text: str) -> str:
    return re.sub(r"^at \d+\(\d+\): ", "", text.strip().split("\n", 1)[0])[:300].rstrip(":. ")


def forbidden(mask: BoolArray, size: int) -> IntArray:
    """Tokens of a model with `size` that a mask [V] of its tokenizer's does not allow."""
    wide = np.zeros(size, dtype=bool)
    count = min(size, mask.size)
    wide[:count] = mask[:count]
    return np.flatnonzero(~wide)
