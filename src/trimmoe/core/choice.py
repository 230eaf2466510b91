"""What a user chooses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from trimmoe.core.precision import Precision

DEFAULT_BUDGET = 0.02
"""Flip rate a token may lose under a policy that spends any, where nobody says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What a user chooses of how a model is run: by which method, and at what quality.

    Examples:
        >>> from trimmoe import Choice, Precision
        >>> Choice(budget=0.05, quantise=Precision.INT8).method
        'auto'
        >>> Choice(method="trimmoe").allowed
        0.02
    """

    method: str = "auto"
    """A name of `methods`: which policy, and on whose placement."""
    budget: float | None = None
    """Flip rate that a generated token may lose on average; None: under `auto` none, so that the
    answer is the exact model's, and 0.02 under another method that spends any."""
    confidence: float = 0.9
    """What an exit that is final needs; above 1 nothing exits."""
    quantise: Precision = Precision.NONE
    """In how many bits weights are held and served."""

    @property
    def allowed(self) -> float:
        """The budget of a method that spends any."""
        return DEFAULT_BUDGET if self.budget is None else self.budget

    def overridden(self, **given: Any) -> Choice:
        """The same, but for what is given and not None."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})
