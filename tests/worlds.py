"""Whole small worlds for tests: a model, a profile, a plan and a trace that fit together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from factories import random_cluster, random_model_spec, random_profile
from synthetic import random_plan
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ModelSpec
from trimmoe.core.trace import Trace, trace_header


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallWorld:
    """What an engine needs, and tokens to feed it."""

    model: ModelSpec
    profile: Profile
    plan: Plan
    trace: Trace


def random_trace(
    rng: np.random.Generator, profile: Profile, *, sequences: int, length: int
) -> Trace:
    """Tokens that walk the profile's pattern chain; everything else is drawn independently."""
    tokens, layers, top_k = sequences * length, profile.layer_count, profile.top_k
    patterns = np.zeros((tokens, layers), dtype=np.int64)
    for token in range(tokens):
        share = profile.pattern_share[0]
        for layer in range(layers):
            patterns[token, layer] = rng.choice(share.size, p=share)
            if layer < layers - 1:
                share = profile.pattern_transitions[layer][patterns[token, layer]]
    experts = np.empty((tokens, layers, top_k), dtype=np.int64)
    masses = np.empty((tokens, layers, top_k), dtype=np.float32)
    for layer in range(layers):
        at = patterns[:, layer]
        mass = profile.pattern_mass[layer][at]
        order = np.argsort(-mass, axis=1, kind="stable")
        experts[:, layer] = np.take_along_axis(profile.patterns[layer][at], order, axis=1)
        masses[:, layer] = np.take_along_axis(mass, order, axis=1)
    return Trace(
        header=trace_header(settings={}, input_hashes={"model": "m", "profile": "p"}, seed=0),
        length=length,
        experts=experts,
        masses=masses,
        importance=np.minimum(masses.sum(2), 1.0),
        steadiness=rng.integers(profile.class_count, size=(tokens, layers)),
        confidence=rng.beta(2.0, 1.0, (tokens, layers)).astype(np.float32),
        exit_at=rng.integers(1, layers + 1, (tokens, layers)),
        home_wrong=np.arange(tokens)[:, None] % 3 == 0,
        home_confidence=np.ones((tokens, 1), dtype=np.float16),
    )


def small_world(
    seed: int,
    *,
    layers: int = 5,
    experts: int = 5,
    top_k: int = 2,
    servers: int = 3,
    sequences: int = 3,
    length: int = 6,
    density: float = 0.3,
) -> SmallWorld:
    """A random world from one seed."""
    rng = np.random.default_rng(seed)
    model = random_model_spec(rng, layers=layers, experts=experts, top_k=top_k)
    profile = random_profile(rng, model)
    return SmallWorld(
        model=model,
        profile=profile,
        plan=random_plan(rng, model, random_cluster(rng, servers=servers), density=density),
        trace=random_trace(rng, profile, sequences=sequences, length=length),
    )
