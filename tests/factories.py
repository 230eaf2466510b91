"""Random but valid models, clusters and profiles of any small geometry, for property tests.

Each is a pure function of a numpy generator; the hypothesis strategies at the end draw a seed and
a geometry and call them, so that a failing example is reproduced from what hypothesis prints.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from trimmoe.core.artifact import Header
from trimmoe.core.loss_curves import LossCurves, Rung
from trimmoe.core.profile import PROFILE_FORMAT, PROFILE_KIND, Profile
from trimmoe.core.specs import BoolArray, ClusterSpec, FloatArray, IntArray, ModelSpec
from trimmoe.core.stand_ins import RUNGS

GB = 10**9

# A busy machine must not fail a property for being slow. Where CI is set the examples are the
# same in every run, so that a change is judged by itself; elsewhere every run tries new ones.
settings.register_profile("unhurried", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("unhurried")


def random_model_spec(
    rng: np.random.Generator,
    *,
    layers: int = 4,
    experts: int = 6,
    top_k: int = 2,
    hidden: int = 16,
    unequal: bool = False,
) -> ModelSpec:
    """A model of small geometry and Mixtral-like proportions; `unequal` makes sizes differ."""
    shape = (layers, experts)
    scale = rng.uniform(0.5, 1.5, shape) if unequal else np.ones(shape)
    size = int(rng.integers(1_000_000, 200_000_000))
    return ModelSpec(
        name="random-moe",
        family="random",
        model_hash=f"{int(rng.integers(2**63)):064x}",
        layer_count=layers,
        expert_count=experts,
        top_k=top_k,
        hidden_size=hidden,
        vocab_size=int(rng.integers(100, 1000)),
        context_length=512,
        activation_bytes=2,
        gates_renormalised=bool(rng.random() < 0.5),
        expert_bytes=np.maximum(1, size * scale).astype(np.int64),
        expert_flops=float(rng.uniform(1e8, 1e10)) * scale,
        layer_dense_flops=rng.uniform(1e7, 1e9, layers),
        head_flops=float(rng.uniform(1e7, 1e9)),
        dense_bytes=int(rng.integers(1_000_000, 500_000_000)),
    )


def random_cluster(
    rng: np.random.Generator,
    *,
    servers: int = 4,
    memory_ratio: float | None = 2.0,
    symmetric: bool = True,
) -> ClusterSpec:
    """A cluster in the paper's ranges: 18-120 TFLOPS, 12-48 GB, 0.8-10 Gbps, 0.3-22 ms."""
    shape = (servers, servers)
    gbps = np.exp(rng.uniform(np.log(0.8), np.log(10.0), shape))
    delay_s = np.exp(rng.uniform(np.log(0.3), np.log(22.0), shape)) * 1e-3
    if symmetric:
        upper = np.triu(np.ones(shape, dtype=bool))
        gbps, delay_s = np.where(upper, gbps, gbps.T), np.where(upper, delay_s, delay_s.T)
    np.fill_diagonal(gbps, np.inf)
    np.fill_diagonal(delay_s, 0.0)
    return ClusterSpec(
        name="random-cluster",
        server_names=tuple(f"s{index}" for index in range(servers)),
        memory_bytes=(rng.uniform(12, 48, servers) * GB).astype(np.int64),
        memory_ratio=memory_ratio,
        flops_per_s=rng.uniform(18e12, 120e12, servers),
        access_share=rng.dirichlet(np.ones(servers)),
        bandwidth_bytes_per_s=gbps * 1e9 / 8,
        delay_s=delay_s,
    )


