"""The profile: everything Algorithm 1, lines 1-8, learns about a model from a text.

All quality losses are flip rates: the fraction of calibration tokens whose next-token prediction
changes. Every rate that a guarantee leans on is stored as an upper confidence bound; the fields
say which.

Shapes: N MoE layers, E experts, k activated, d hidden, B steadiness classes, R slot ranks, G bins
of a loss curve, P patterns (activated sets), C centroids, T grid of exit thresholds, r directions
of a stand-in.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trimmoe.core.artifact import (
    Header,
    arrays_hash,
    load_artifact,
    save_artifact,
    undamaged,
)
from trimmoe.core.contents import Kept, amount, count, require_contents, share
from trimmoe.core.errors import UserError
from trimmoe.core.exit_states import ExitState, exit_bound, exit_threshold
from trimmoe.core.loss_curves import (
    LossCurves,
    Rung,
    curve_arrays,
    curve_fields,
    rung_fields,
    rung_name,
    taken_curves,
    taken_rungs,
)
from trimmoe.core.specs import BoolArray, FloatArray, IntArray, ModelSpec
from trimmoe.core.stand_ins import RUNGS

PROFILE_KIND = "profile"
PROFILE_FORMAT = 4
DRAFT_CONFIDENCE = 0.6
"""At which drafts set out by default. Lower, more tokens set out early and more of them in vain: on
the embedded model 12 % of the layers are not waited for at 0.6, and half as many run in vain; at
0.4 13 %, and as many."""


CHANGES = ("skip", "drop", "substitution")
"""What may be done to a token in one layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Calibration of one model on one text. See the module docstring for the shapes."""

    header: Header

    # Exit heads (7, 22, 23), already calibrated on a disjoint split.
    exit_weight: NDArray[np.float32]
    """[N, d]; confidence = sigmoid(weight . h / rms(h) + bias), or of h itself where the settings
    say `exit_heads: state`."""
    exit_bias: NDArray[np.float32]
    """[N]."""
    exit_grid: FloatArray
    """Candidate thresholds p, ascending, [T]."""
    exit_error_upper: FloatArray
    """Upper bound of P(prediction differs | exit at the first layer with confidence >= p), [T]."""
    exit_rate: FloatArray
    """Share of held-out tokens that exit before full depth at each p, [T]."""
    exit_echo: FloatArray
    """Upper bound of the predictions of later tokens that one exit flips, since they attend to what
    it left, by `ECHOING_STATES`; may exceed 1, [2]."""

    # How steady a token is: how little its prediction depends on any one layer.
    steady_weight: NDArray[np.float32]
    """[N, d]; score = weight . h / rms(h) + bias, h the state that the router reads."""
    steady_bias: NDArray[np.float32]
    """[N]."""
    steady_edges: FloatArray
    """Ascending, [N, B-1]: a token's class is the number of edges its score is at least; class 0
    flips most easily."""
    class_share: FloatArray
    """Share of calibration tokens in each class, [N, B]."""
    exit_hazard: FloatArray
    """P(a token exits right after layer l | it has not before, predicted exit layer q (36)) at the
    calibrated threshold, [N+1, N]; row 0 is not used, the last column is 1."""

    # What removing router mass costs (5, 24).
    skip: LossCurves
    """All slots of a layer dropped; mass = importance I (4)."""
    drop: LossCurves
    """Some, not all, slots dropped; mass = softmax mass of the dropped slots."""
    importance_quantiles: FloatArray
    """[N, 101]: quantiles 0..100 % of the importance of each layer."""
    theta: FloatArray
    """Importance thresholds (24) for the budget and settings in the header, [N]."""

    change_echo: FloatArray
    """Upper bound of the predictions of later tokens that a skip, some dropped slots or one
    substitute flip, since they attend to what the token left, by layer and `CHANGES`, [N, 3]. The
    curves and losses here are without it."""

    # Substitution (3).
    similarity: FloatArray
    """Sim_l(r, k): cosine of the router-logit columns centred per token, [N, E, E]."""
    substitution_loss: FloatArray
    """Upper bound of Q_l(r, k) by class and rank, zero on the diagonal, [N, B, R, E, E]. Rank 0 is
    the slot of largest mass, the last rank all others; R = 1 where they are not told apart."""
    substitution_samples: IntArray
    """Measured substitutions behind each entry, the same shape."""
    feasible: BoolArray
    """k in R_{l,r} or k = r, [N, E, E]."""

    # Routing statistics (26, 27, 38).
    expert_transitions: FloatArray
    """P_l(k -> k') of the first activated expert, rows sum to one, [N-1, E, E]."""
    patterns: IntArray
    """Codebook of activated sets, ascending expert ids, [N, P, k]; unused rows repeat row 0."""
    pattern_share: FloatArray
    """How often each pattern (or a set nearest to it) is activated, [N, P], rows sum to one."""
    pattern_transitions: FloatArray
    """From activated set to activated set, rows sum to one, [N-1, P, P]."""
    pattern_mass: FloatArray
    """Mean softmax mass of each pattern's experts, in its order, [N, P, k]."""
    pattern_importance: FloatArray
    """Deciles 0..100 % of the importance given the pattern, [N, P, 11]."""
    pattern_coverage: FloatArray
    """Share of tokens whose activated set is exactly in the codebook, [N]."""
    active: FloatArray
    """pi_l (26), [N]."""
    active_upper: FloatArray
    executed: FloatArray
    """sigma_l^k (27), [N, E]."""
    executed_upper: FloatArray
    activated: FloatArray
    """a_l^k: share of tokens that activate expert k in layer l, rows sum to k, [N, E]."""
    activated_upper: FloatArray

    # Exit-point prediction (36).
    centroids: NDArray[np.float32]
    """Unit directions of hidden states after each layer, [N, C, d]."""
    centroid_exit_layer: FloatArray
    """Average exit layer L_q (1..N) of the tokens of each centroid, [N, C]."""

    draft_hazard: FloatArray | None = None
    """What `exit_hazard` is, of drafts, which leave at `DRAFT_CONFIDENCE` whatever they would flip;
    None in profiles from before it was kept."""

    substitution_mean: FloatArray | None = None
    """What `substitution_loss` bounds, as it was measured on average, the same shape; None in
    profiles from before it was kept."""

    # What stands in for an expert where a server guesses without it; None: nothing does, as in
    # profiles from before there were any. Times its gate, an expert that reads x (the output of the
    # norm) is taken to give x . read . give.
    stand_in_read: NDArray[np.float16] | None = None
    """[N, d, E, r]."""
    stand_in_give: NDArray[np.float16] | None = None
    """[N, E, r, d]."""

    input_squares: NDArray[np.float32] | None = None
    """Means over tokens of the squares of what a layer's experts read, [N, d]: copies in few bits
    are fitted to them. None in profiles from before they were kept."""

    rungs: tuple[Rung, ...] = ()
    """What copies in few bits cost that stand in for experts, by bits, ascending; empty where
    nobody has measured it, as in profiles from before it was, so that none stands in."""

    @property
    def stand_in_bytes(self) -> int:
        """What stand-ins take on every server, beside the dense part."""
        parts = (self.stand_in_read, self.stand_in_give)
        return sum(0 if part is None else part.nbytes for part in parts)

    @property
    def layer_count(self) -> int:
        return self.theta.shape[0]

    @property
    def expert_count(self) -> int:
        return self.similarity.shape[1]

    @property
    def class_count(self) -> int:
        return self.class_share.shape[1]

    @property
    def top_k(self) -> int:
        return self.patterns.shape[2]

    @property
    def expected_executions(self) -> FloatArray:
        """lambda_l^k = pi_l sigma_l^k a_l^k, [N, E]."""
        return self.active[:, None] * self.executed * self.activated

    @property
    def hash(self) -> str:
        return arrays_hash(self.header, self._arrays())

    @property
    def model_hash(self) -> str:
        return self.header.input_hashes["model"]

    def echoing(self) -> Profile:
        """The same where skips, drops and substitutes cost what they flip of later tokens too."""
        skip, drop, substitution = self.change_echo.T
        other = substitution[:, None, None, None, None] * ~np.eye(self.expert_count, dtype=bool)
        return replace(
            self,
            skip=self.skip.raised(skip),
            drop=self.drop.raised(drop),
            substitution_loss=np.minimum(self.substitution_loss + other, 1.0),
            change_echo=np.zeros_like(self.change_echo),
        )

    def averaged(self) -> Profile:
        """The same with what was measured on average instead of its bounds; substitution losses of
        profiles that hold no means stay bounds."""
        mean = self.substitution_mean
        return replace(
            self,
            skip=self.skip.averaged(),
            drop=self.drop.averaged(),
            substitution_loss=self.substitution_loss if mean is None else mean,
            rungs=tuple(replace(rung, curves=rung.curves.averaged()) for rung in self.rungs),
        )

    def exit_bound(self, state: ExitState) -> FloatArray:
        """Upper bound of all that one exit flips at each p, itself and later tokens, [T]."""
        return exit_bound(self.exit_error_upper, self.exit_echo, state)

    def exit_threshold_at_risk(self, risk: float, state: ExitState) -> float:
        """The least grid p at which, and above which, exits flip at most `risk` of all tokens.

        The bound is that of one exit times the share of tokens that exit; unlike the former it
        falls with p. Infinite, so that nothing exits, if none will do.
        """
        return exit_threshold(self.exit_grid, self.exit_bound(state) * self.exit_rate, risk)

    def slots_alike(self, substitution_loss: FloatArray) -> FloatArray:
        """Substitution losses [N, B, R, E, E] of slots whose rank is not looked at, R = 1."""
        ranks = slot_ranks(self.top_k, substitution_loss.shape[2])
        return substitution_loss[:, :, ranks].mean(2, keepdims=True)

    def require_model(self, model: ModelSpec) -> None:
        """Raise `UserError` unless the profile was made from this model."""
        assert model.model_hash, "open the model with its hash to check what a profile is of"
        shape = (self.layer_count, self.expert_count, self.top_k, self.exit_weight.shape[1])
        wanted = (model.layer_count, model.expert_count, model.top_k, model.hidden_size)
        if self.model_hash != model.model_hash or shape != wanted:
            made_from = self.header.settings.get("model", "another model")
            raise UserError(
                f"The profile was calibrated on {made_from} ({self.model_hash[:12]}), not on "
                f"{model.name} ({model.model_hash[:12]}); run `trimmoe calibrate` on this model."
            )

    def save(self, path: Path) -> None:
        """Write the profile to `path`, atomically."""
        save_artifact(path, self.header, self._arrays())

    def _arrays(self) -> dict[str, np.ndarray]:
        arrays: dict[str, np.ndarray] = {}
        for name in (item.name for item in fields(self)):
            value = getattr(self, name)
            if value is None or name in ("header", "rungs"):
                continue
            if isinstance(value, LossCurves):
                arrays |= curve_arrays(name, value)
            else:
                arrays[name] = value.astype(np.uint8) if value.dtype == bool else value
        for rung in self.rungs:
            name = rung_name(rung.bits)
            arrays |= curve_arrays(name, rung.curves)
        return arrays


def slot_ranks(slots: int, ranks: int) -> IntArray:
    """Which of the `ranks` that substitution losses tell apart each slot has, [slots]."""
    return np.minimum(np.arange(slots), ranks - 1)


def load_profile(path: Path) -> Profile:
    """Read a profile; raises `UserError` if it is missing, damaged or of another format."""
    header, arrays = load_artifact(path, kind=PROFILE_KIND, format_version=PROFILE_FORMAT)
    with undamaged(path, PROFILE_KIND):
        require_contents(arrays, _FIELDS)
        str(header.input_hashes["model"])
        curves = {name: taken_curves(arrays, name) for name in ("skip", "drop")}
        rungs = taken_rungs(arrays)
        arrays["feasible"] = arrays["feasible"].astype(bool)
        return Profile(header=header, rungs=rungs, **arrays, **curves)  # type: ignore[arg-type]


_FIELDS = {
    "exit_weight": Kept(axes="N d"),
    "exit_bias": Kept(axes="N"),
    "exit_grid": amount("T"),
    "exit_error_upper": share("T"),
    "exit_rate": share("T"),
    "exit_echo": amount("2"),
    "steady_weight": Kept(axes="N d"),
    "steady_bias": Kept(axes="N"),
    "class_share": share("N B"),
    "steady_edges": Kept(axes="N B-1"),
    "exit_hazard": share("N+1 N"),
    **curve_fields("skip"),
    **curve_fields("drop"),
    "importance_quantiles": share("N 101"),
    "theta": amount("N", endless=True),
    "change_echo": amount("N 3"),
    "similarity": Kept(axes="N E E", least=-1.001, most=1.001),
    "substitution_loss": share("N B R E E"),
    "substitution_samples": count("N B R E E"),
    "feasible": count("N E E", 1),
    "expert_transitions": share("N-1 E E"),
    "patterns": count("N P k", "E"),
    "pattern_share": share("N P"),
    "pattern_transitions": share("N-1 P P"),
    "pattern_mass": share("N P k"),
    "pattern_importance": share("N P 11"),
    "pattern_coverage": share("N"),
    **{
        name: share("N" if name.startswith("active_") or name == "active" else "N E")
        for part in ("active", "executed", "activated")
        for name in (part, f"{part}_upper")
    },
    "centroids": Kept(axes="N C d"),
    "centroid_exit_layer": Kept(axes="N C", least=1.0, most=1e6),
    "draft_hazard": share("N+1 N", optional=True),
    "substitution_mean": share("N B R E E", optional=True),
    "stand_in_read": Kept(axes="N d E r", optional=True),
    "stand_in_give": Kept(axes="N E r d", optional=True),
    "input_squares": replace(amount("N d"), optional=True),
    **{name: kept for bits in RUNGS for name, kept in rung_fields(bits).items()},
}
"""What is in the file; see the module docstring for the names of sizes."""
