"""The profile that belongs to generated traces, and both of one made-up model.

Routing, patterns, executions and hazards are counted on drawn tokens by the functions of
calibration; the loss curves are the parameters' own, without noise. There are no hidden states, so
heads and centroids are zero: such a profile serves planning and simulation, never a real model.
"""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np

from trimmoe.calibrate.hazard import exit_hazard, exit_layers
from trimmoe.calibrate.routing_stats import (
    execution_statistics,
    expert_transitions,
    pattern_statistics,
)
from trimmoe.core.artifact import Header
from trimmoe.core.loss_curves import LossCurves
from trimmoe.core.profile import CHANGES, DRAFT_CONFIDENCE, PROFILE_FORMAT, PROFILE_KIND, Profile
from trimmoe.core.specs import ModelSpec
from trimmoe.core.trace import Trace
from trimmoe.cost.thresholds import thresholds
from trimmoe.simulator.echo_law import by_factor, own_flips
from trimmoe.simulator.generate import (
    Parameters,
    Tokens,
    class_shares,
    draw_tokens,
    generate_trace,
)

_BINS = 12
_SIMILARITY_DIMENSIONS = 6
_CONFIDENCE_OF_BOUNDS = 0.95


def generate_profile_and_trace(
    model: ModelSpec,
    parameters: Parameters,
    *,
    sequences: int,
    length: int,
    seed: int,
    profile_tokens: int = 8192,
) -> tuple[Profile, Trace]:
    """A profile and a trace of the same made-up structure, of other tokens each."""
    profile = generate_profile(model, parameters, seed=seed, tokens=profile_tokens)
    trace = generate_trace(
        model,
        parameters,
        sequences=sequences,
        length=length,
        seed=seed + 1,
        structure_seed=seed,
        profile_hash=profile.hash,
    )
    return profile, trace


def generate_profile(
    model: ModelSpec,
    parameters: Parameters,
    *,
    seed: int,
    tokens: int = 8192,
    budget: float = 0.02,
    max_patterns: int = 128,
) -> Profile:
    """A profile of a model of this geometry; `seed` draws its structure and its tokens."""
    drawn = draw_tokens(model, parameters, tokens, seed, seed)
    activated = np.ascontiguousarray(drawn.experts.transpose(1, 0, 2))
    importance = np.ascontiguousarray(drawn.importance.T)
    masses = np.ascontiguousarray(drawn.masses.transpose(1, 0, 2))
    quantiles = np.quantile(importance, np.linspace(0.0, 1.0, 101), axis=1).T.copy()
    skip = _curves(model.layer_count, parameters.skip_flip, parameters, tokens)
    share = np.tile(class_shares(parameters.classes), (model.layer_count, 1))
    theta, _ = thresholds(skip.pooled(share), quantiles, budget)
    experts = model.expert_count
    patterns = pattern_statistics(activated, masses, importance, experts, max_patterns)
    execution = execution_statistics(
        activated, importance, theta, drawn.exit_layer, experts, _CONFIDENCE_OF_BOUNDS
    )
    quiet = Profile(
        header=_header(model, parameters, seed, tokens),
        skip=skip,
        drop=_curves(model.layer_count, parameters.drop_flip, parameters, tokens),
        importance_quantiles=quantiles,
        theta=theta,
        class_share=share,
        expert_transitions=expert_transitions(activated[:, :, 0], experts),
        exit_hazard=exit_hazard(drawn.exit_layer, drawn.exit_at.T),
        draft_hazard=exit_hazard(
            exit_layers(drawn.confidence.T, DRAFT_CONFIDENCE), drawn.exit_at.T
        ),
        **_fields(patterns),
        **_fields(execution),
        **_exit_bounds(drawn, parameters),
        **_without_states(model, parameters),
        **_substitution(model, parameters, seed, tokens),
    )
    echo = by_factor(parameters.change_echo, model.layer_count)[:, None]
    return replace(quiet, change_echo=echo * own_flips(quiet, parameters.bound_excess))