def random_profile(
    rng: np.random.Generator,
    model: ModelSpec,
    *,
    patterns: int = 12,
    bins: int = 8,
    centroids: int = 5,
    grid: int = 9,
    classes: int = 2,
) -> Profile:
    """A full profile of `model` whose fields agree with one another.

    Shares follow the pattern transitions, `activated` and `executed` follow the shares, curves are
    monotone, bounds lie above means, losses in [0, 1] and every expert is feasible for itself.
    """
    codebook, used = _codebook(rng, model, patterns)
    share, transitions = _pattern_chain(rng, used)
    importance, mass = _importance(rng, codebook)
    theta = rng.uniform(0.0, 0.8, model.layer_count)
    return Profile(
        header=_header(model, int(rng.integers(2**31))),
        skip=_random_curves(rng, model.layer_count, classes, bins),
        drop=_random_curves(rng, model.layer_count, classes, bins),
        importance_quantiles=_importance_quantiles(share, importance),
        theta=theta,
        expert_transitions=_expert_transitions(model, codebook, mass, share, transitions),
        patterns=codebook,
        pattern_share=share,
        pattern_transitions=transitions,
        pattern_mass=mass,
        pattern_importance=importance,
        pattern_coverage=rng.uniform(0.5, 1.0, model.layer_count),
        rungs=_random_rungs(model, classes),
        input_squares=_input_squares(model),
        **_exit_fields(rng, model, grid),
        **_steadiness_fields(rng, model, classes),
        **_substitution_fields(rng, model, classes),
        **_execution_fields(rng, model, codebook, share, importance, theta),
        **_centroid_fields(rng, model, centroids),
    )


def _header(model: ModelSpec, seed: int) -> Header:
    return Header(
        kind=PROFILE_KIND,
        format_version=PROFILE_FORMAT,
        settings={"model": model.name},
        input_hashes={"model": model.model_hash, "text": "0" * 64},
        seed=seed,
    )


def _input_squares(model: ModelSpec) -> np.ndarray:
    """Some channels of states are far larger than others."""
    shape = (model.layer_count, model.hidden_size)
    return np.random.default_rng(0).lognormal(sigma=1.5, size=shape).astype(np.float32)


def _exit_fields(rng: np.random.Generator, model: ModelSpec, grid: int) -> dict:
    return {
        "exit_weight": rng.normal(size=(model.layer_count, model.hidden_size)).astype(np.float32),
        "exit_bias": rng.normal(size=model.layer_count).astype(np.float32),
        "exit_grid": np.linspace(0.5, 1.0, grid),
        "exit_error_upper": np.sort(rng.uniform(0.0, 0.3, grid))[::-1].copy(),
        "exit_rate": np.sort(rng.uniform(0.0, 1.0, grid))[::-1].copy(),
        "exit_echo": np.array([0.01, 0.02]),
        "change_echo": np.tile([0.003, 0.002, 0.001], (model.layer_count, 1)),
    }


def _random_curves(rng: np.random.Generator, layers: int, classes: int, bins: int) -> LossCurves:
    shape = (layers, classes, bins)
    edges = np.sort(rng.uniform(0.0, 1.0, (layers, 1, bins)), axis=2)
    edges[..., -1] = 1.0
    mean = np.sort(rng.uniform(0.0, 0.3, shape), axis=2)
    return LossCurves(
        edges=np.broadcast_to(edges, shape).copy(),
        mean=mean,
        upper=np.minimum(mean + rng.uniform(0.0, 0.1, (layers, classes, 1)), 1.0),
        samples=rng.integers(10, 1000, shape),
    )


def _random_rungs(model: ModelSpec, classes: int) -> tuple[Rung, ...]:
    """Few bits lose more than many."""
    rng, scale = np.random.default_rng(0), {2: 0.5, 3: 0.2, 4: 0.1, 8: 0.02}
    found = []
    for bits in RUNGS:
        curves = _random_curves(rng, model.layer_count, classes, 3)
        curves = replace(curves, mean=curves.mean * scale[bits], upper=curves.upper * scale[bits])
        found.append(Rung(bits=bits, curves=curves))
    return tuple(found)


def _steadiness_fields(rng: np.random.Generator, model: ModelSpec, classes: int) -> dict:
    layers = model.layer_count
    hazard = rng.uniform(0.0, 0.5, (layers + 1, layers))
    hazard[:, -1] = 1.0
    return {
        "steady_weight": rng.normal(size=(layers, model.hidden_size)).astype(np.float32),
        "steady_bias": rng.normal(size=layers).astype(np.float32),
        "steady_edges": np.sort(rng.normal(size=(layers, classes - 1)), axis=1),
        "class_share": rng.dirichlet(np.full(classes, 3.0), layers),
        "exit_hazard": hazard,
    }


