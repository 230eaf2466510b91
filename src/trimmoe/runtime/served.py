"""The model that a service serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """What is served, as its users see it."""

    id: str
    tokenizer: Any
    """A transformers tokenizer."""
    context_length: int
    vocab_size: int
    created: int
    """Unix time at which it began to be served, in seconds."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end an answer."""
