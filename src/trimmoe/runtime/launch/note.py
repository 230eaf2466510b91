"""What is kept of the servers of a machine for another version of this software."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """What every version of this software understands of a job; written as plain values."""

    version: str
    """Of the software that wrote it."""
    wire: int
    """Major version of the protocol that its servers speak."""
    cluster: str
    """Equal where servers of one version may take the place of those of another."""
    token: str = field(repr=False)
