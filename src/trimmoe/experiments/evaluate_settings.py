"""What a user may choose about an evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from trimmoe.evaluate.scoring import Scoring


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateSettings:
    """What is evaluated and how."""

    methods: tuple[str, ...]
    """Beside exact execution, which always runs."""
    budgets: tuple[float, ...] = (0.02,)
    confidence: float = 0.9
    limit: int | None = None
    """Documents of each task."""
    num_fewshot: int | None = None
    """None: as the task says."""
    max_gen_toks: int | None = None
    max_length: int | None = None
    """Positions used of the context; None: all."""
    at_once: int = 16
    """Sequences decoded together."""
    seed: int = 0
    scoring: Scoring = Scoring.LAYERS
