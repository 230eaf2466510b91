"""What a request says of how its tokens are drawn; `sampling` draws them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is drawn."""

    temperature: float = 0.0
    """0 takes the most probable token."""
    top_p: float = 1.0
    """Draw from the fewest most probable tokens that hold this share of the probability."""
    top_k: int = 0
    """Draw from so many most probable tokens; 0: from all."""
    min_p: float = 0.0
    """Draw from tokens at least this share as probable as the most probable one."""
    seed: int = 0
    stream: int = 0
    """Tells apart several answers to one prompt under one seed."""
    logprobs: int | None = None
    """How many alternatives to report with each token; None reports no probabilities at all."""
    frequency_penalty: float = 0.0
    """Taken off a token's logit for each time that the answer has it."""
    presence_penalty: float = 0.0
    """Taken off a token's logit if the answer has it."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens that prompt or answer have, multiplies negative ones."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit)."""
    min_tokens: int = 0
    """None of `stop_ids` is drawn before the answer has so many tokens."""
    stop_ids: tuple[int, ...] = ()
    grammar: str = ""
    """What answers are held to, as llguidance writes it; see `runtime.guides`."""
    prompt_logprobs: int | None = None
    """How many alternatives to report with each token of the prompt; None reports none of them."""

    def __post_init__(self) -> None:
        assert self.temperature >= 0
        assert 0 < self.top_p <= 1
        assert self.top_k >= 0
        assert 0 <= self.min_p <= 1
        assert self.logprobs is None or self.logprobs >= 0
        assert self.repetition_penalty > 0
        assert self.min_tokens >= 0

    @property
    def is_plain(self) -> bool:
        """Whether the model's most probable token is taken, whatever it is."""
        return self.temperature == 0 and not self.logit_bias and not self.looks_back

    @property
    def looks_back(self) -> bool:
        """Whether a server needs the tokens before."""
        return (
            self.prompt_logprobs is not None
            or bool(self.frequency_penalty or self.presence_penalty)
            or bool(self.min_tokens or self.grammar)
            or self.repetition_penalty != 1
        )