def _substitution_fields(rng: np.random.Generator, model: ModelSpec, classes: int) -> dict:
    experts = model.expert_count
    shape = (model.layer_count, experts, experts)
    by_class = (model.layer_count, classes, min(model.top_k, 2), experts, experts)
    itself = np.broadcast_to(np.eye(experts, dtype=bool), shape)
    direction = rng.normal(size=(model.layer_count, experts, 3))
    direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
    similarity = np.clip(direction @ direction.transpose(0, 2, 1), -1.0, 1.0)
    similarity[itself] = 1.0
    distance = (1.0 - similarity[:, None, None]) / 2.0
    loss = np.clip(distance * rng.uniform(0.1, 1.0, by_class), 0.0, 1.0)
    loss[np.broadcast_to(itself[:, None, None], by_class)] = 0.0
    return {
        "similarity": similarity,
        "substitution_loss": loss,
        "substitution_samples": rng.integers(0, 500, by_class),
        "feasible": (similarity > rng.uniform(0.0, 0.8, (model.layer_count, 1, 1))) | itself,
    }


def _codebook(
    rng: np.random.Generator, model: ModelSpec, patterns: int
) -> tuple[IntArray, BoolArray]:
    """Distinct activated sets [N, P, k] and which rows are in use [N, P]; the rest repeat row 0."""
    codebook = np.zeros((model.layer_count, patterns, model.top_k), dtype=np.int64)
    used = np.zeros((model.layer_count, patterns), dtype=bool)
    for layer in range(model.layer_count):
        drawn = {
            tuple(sorted(rng.choice(model.expert_count, model.top_k, replace=False).tolist()))
            for _ in range(patterns)
        }
        rows = rng.permutation(np.array(sorted(drawn), dtype=np.int64))
        codebook[layer] = rows[0]
        codebook[layer, : len(rows)] = rows
        used[layer, : len(rows)] = True
    return codebook, used


def _pattern_chain(rng: np.random.Generator, used: BoolArray) -> tuple[FloatArray, FloatArray]:
    """Shares [N, P] that follow transitions [N-1, P, P]; unused patterns are never entered."""
    layers, patterns = used.shape
    weight = rng.gamma(0.5, size=(layers - 1, patterns, patterns)) + 1e-3
    transitions = weight * used[1:, None, :]
    transitions /= transitions.sum(axis=2, keepdims=True)
    share = np.zeros((layers, patterns))
    share[0] = (rng.gamma(0.7, size=patterns) + 1e-3) * used[0]
    share[0] /= share[0].sum()
    for layer in range(layers - 1):
        share[layer + 1] = share[layer] @ transitions[layer]
    share /= share.sum(axis=1, keepdims=True)
    return share, transitions


def _importance(rng: np.random.Generator, codebook: IntArray) -> tuple[FloatArray, FloatArray]:
    """Deciles of importance [N, P, 11] and mean softmax mass [N, P, k] of each pattern."""
    layers, patterns, top_k = codebook.shape
    deciles = np.sort(rng.uniform(0.1, 1.0, (layers, patterns, 11)), axis=2)
    parts = rng.dirichlet(np.full(top_k, 2.0), (layers, patterns))
    return deciles, parts * deciles.mean(axis=2, keepdims=True)


def _importance_quantiles(share: FloatArray, importance: FloatArray) -> FloatArray:
    """Percentiles of the mixture of the patterns' importance, shape [N, 101]."""
    quantiles = np.empty((share.shape[0], 101))
    for layer, (weight, deciles) in enumerate(zip(share, importance, strict=True)):
        values = deciles.ravel()
        order = np.argsort(values, kind="stable")
        cumulative = np.cumsum(np.repeat(weight, deciles.shape[1])[order])
        quantiles[layer] = np.interp(
            np.linspace(0.0, 1.0, 101), cumulative / cumulative[-1], values[order]
        )
    return quantiles


