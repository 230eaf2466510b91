"""A tiny model on a cluster so slow that this machine can act all of its servers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rehearsal import rescaled
from tiny import OF_BYTES, write_random
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ClusterSpec, ModelSpec
from trimmoe.models.load import load_tokenizer, open_model
from trimmoe.placement.make import default, make_plan
from trimmoe.runtime.service import ServedModel
from trimmoe.simulator.generate import Parameters
from trimmoe.simulator.generated_profile import generate_profile
from validation import Subject

LIKE_BYTES = 8192
"""A hidden vector of Mixtral's."""


def write_rehearsal_checkpoint(folder: Path, *, layers: int, seed: int = 0) -> Path:
    """A random Qwen3-MoE with wide states, so that messages are mostly states, and little else."""
    shape: dict[str, Any] = {"head_dim": 16}
    config = Qwen3MoeConfig(
        **OF_BYTES,
        hidden_size=512,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        decoder_sparse_step=1,
        **shape,
    )
    return write_random(Qwen3MoeForCausalLM, config, folder, seed=seed)


def made_up_profile(model: ModelSpec, *, seed: int) -> Profile:
    """Generated statistics, with random exit heads where generated ones say nothing."""
    parameters = Parameters(exit_hazard=(0.0, 0.3), skip_flip=0.05, drop_flip=0.03)
    profile = generate_profile(model, parameters, seed=seed, tokens=2048)
    rng = np.random.default_rng(seed)
    shape = (model.layer_count, model.hidden_size)
    return replace(
        profile,
        exit_weight=rng.normal(scale=3.0 / np.sqrt(model.hidden_size), size=shape).astype(
            np.float32
        ),
        exit_bias=np.full(model.layer_count, 1.0, dtype=np.float32),
    )


def subject(
    folder: Path,
    cluster: ClusterSpec,
    *,
    layers: int,
    expert_s: float,
    budget: float,
    slow_motion: float,
    seed: int = 0,
) -> Subject:
    """The tiny model, planned on a cluster that is slowed down for it."""
    view = open_model(write_rehearsal_checkpoint(folder, layers=layers, seed=seed), hashed=True)
    profile = made_up_profile(view.spec, seed=seed)
    slow = rescaled(cluster, view.spec, expert_s=expert_s, like=LIKE_BYTES, slow_motion=slow_motion)
    return Subject(
        folder=str(folder),
        view=view,
        served=ServedModel(
            id="tiny",
            tokenizer=load_tokenizer(folder),
            context_length=256,
            vocab_size=259,
            created=1,
        ),
        profile=profile,
        plan=make_plan(profile, view.spec, slow, default(), cluster_hash="0" * 64),
        budget=budget,
        confidence=0.5,
        batch_share=0.9,
        max_batch=64,
    )
