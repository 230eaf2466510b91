"""What a user may choose about a calibration."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from trimmoe.core.errors import UserError

MIN_WINDOWS = 4
"""Fewest windows of text: the exit heads need three disjoint splits of whole windows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationSettings:
    """Settings of one calibration; every one of them is stored in the profile's header.

    Raises `UserError` for a value that cannot work.
    """

    tokens: int = 20_000
    """Calibration tokens asked for; fewer are used if the text is shorter."""
    window: int = 512
    """Tokens of one window; windows are independent sequences."""
    seed: int = 0
    budget: float = 0.02
    """D-bar of (25): flip rate a token may spend on skips and substitutes."""
    confidence: float = 0.9
    """p_J of (8): exit confidence for which L_q, pi and the centroids' exit layers hold."""
    exit_risk: float = 0.01
    """Share of all tokens that exits may flip; the confidence above is raised where needed."""
    exit_agreement: float = 0.15
    """Layers whose states agree with full depth less often than this get no exit head."""
    exit_heads: Literal["direction", "state"] = "direction"
    """What exit heads read: the state's direction, or the state itself, as in (7)."""
    importance: Literal["softmax_mass", "gates"] = "softmax_mass"
    """I of (4): the activated set's router softmax mass, or its gates as the model uses them
    (the letter of the paper; always 1 where the router renormalises)."""
    ucb_confidence: float = 0.95
    """One-sided confidence of every upper bound."""
    bins: int = 16
    """G: bins of a skip or drop curve."""
    steadiness_classes: int = 4
    """B: classes of tokens by how sure their prediction is foretold to be; what an action loses
    is measured in each. 1: all tokens alike, as in the paper."""
    neighbour_layers: int = 1
    """Layers on either side that a layer's curves are estimated with; 0: each by itself."""
    skip_samples: int = 750
    """Forced skips measured per layer."""
    drop_samples: int = 900
    """Forced drops of some slots measured per layer."""
    substitution_samples: int = 800
    """Forced substitutions measured per layer."""
    substitutes: int = 3
    """R: most substitutes any expert may have."""
    substitution_quantile: float = 0.5
    """Quantile of a layer's similarities above which an expert may stand in for another."""
    pair_samples: int = 200
    """Measurements after which a pair of experts may be judged by its own flips."""
    centroids: int = 64
    """C: centroids per layer."""
    stand_in_rank: int = 16
    """Directions of the linear map that stands in for an expert where a server guesses without it,
    fewer where there are many experts; 0: nothing stands in."""
    rung_tokens: int = 4096
    """Tokens of the text on which it is measured what copies in few bits lose that stand in for
    experts; 0: none does."""
    max_patterns: int = 256
    """P: most activated sets in a layer's codebook."""

    def __post_init__(self) -> None:
        for name in ("budget", "exit_risk", "exit_agreement", "substitution_quantile"):
            _require(0.0 <= getattr(self, name) <= 1.0, name, "from 0 to 1")
        for name in ("confidence", "ucb_confidence"):
            _require(0.0 < getattr(self, name) < 1.0, name, "between 0 and 1")
        for name in _AT_LEAST_ONE:
            _require(getattr(self, name) >= 1, name, "at least 1")
        for name in _AT_LEAST_NONE:
            _require(getattr(self, name) >= 0, name, "at least 0")
        _require(self.window >= 2, "window", "at least 2")
        _require(self.exit_heads in ("direction", "state"), "exit_heads", "direction or state")
        _require(
            self.importance in ("softmax_mass", "gates"), "importance", "softmax_mass or gates"
        )

    def as_json(self) -> dict[str, Any]:
        """Every setting by name, as plain JSON types."""
        return asdict(self)


_AT_LEAST_ONE = (
    "tokens",
    "bins",
    "steadiness_classes",
    "substitutes",
    "pair_samples",
    "centroids",
    "max_patterns",
)
_AT_LEAST_NONE = (
    "skip_samples",
    "drop_samples",
    "substitution_samples",
    "neighbour_layers",
    "stand_in_rank",
    "rung_tokens",
    "seed",
)


def _require(holds: bool, name: str, wanted: str) -> None:
    if not holds:
        raise UserError(f"The calibration setting {name} must be {wanted}.")
