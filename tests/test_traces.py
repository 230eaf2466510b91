"""The one word for what became of a token, and what else is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from trimmoe.api.traces import trace_of
from trimmoe.core.ledger import Kind, Ledger
from trimmoe.runtime.service import Ahead, TokenEvent


class Codec:
    """Tokens are written as their numbers."""

    def token_text(self, token: int) -> str:
        return f"<{token}>"


def ledger(*kinds: Kind) -> Ledger:
    made = np.zeros((len(kinds), len(Kind)), dtype=np.int64)
    made[np.arange(len(kinds)), kinds] = 1
    messages = np.array([[0, 2], [1, 0]])
    return replace(
        Ledger.empty(len(kinds), 2, 8), tokens=1, kinds=made, messages=messages, loss=0.25
    )


def trace(kinds: Sequence[Kind], ahead: Ahead | None = None) -> Any:
    codec: Any = Codec()
    return trace_of(TokenEvent(token=7, ledger=ledger(*kinds), ahead=ahead), codec)


@pytest.mark.parametrize(
    ("kinds", "word", "layers"),
    [
        ((Kind.LOCAL_EXACT, Kind.LOCAL_EXACT), "local", "ll"),
        ((Kind.LOCAL_EXACT, Kind.REMOTE_EXACT), "remote", "lr"),
        ((Kind.REMOTE_EXACT, Kind.SKIPPED), "skipped", "r-"),
        ((Kind.SKIPPED, Kind.LOCAL_SUBSTITUTE), "substitute", "-s"),
        ((Kind.LOCAL_EXACT, Kind.REMOTE_SUBSTITUTE), "substitute", "lS"),
        ((Kind.LOCAL_STAND_IN, Kind.REMOTE_EXACT), "stand-in", "cr"),
        ((Kind.REMOTE_STAND_IN, Kind.LOCAL_EXACT), "stand-in", "Cl"),
        ((Kind.LOCAL_SUBSTITUTE, Kind.EXITED), "exited", "sx"),
    ],
)
def test_the_word_is_what_is_least_like_the_exact_model(
    kinds: Sequence[Kind], word: str, layers: str
) -> None:
    told = trace(kinds)
    assert (told.became, told.layers) == (word, layers)
    assert (told.text, told.hops, told.budget_spent) == ("<7>", 3, 0.25)


def test_a_guess_is_told_before_its_layers_and_what_was_wrong_before_all() -> None:
    local = (Kind.LOCAL_EXACT,)
    assert trace(local, Ahead(kind="guess", right=True)).became == "guessed"
    assert trace(local, Ahead(kind="copy", right=True)).became == "guessed"
    assert trace((Kind.EXITED,), Ahead(kind="draft", right=True)).became == "exited"
    wrong = trace(local, Ahead(kind="guess", right=False, withdrawn=(3, 4)))
    assert (wrong.became, wrong.ahead, wrong.withdrawn) == ("withdrawn", "guess", ["<3>", "<4>"])


def test_a_token_out_of_the_prompt_has_no_layers() -> None:
    codec: Any = Codec()
    charged = replace(Ledger.empty(2, 2, 8), loss=0.5, budget=1.0)
    for cost in (None, charged):
        told = trace_of(TokenEvent(token=1, ledger=cost), codec)
        assert (told.became, told.layers) == ("prompt", "")
        assert told.budget_spent == (0.0 if cost is None else 0.5)
