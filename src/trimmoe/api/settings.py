"""What the operator decides about the HTTP side."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiSettings:
    """Access and limits."""

    api_keys: tuple[str, ...] = ()
    """Any of these opens every route; none means that everybody may come in."""
    page: bool = True
    """Whether `/` is a page to chat with and to watch the cluster on."""
    max_body_bytes: int = 1_000_000
    """Larger request bodies are refused unread."""

    def __post_init__(self) -> None:
        assert all(self.api_keys), "an empty API key would let everybody in"
        assert self.max_body_bytes > 0
