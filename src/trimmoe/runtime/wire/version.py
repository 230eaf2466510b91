"""Versions of what servers tell each other; `protocol` says which one this software speaks."""

from __future__ import annotations

from typing import NamedTuple


class Version(NamedTuple):
    """Of the protocol."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"
