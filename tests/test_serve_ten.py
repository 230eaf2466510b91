"""Ten server processes on real sockets: exact mode gives what transformers' `generate` gives.

The checkpoint is a tiny one; dense parts of a real model in ten processes would take minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from transformers import Qwen2MoeForCausalLM

from factories import random_profile
from forked import forked
from launching import PATIENCE_S, cluster_yaml
from tiny import write_tiny_checkpoint
from trimmoe.api.app import create_app
from trimmoe.core.artifact import file_hash
from trimmoe.core.cluster_file import load_cluster
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import IntArray, ModelSpec
from trimmoe.models.load import model_spec
from trimmoe.placement.make import make_plan
from trimmoe.policy.settings import exact
from trimmoe.runtime.launch.job import Pieces

pytestmark = pytest.mark.slow
SERVERS, LAYERS, REQUESTS = 10, 12, 32
NAMES = [f"server-{index}" for index in range(SERVERS)]


@dataclass(frozen=True, kw_only=True)
class Small:
    """A checkpoint with what servers need of it, and what comes of its prompts."""

    folder: Path
    spec: ModelSpec
    profile: Profile
    plan: Plan
    prompts: list[list[int]]
    lengths: list[int]
    expected: list[list[int]]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """Experts have one to three hosts among the ten; requests are of unequal lengths."""
    folder = tmp_path_factory.mktemp("small")
    model = write_tiny_checkpoint(folder / "small", layers=LAYERS)
    cluster = folder / "cluster.yaml"
    cluster.write_text(cluster_yaml(NAMES))
    spec = model_spec(model, hashed=True)
    rng = np.random.default_rng(4)
    profile = random_profile(rng, spec)
    plan = make_plan(profile, spec, load_cluster(cluster), cluster_hash=file_hash(cluster))
    hosts = rng.random(plan.hosts.shape) < 0.1
    layer, expert = np.indices(hosts.shape[1:])
    hosts[rng.integers(SERVERS, size=layer.shape), layer, expert] = True
    prompts = [rng.integers(0, 256, rng.integers(1, 90)).tolist() for _ in range(REQUESTS)]
    lengths = rng.integers(2, 24, REQUESTS).tolist()
    return Small(
        folder=model,
        spec=spec,
        profile=profile,
        plan=replace(plan, hosts=hosts),
        prompts=prompts,
        lengths=lengths,
        expected=_generated(model, prompts, lengths),
    )


def _generated(model: Path, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    reference: Any = Qwen2MoeForCausalLM.from_pretrained(model)
    made = []
    for prompt, new in zip(prompts, lengths, strict=True):
        ids = torch.tensor([prompt])
        answer = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False,
            eos_token_id=None, pad_token_id=258,
        )  # fmt: skip
        made.append(answer[0, len(prompt) :].tolist())
    return made


def _constant() -> IntArray:
    """Attention at home."""
    return np.repeat(np.arange(SERVERS)[:, None], LAYERS, axis=1)


def _staircase() -> IntArray:
    """Everybody's tokens pass all servers one after the other."""
    return np.tile(np.arange(LAYERS) * SERVERS // LAYERS, (SERVERS, 1))


def _hybrid() -> IntArray:
    """Routes that leave, stay a while, return and end elsewhere."""
    steps = np.array([0, 0, 3, 3, 3, 0, 0, 7, 7, 2, 2, 5])
    return (np.arange(SERVERS)[:, None] + steps) % SERVERS


@pytest.mark.parametrize("routes", [_constant, _staircase, _hybrid])
def test_32_requests_at_once_get_what_transformers_generates(
    small: Small, routes: Callable[[], IntArray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMMOE_CACHE", str(tmp_path))
    plan = replace(small.plan, routes=routes())
    pieces = Pieces(policy=exact(), app=partial(create_app))
    with forked(
        str(small.folder), small.profile, plan, small.spec, pieces,
        kv_slots=REQUESTS, emulate=False, encrypt=True,
    ) as urls, ThreadPoolExecutor(REQUESTS) as pool:  # fmt: skip
        asked = [
            pool.submit(_whole, urls[index % SERVERS], prompt, new)
            for index, (prompt, new) in enumerate(zip(small.prompts, small.lengths, strict=True))
        ]
        got = [each.result() for each in asked]
    assert got == small.expected


def _whole(url: str, prompt: list[int], new: int) -> list[int]:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S)
    made: Any = client.completions.create(
        model="small", prompt=prompt, max_tokens=new, temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    return made.choices[0].token_ids