def _expert_transitions(
    model: ModelSpec, codebook: IntArray, mass: FloatArray, share: FloatArray, chain: FloatArray
) -> FloatArray:
    """Transitions of the heaviest expert of each pattern, uniform where it never occurs."""
    first = np.take_along_axis(codebook, mass.argmax(axis=2)[..., None], axis=2)[..., 0]
    experts = model.expert_count
    counts = np.zeros((model.layer_count - 1, experts, experts))
    for layer in range(model.layer_count - 1):
        joint = share[layer][:, None] * chain[layer]
        np.add.at(counts[layer], (first[layer][:, None], first[layer + 1][None, :]), joint)
    total = counts.sum(axis=2, keepdims=True)
    return np.where(total > 0, counts / np.where(total > 0, total, 1.0), 1.0 / experts)


def _execution_fields(
    rng: np.random.Generator,
    model: ModelSpec,
    codebook: IntArray,
    share: FloatArray,
    importance: FloatArray,
    theta: FloatArray,
) -> dict:
    shape = (model.layer_count, model.expert_count)
    activated, kept = np.zeros(shape), np.zeros(shape)
    for layer in range(model.layer_count):
        above = 1.0 - np.array(
            [
                np.interp(theta[layer], deciles, np.linspace(0, 1, 11))
                for deciles in importance[layer]
            ]
        )
        np.add.at(activated[layer], codebook[layer], share[layer][:, None])
        np.add.at(kept[layer], codebook[layer], (share[layer] * above)[:, None])
    executed = np.where(activated > 0, kept / np.where(activated > 0, activated, 1.0), 1.0)
    executed = np.clip(executed, 0.0, 1.0)
    active = np.sort(rng.uniform(0.3, 1.0, model.layer_count))[::-1].copy()
    active[0] = 1.0
    return {
        "active": active,
        "active_upper": np.minimum(active + 0.02, 1.0),
        "executed": executed,
        "executed_upper": np.minimum(executed + 0.02, 1.0),
        "activated": activated,
        "activated_upper": np.minimum(activated + 0.02, 1.0),
    }


def _centroid_fields(rng: np.random.Generator, model: ModelSpec, centroids: int) -> dict:
    direction = rng.normal(size=(model.layer_count, centroids, model.hidden_size))
    direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
    return {
        "centroids": direction.astype(np.float32),
        "centroid_exit_layer": rng.uniform(1, model.layer_count, (model.layer_count, centroids)),
    }


@st.composite
def model_specs(
    draw: st.DrawFn,
    *,
    max_layers: int = 5,
    max_experts: int = 8,
    unequal: bool | None = None,
    min_experts: int = 2,
) -> ModelSpec:
    """Models of any small geometry, top-1 to all experts, equal or unequal expert sizes."""
    experts = draw(st.integers(min_experts, max_experts))
    return random_model_spec(
        np.random.default_rng(draw(st.integers(0, 2**32 - 1))),
        layers=draw(st.integers(1, max_layers)),
        experts=experts,
        top_k=draw(st.integers(1, min(experts, 8))),
        unequal=draw(st.booleans()) if unequal is None else unequal,
    )


@st.composite
def clusters(
    draw: st.DrawFn, *, max_servers: int = 6, min_ratio: float = 1.8, max_ratio: float = 4.0
) -> ClusterSpec:
    """Clusters of 1 to `max_servers`, with symmetric or directed links."""
    return random_cluster(
        np.random.default_rng(draw(st.integers(0, 2**32 - 1))),
        servers=draw(st.integers(1, max_servers)),
        memory_ratio=draw(st.floats(min_ratio, max_ratio)),
        symmetric=draw(st.booleans()),
    )


@st.composite
def models_with_profiles(
    draw: st.DrawFn,
    *,
    max_layers: int = 5,
    max_experts: int = 8,
    unequal: bool | None = None,
    min_experts: int = 2,
) -> tuple[ModelSpec, Profile]:
    """A model and a profile of it."""
    model = draw(
        model_specs(
            max_layers=max_layers,
            max_experts=max_experts,
            unequal=unequal,
            min_experts=min_experts,
        )
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    patterns, classes = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    return model, random_profile(rng, model, patterns=patterns, classes=classes)
