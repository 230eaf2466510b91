"""Calibration from end to end: Algorithm 1, lines 1-8."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trimmoe.calibrate.centroids import fit_centroids
from trimmoe.calibrate.echoes import Echoes, echo_steps, measure_echoes
from trimmoe.calibrate.exits import Exits, calibrate_exits, split_windows
from trimmoe.calibrate.hazard import exit_hazard
from trimmoe.calibrate.inputs import input_squares, measures_inputs
from trimmoe.calibrate.losses import Losses, measure_losses, plan_experiments
from trimmoe.calibrate.phases import OnPhase, Phases
from trimmoe.calibrate.record import Advance, Recording, record, recording_steps
from trimmoe.calibrate.routing_stats import (
    execution_statistics,
    expert_transitions,
    pattern_statistics,
)
from trimmoe.calibrate.rungs import measure_rungs, measures_rungs, rung_steps
from trimmoe.calibrate.sampling import Classes
from trimmoe.calibrate.settings import CalibrationSettings
from trimmoe.calibrate.stand_ins import StandIns, fit_stand_ins, rank_of
from trimmoe.calibrate.steadiness import Steadiness, fit_steadiness, one_class
from trimmoe.calibrate.text import text_hash, token_windows
from trimmoe.calibrate.windows import Windows
from trimmoe.core.artifact import Header
from trimmoe.core.errors import UserError
from trimmoe.core.loss_curves import Rung
from trimmoe.core.profile import PROFILE_FORMAT, PROFILE_KIND, Profile
from trimmoe.core.specs import FloatArray
from trimmoe.cost.thresholds import skipped_layers, thresholds
from trimmoe.models.base import MoEView
from trimmoe.models.encoder_decoder import EncoderDecoderView


def calibrate(
    view: MoEView,
    tokenizer: Any,
    texts: Sequence[str],
    settings: CalibrationSettings,
    *,
    work_dir: Path | None = None,
    progress: bool = True,
    on_phase: OnPhase | None = None,
) -> Profile:
    """Measure a model on texts; the same inputs and seed give the same profile.

    The view must have been opened with all experts and its hash. `tokenizer` is called as those
    of transformers are. Hidden states (N x tokens x d in the view's precision and as many in 2
    bytes each) are written to `work_dir`, which is kept, or to a temporary directory, which is not.
    All text goes through a layer before the next one, four times (recording, echoes, what-ifs,
    stand-ins), so a streamed view reads its experts four times. Raises `UserError` if the text is
    too short or the working directory cannot be written or is too small.
    """
    windows = _windows(view, tokenizer, texts, settings)
    layers = view.spec.layer_count
    with _working_folder(work_dir) as folder, Phases(progress, on_phase) as phases:
        with phases.run("Recording", recording_steps(view, windows)) as advance:
            recording = record(
                view,
                windows,
                importance=settings.importance,
                least_agreement=settings.exit_agreement,
                keep_attended=settings.steadiness_classes > 1 or settings.stand_in_rank > 0,
                folder=folder,
                advance=advance,
            )
        with phases.run("Exit heads", layers) as advance:
            exits = calibrate_exits(recording, settings, advance)
        with phases.run("Steadiness", layers) as advance:
            steadiness = _steadiness(recording, settings, advance)
        classes = Classes(
            class_of=steadiness.class_of,
            count=steadiness.classes,
            apart=2 * settings.neighbour_layers + 1,
        )
        experiments = plan_experiments(recording, classes, settings)
        with phases.run("Echoes", echo_steps(recording, settings)) as advance:
            echoes = measure_echoes(view, recording, exits, experiments, settings, advance)
        with phases.run("What-ifs", layers * experiments.count) as advance:
            losses = measure_losses(view, recording, experiments, settings, advance)
        squares: NDArray[np.float32] | None = None
        if measures_inputs(view, recording):
            with phases.run("Expert inputs", layers) as advance:
                squares = input_squares(view, recording, advance)
        view.fit_copies(squares)
        rungs: tuple[Rung, ...] = ()
        if measures_rungs(view, settings):
            with phases.run("Copies", rung_steps(recording, settings)) as advance:
                rungs = measure_rungs(view, recording, classes, settings, advance)
        with phases.run("Centroids", layers) as advance:
            centroids = _centroids(recording, exits, settings, advance)
        stand_ins: StandIns | None = None
        if rank_of(view, settings):
            with phases.run("Stand-ins", layers) as advance:
                stand_ins = fit_stand_ins(view, recording, settings, advance)
        with phases.run("Statistics", 1):
            measured = _Measured(
                recording=recording,
                exits=exits,
                echoes=echoes,
                steadiness=steadiness,
                losses=losses,
                centroids=centroids,
                stand_ins=stand_ins,
                input_squares=squares,
                rungs=rungs,
            )
            return _profile(view, settings, text_hash(texts), measured)


def _windows(
    view: MoEView, tokenizer: Any, texts: Sequence[str], settings: CalibrationSettings
) -> Windows:
    """The text as windows; an encoder reads the first half of each, its decoder the second."""
    window = min(settings.window, view.spec.context_length)
    ids = token_windows(texts, tokenizer, tokens=settings.tokens, window=window, seed=settings.seed)
    if not isinstance(view, EncoderDecoderView):
        return Windows(ids=ids)
    sources, targets = ids[:, : window // 2], ids[:, window // 2 :].copy()
    targets[:, 1:] = targets[:, :-1].copy()
    targets[:, 0] = tokenizer.pad_token_id  # What T5's kin start from.
    return Windows(ids=targets, sources=sources)


def _steadiness(
    recording: Recording, settings: CalibrationSettings, advance: Advance
) -> Steadiness:
    if settings.steadiness_classes == 1:
        return one_class(recording)
    splits = split_windows(recording.windows, settings.seed)
    return fit_steadiness(recording, splits, settings.steadiness_classes, advance)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Centroids:
    """The centroids of (36) and what they imply about when tokens leave."""

    centroids: np.ndarray
    """float32 [N, C, d]."""
    centroid_exit_layer: FloatArray
    """[N, C]."""
    exit_hazard: FloatArray
    """[N+1, N]."""
    draft_hazard: FloatArray
    """Likewise."""


def _centroids(
    recording: Recording, exits: Exits, settings: CalibrationSettings, advance: Advance
) -> _Centroids:
    layers = recording.layer_count
    splits = split_windows(recording.windows, settings.seed)
    # Exit heads are surer of tokens that they were fitted on than of any they will meet.
    held = np.concatenate([splits.calibration, splits.test])
    centroids, means, predicted = [], [], []
    with torch.inference_mode():
        for hidden in recording.hidden:
            centroid, mean, nearest = fit_centroids(
                hidden, exits.layer, settings.centroids, layers, settings.seed
            )
            centroids.append(centroid)
            means.append(mean)
            predicted.append(np.rint(mean).astype(np.int64)[nearest[held]])
            advance(1)
    foretold = np.stack(predicted)
    return _Centroids(
        centroids=np.stack(centroids),
        centroid_exit_layer=np.stack(means),
        exit_hazard=exit_hazard(exits.layer[held], foretold),
        draft_hazard=exit_hazard(exits.draft_layer[held], foretold),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Measured:
    """What the phases found."""

    recording: Recording
    exits: Exits
    echoes: Echoes
    steadiness: Steadiness
    losses: Losses
    centroids: _Centroids
    stand_ins: StandIns | None
    input_squares: NDArray[np.float32] | None
    rungs: tuple[Rung, ...]


def _profile(
    view: MoEView, settings: CalibrationSettings, text: str, measured: _Measured
) -> Profile:
    """Everything measured, with the thresholds (24, 25) and statistics (26, 27, 38) it implies."""
    recording, exits, losses = measured.recording, measured.exits, measured.losses
    steadiness = measured.steadiness
    importance = recording.importance.astype(np.float64)
    experts = view.spec.expert_count
    quantiles = np.quantile(importance, np.linspace(0.0, 1.0, 101), axis=1).T.copy()
    skip = losses.skip.pooled(steadiness.share)
    theta, epsilon = thresholds(skip, quantiles, settings.budget)
    patterns = pattern_statistics(
        recording.activated, recording.masses, importance, experts, settings.max_patterns
    )
    execution = execution_statistics(
        recording.activated, importance, theta, exits.layer, experts, settings.ucb_confidence
    )
    kappa = skipped_layers(skip, quantiles, epsilon)
    extra = _report(measured) | {"epsilon": epsilon, "kappa": kappa}
    return Profile(
        header=_header(view, settings, text, extra),
        exit_weight=exits.weight,
        exit_bias=exits.bias,
        exit_grid=exits.grid,
        exit_error_upper=exits.error_upper,
        exit_rate=exits.rate,
        exit_echo=measured.echoes.exits,
        change_echo=measured.echoes.changes,
        steady_weight=steadiness.weight,
        steady_bias=steadiness.bias,
        steady_edges=steadiness.edges,
        class_share=steadiness.share,
        skip=losses.skip,
        drop=losses.drop,
        importance_quantiles=quantiles,
        theta=theta,
        similarity=losses.similarity,
        substitution_loss=losses.substitution_loss,
        substitution_mean=losses.substitution_mean,
        substitution_samples=losses.substitution_samples,
        feasible=losses.feasible,
        rungs=measured.rungs,
        input_squares=measured.input_squares,
        expert_transitions=expert_transitions(recording.activated[:, :, 0], experts),
        **_fields(patterns),
        **_fields(execution),
        **_fields(measured.centroids),
        **({} if measured.stand_ins is None else _fields(measured.stand_ins)),
    )


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}


def _header(
    view: MoEView, settings: CalibrationSettings, text: str, extra: dict[str, Any]
) -> Header:
    return Header(
        kind=PROFILE_KIND,
        format_version=PROFILE_FORMAT,
        settings=settings.as_json() | {"model": view.spec.name, "family": view.spec.family},
        input_hashes={"model": view.spec.model_hash, "text": text},
        seed=settings.seed,
        extra=extra,
    )


def _report(measured: _Measured) -> dict[str, Any]:
    """What a reader of the profile may ask about how it was made."""
    recording, exits, losses = measured.recording, measured.exits, measured.losses
    table = zip(exits.grid, exits.error_upper, exits.rate, strict=True)
    may_exit = np.isfinite(exits.threshold)
    return {
        "tokens": recording.token_count,
        "agreement": [round(float(share), 4) for share in recording.agreement],
        "exit_threshold": exits.threshold if may_exit else None,
        "steadiness_explained": [round(float(r2), 4) for r2 in measured.steadiness.explained],
        "exit_table": [[round(float(value), 5) for value in row] for row in table],
        **losses.report,
    }


@contextmanager
def _working_folder(work_dir: Path | None) -> Iterator[Path]:
    if work_dir is None:
        with TemporaryDirectory(prefix="trimmoe-calibrate-") as folder:
            yield Path(folder)
        return
    try:
        work_dir.mkdir(parents=True, exist_ok=True)
        probe = work_dir / ".trimmoe-probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"Cannot write to the working directory {work_dir}: {error.strerror}."
        ) from error
    yield work_dir
