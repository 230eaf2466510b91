"""One answer in this process, piece by piece: `trimmoe generate` and `trimmoe.Model.generate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trimmoe.api.detokenise import TextStream
from trimmoe.core.errors import UserError
from trimmoe.core.ledger import Ledger
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.generate import Driver, generate
from trimmoe.runtime.sampling import Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One generated token and the text that it completes."""

    text: str
    """Often a word; empty while a character is spread over several tokens."""
    token: int
    ledger: Ledger | None
    """What predicting it cost; None for the first, which the exactly run prompt predicts."""
    guessed: bool
    """Whether its user's server had guessed it, so that what follows set out at once."""


def answer(
    driver: Driver,
    tokenizer: Any,
    ids: Sequence[int],
    *,
    access: int,
    policy: PolicySettings,
    max_new_tokens: int,
    sampling: Sampling,
) -> Iterator[Piece]:
    """Continue the prompt `ids` until the text ends or `max_new_tokens` are there.

    Raises `UserError` if the prompt is empty or leaves no room in the model's context.
    """
    texts = TextStream(lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True))
    for one in generate(
        driver,
        ids,
        access=access,
        budget=policy.allowed(policy.budget, plain=sampling.is_plain),
        confidence=policy.confidence,
        max_new_tokens=max_new_tokens,
        stop=stop_tokens(tokenizer),
        sampling=sampling,
    ):
        yield Piece(
            text=texts.push(one.token), token=one.token, ledger=one.ledger, guessed=one.guessed
        )


def prompt_ids(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    """Token ids of a prompt, as a chat turn if so wished; raises `UserError` if it is empty."""
    if not prompt.strip():
        raise UserError("The prompt is empty; give some text to continue.")
    if not chat:
        return tokenizer(prompt)["input_ids"]
    if not tokenizer.chat_template:
        raise UserError("This model has no chat template; do not ask for a chat turn.")
    turns = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]


def stop_tokens(tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer."""
    return frozenset(() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))


def server_index(names: tuple[str, ...], wanted: str | None) -> int:
    """The index of a server by name, the first if none is named; raises `UserError`."""
    if wanted is None:
        return 0
    if wanted not in names:
        raise UserError(
            f"There is no server `{wanted}` in the plan; choose from {', '.join(names)}."
        )
    return names.index(wanted)