def _fields(record) -> dict:
    return {name: getattr(record, name) for name in record.__slots__}


def _header(model: ModelSpec, parameters: Parameters, seed: int, tokens: int) -> Header:
    return Header(
        kind=PROFILE_KIND,
        format_version=PROFILE_FORMAT,
        settings={"model": model.name, "generator": asdict(parameters), "tokens": tokens},
        input_hashes={"model": model.model_hash, "text": "generated"},
        seed=seed,
    )


def class_factors(parameters: Parameters) -> np.ndarray:
    """Flip rate of each class over that of the least steady, [B]."""
    return parameters.class_ratio ** np.arange(parameters.classes)


def _curves(layers: int, at_one: float, parameters: Parameters, tokens: int) -> LossCurves:
    """flip = at_one * factor_b * mass^power, the same in all layers."""
    edges = np.linspace(0.0, 1.0, _BINS + 1)[1:]
    mean = at_one * class_factors(parameters)[:, None] * edges**parameters.flip_power
    shape = (layers, parameters.classes, _BINS)
    return LossCurves(
        edges=np.broadcast_to(edges, shape).copy(),
        mean=np.broadcast_to(np.minimum(mean, 1.0), shape).copy(),
        upper=np.broadcast_to(np.minimum(mean * parameters.bound_excess, 1.0), shape).copy(),
        samples=np.full(shape, tokens // _BINS),
    )


def _exit_bounds(drawn: Tokens, parameters: Parameters) -> dict:
    """Exits by threshold, counted on the drawn tokens; their error falls with the threshold."""
    grid = np.linspace(0.5, 0.99, 15)
    sure = drawn.confidence[:, :-1].max(axis=1, initial=-np.inf)
    return {
        "exit_grid": grid,
        "exit_error_upper": np.minimum(parameters.exit_error * (1.0 - grid), 1.0),
        "exit_rate": (sure[:, None] >= grid).mean(axis=0),
        "exit_echo": np.array([parameters.dense_exit_echo, parameters.frozen_exit_echo]),
        "change_echo": np.zeros((drawn.experts.shape[1], len(CHANGES))),
    }


def _without_states(model: ModelSpec, parameters: Parameters) -> dict:
    layers, width = model.layer_count, model.hidden_size
    return {
        "exit_weight": np.zeros((layers, width), dtype=np.float32),
        "exit_bias": np.zeros(layers, dtype=np.float32),
        "steady_weight": np.zeros((layers, width), dtype=np.float32),
        "steady_bias": np.zeros(layers, dtype=np.float32),
        "steady_edges": np.tile(np.arange(parameters.classes - 1.0), (layers, 1)),
        "centroids": np.zeros((layers, 1, width), dtype=np.float32),
        "centroid_exit_layer": np.full((layers, 1), float(layers)),
    }


def _substitution(model: ModelSpec, parameters: Parameters, seed: int, tokens: int) -> dict:
    """Experts are directions; what a substitute loses grows with the angle between them."""
    rng = np.random.default_rng([seed, 2])
    layers, experts = model.layer_count, model.expert_count
    direction = rng.normal(size=(layers, experts, _SIMILARITY_DIMENSIONS))
    direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
    similarity = np.clip(direction @ direction.transpose(0, 2, 1), -1.0, 1.0)
    itself = np.broadcast_to(np.eye(experts, dtype=bool), similarity.shape)
    similarity[itself] = 1.0
    scale = parameters.substitution_flip * parameters.bound_excess * class_factors(parameters)
    distance = (1.0 - similarity[:, None, None]) / 2.0
    loss = np.minimum(scale[None, :, None, None, None] * distance, 1.0)  # of any slot
    return {
        "similarity": similarity,
        "substitution_loss": loss,
        "substitution_mean": loss / parameters.bound_excess,
        "substitution_samples": np.full(loss.shape, tokens // experts),
        "feasible": (similarity >= parameters.feasible_similarity) | itself,
    }
