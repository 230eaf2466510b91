"""What is to be known of a kind of layer to run it in two halves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What was found of a kind of layer."""

    mixer: str | None
    """The child that mixes tokens."""
    mixer_returns: int | None
    """How many values it returns, None for one that is not in a tuple."""
    reader: str
    """The child that reads the state after attention first."""
    router: str | None
    """Path of the module that gives router logits."""
    logits_at: int | None
    """Which of the values that it returns they are; None if it returns just them."""
    score: str | None
    """What of the logits gates are in proportion to, by name; None if to none that is known."""
    spared: tuple[str, ...]
    """Paths of modules that routing does not need."""
    experts_read: int
    """Width of what the experts read and give."""
    reads: str | None
    """What the experts read: the "state" after attention, the "norm" that the reader gives of it,
    or None for anything else."""
    factor: float | None
    """What the sum of the experts is multiplied with before it is added; None if it is not just
    added."""
    shares: bool
    """Whether the layer adds anything besides the routed experts."""
    block: str | None
    """The child that gives all that is added, from what the `reader` gives, times `block_factor`;
    None if there is none."""
    block_factor: float = 1.0


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: F.softmax(logits, dim=-1),
    "sigmoid": torch.sigmoid,
    # Scores of all experts, not of those alone that were chosen.
    "itself": lambda logits: torch.where((logits > 0).all(), logits, torch.nan),
    "root of softplus": lambda logits: F.softplus(logits).sqrt(),
}
"""What routers make of their logits."""
