"""Generating from one prompt with the in-process driver."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from trimmoe.core.errors import UserError
from trimmoe.core.ledger import Ledger
from trimmoe.models.base import MoEView
from trimmoe.runtime.local import Decoded
from trimmoe.runtime.sampling import Sampling, draw
from trimmoe.runtime.seen import Seen


class Driver(Protocol):
    """What decodes a sequence in this process: `LocalDriver`, `AloneDriver`."""

    @property
    def view(self) -> MoEView: ...

    def open(
        self,
        sequence: int,
        prompt: Sequence[int],
        *,
        access: int,
        budget: float,
        confidence: float,
    ) -> Tensor:
        """Admit a sequence and run its prompt exactly; logits [V] after it."""
        ...

    def led(self, sequence: int) -> bool:
        """Whether the next token of a sequence sets out on a guess."""
        ...

    def decode(self, tokens: dict[int, int]) -> list[Decoded]:
        """Feed one token to each of the given sequences; predictions in the same order."""
        ...

    def close(self, sequence: int) -> None:
        """End a sequence and free its cache."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """One generated token."""

    token: int
    ledger: Ledger | None
    """What predicting it cost; None for the first, which the exactly run prompt predicts."""
    guessed: bool = False
    """Whether its user's server had guessed it, so that what follows sets out at once."""


def generate(
    driver: Driver,
    prompt: Sequence[int],
    *,
    access: int,
    budget: float,
    confidence: float,
    max_new_tokens: int,
    stop: frozenset[int],
    sampling: Sampling,
) -> Iterator[Generated]:
    """Tokens as they are made; ends after a token in `stop`, which it includes.

    Raises `UserError` if the prompt is empty or leaves no room in the model's context.
    """
    check_prompt(prompt, driver.view.spec.context_length)
    room = driver.view.spec.context_length - len(prompt)
    logits = driver.open(0, prompt, access=access, budget=budget, confidence=confidence)
    ledger: Ledger | None = None
    seen = Seen(prompt=len(prompt), tokens=list(prompt))
    try:
        for position in range(len(prompt), len(prompt) + min(max_new_tokens, room)):
            token = draw(logits, sampling, position, seen).token
            seen.put(position, token)
            yield Generated(token=token, ledger=ledger, guessed=driver.led(0))
            if token in stop or position + 1 == len(prompt) + min(max_new_tokens, room):
                return
            (decoded,) = driver.decode({0: token})
            logits, ledger = decoded.logits, decoded.ledger
    finally:
        driver.close(0)


def check_prompt(prompt: Sequence[int], context_length: int) -> None:
    """Raise `UserError` if the prompt cannot be generated from."""
    if not prompt:
        raise UserError("The prompt is empty; give some text to continue.")
    if len(prompt) >= context_length:
        raise UserError(
            f"The prompt has {len(prompt)} tokens, the model's context holds {context_length} "
            "with the answer; shorten the prompt."
        )
