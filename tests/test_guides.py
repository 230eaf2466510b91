"""Answers that are held to a grammar: what may follow hangs on the answer and on nothing before."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from tiny import VOCABULARY, byte_tokenizer
from trimmoe.runtime.guides import (
    Guides,
    Ungrammatical,
    choice_grammar,
    json_grammar,
    lark_grammar,
    regex_grammar,
)
from trimmoe.runtime.processors import shaped
from trimmoe.runtime.sampling import Sampling
from trimmoe.runtime.seen import Seen

EOS = 257
TOKENIZER = byte_tokenizer()
GUIDES = Guides(tokenizer=TOKENIZER, vocab_size=VOCABULARY, stop_ids=(EOS,))
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": ["x", 1]}, "b": {"items": {"type": "number"}}},
    "required": ["a"],
    "additionalProperties": False,
}


def ids(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


def follows(grammar: str, text: str) -> set[str]:
    """The characters that may follow a text, `END` among them if it may end."""
    guide = GUIDES.guide(grammar)
    assert guide is not None
    allowed = np.flatnonzero(guide.allowed(ids(text))).tolist()
    return {"END" if token == EOS else str(TOKENIZER.decode([token])) for token in allowed}


def test_a_regular_expression_is_matched_as_a_whole() -> None:
    grammar = regex_grammar("[a-c]+(x|y)?")
    assert follows(grammar, "") == {"a", "b", "c"}
    assert follows(grammar, "ab") == {"a", "b", "c", "x", "y", "END"}
    assert follows(grammar, "abx") == {"END"}


def test_json_is_what_the_schema_describes() -> None:
    space = {" ", "\n"}
    assert follows(json_grammar(SCHEMA), "") == {"{"}
    assert follows(json_grammar(SCHEMA), '{"a":') == {'"', "1"} | space
    assert follows(json_grammar(SCHEMA), '{"a":1') == {",", "}"} | space
    assert follows(json_grammar(SCHEMA), '{"a":1}') == {"END"}
    assert follows(json_grammar({"type": "object"}), "{ ") == {'"', "}"}
    assert follows(json_grammar({"type": "object"}), "{\n" + " " * 16) == {'"', "}"}


def test_choices_are_texts_of_any_kind() -> None:
    grammar = choice_grammar(['yes"', "no\n", "nein"])
    assert follows(grammar, "") == {"y", "n"}
    assert follows(grammar, "n") == {"o", "e"}
    assert follows(grammar, 'yes"') == {"END"}


def test_what_is_not_in_the_grammar_can_only_end() -> None:
    assert follows(regex_grammar("a+"), "zz") == {"END"}


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (json_grammar({"not": {}}), "not"),
        (json_grammar({"type": "thing"}), "thing"),
        (regex_grammar("(a"), "regex"),
        (lark_grammar("nonsense"), "Expected"),
    ],
)
def test_what_cannot_be_held_to_is_said(grammar: str, says: str) -> None:
    with pytest.raises(Ungrammatical, match=says) as caught:
        GUIDES.check(grammar)
    assert "\n" not in str(caught.value)


def test_a_model_without_an_end_holds_to_nothing() -> None:
    endless = Guides(tokenizer=TOKENIZER, vocab_size=VOCABULARY, stop_ids=())
    with pytest.raises(Ungrammatical, match="ends a text"):
        endless.check(json_grammar(SCHEMA))


_PIECES = st.sampled_from(['{"a"', ": ", '"x"', "1", ', "b": [', "1.5", ",", "]", "}", "</s>", "?"])


@given(st.lists(st.tuples(st.integers(0, 40), st.lists(_PIECES, max_size=6)), max_size=8))
def test_a_guide_that_went_elsewhere_allows_what_a_new_one_does(
    turns: list[tuple[int, list[str]]],
) -> None:
    """Answers are cut and go on otherwise, as where guesses are withdrawn, sensibly or not."""
    grammar = json_grammar(SCHEMA)
    guide, answer = GUIDES.guide(grammar), list[int]()
    assert guide is not None
    for kept, pieces in turns:
        answer = answer[:kept] + [token for piece in pieces for token in ids(piece)]
        fresh = GUIDES.guide(grammar)
        assert fresh is not None
        assert (guide.allowed(answer) == fresh.allowed(answer)).all()


@given(st.sampled_from(["", "{", '{"a": 1', '{"a": 1}', '{"a": "x", "b": [']))
def test_logits_are_constrained_as_by_transformers(text: str) -> None:
    grammar, prompt = json_grammar(SCHEMA), [1, 2, 3]
    fresh = GUIDES.guide(grammar)
    assert fresh is not None

    def allowed(_batch: int, tokens: torch.Tensor) -> list[int]:
        return np.flatnonzero(fresh.allowed(tokens[len(prompt) :].tolist())).tolist()

    tokens = prompt + ids(text)
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(len(text)))
    theirs: Any = PrefixConstrainedLogitsProcessor(allowed, 1)
    seen = Seen(prompt=len(prompt), tokens=tokens, guide=GUIDES.guide(grammar))
    ours = shaped(logits[0], Sampling(grammar=grammar), len(tokens), seen)
    assert torch.equal(ours, theirs(torch.tensor([tokens]), logits)[0])


def test_a_grammars_end_comes_before_a_least_length() -> None:
    grammar = choice_grammar(["no"])
    sampling = Sampling(grammar=grammar, min_tokens=9, stop_ids=(EOS,))
    seen = Seen(prompt=1, tokens=[5, *ids("no")], guide=GUIDES.guide(grammar))
    assert int(shaped(torch.zeros(VOCABULARY), sampling, 3, seen).argmax()) == EOS


def test_a_guide_of_a_wrong_grammar_lets_answers_end() -> None:
    """A server that disagrees with the one that took the request lives on."""
    assert follows(regex_grammar("(a"), "") == {"END"}


def test_a_guide_is_compiled_once_however_many_ask() -> None:
    compiled: list[str] = []

    class Counting(Guides):
        def _compile(self, grammar: str) -> Any:
            compiled.append(grammar)
            return Guides._compile(self, grammar)

    guides = Counting(tokenizer=TOKENIZER, vocab_size=VOCABULARY, stop_ids=(EOS,))
    grammar = json_grammar(SCHEMA)
    made = [guides.guide(grammar) for _ in range(8)]
    assert all(one is not None and one.allowed(ids("{")).any() for one in made)
    assert compiled == [grammar]


def test_a_schema_is_not_changed_by_being_used() -> None:
    before = json.dumps(SCHEMA)
    json_grammar(SCHEMA)
    assert json.dumps(SCHEMA) == before
