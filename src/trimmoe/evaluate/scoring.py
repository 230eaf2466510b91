"""The two ways to score a text under a policy."""

from __future__ import annotations

from enum import StrEnum


class Scoring(StrEnum):
    """How texts are forced; nothing but rounding tells the results apart."""

    LAYERS = "layers"
    """All positions of a layer at once. Models with an encoder are scored in steps all the same:
    their experts turn tokens away by how many come together."""
    STEPS = "steps"
    """Token by token, as texts are generated."""
