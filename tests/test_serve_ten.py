"""The embedded model on ten server processes with real sockets: exact mode gives what
transformers' `generate` gives, on whatever routes.

Prompts and answers are short, for all these processes share the test machine's few cores.
"""

from __future__ import annotations

import itertools
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
from trimmoe.api.app import create_app
from trimmoe.core.artifact import file_hash
from trimmoe.core.cluster_file import load_cluster
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ModelSpec
from trimmoe.models.embedded import ensure_embedded_model
from trimmoe.models.load import model_spec
from trimmoe.placement.make import make_plan
from trimmoe.policy.presets import exact
from trimmoe.runtime.launch.job import Pieces

pytestmark = pytest.mark.slow
REQUESTS, SERVERS = 12, 10
CLEAR = 1e-3
"""Logits of a token and its runner-up that are further apart mean the same token in any order of
adding float32 numbers."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request and what must come of it."""

    prompt: list[int]
    expected: list[int]


@dataclass(frozen=True, kw_only=True)
class Embedded:
    """The embedded model with what servers need of it besides a plan."""

    folder: Path
    spec: ModelSpec
    profile: Profile
    asked: list[Asked]


@pytest.fixture(scope="module")
def embedded() -> Embedded:
    """Requests are of unequal lengths."""
    folder = ensure_embedded_model(progress=False)
    spec = model_spec(folder, hashed=True)
    rng = np.random.default_rng(4)
    reference: Any = Qwen2MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [
        rng.integers(0, spec.vocab_size, rng.integers(1, 11)).tolist() for _ in range(REQUESTS)
    ]
    lengths = rng.integers(2, 5, REQUESTS).tolist()
    return Embedded(
        folder=folder,
        spec=spec,
        profile=random_profile(rng, spec),
        asked=[_generated(reference, *each) for each in zip(prompts, lengths, strict=True)],
    )


def _generated(reference: Any, prompt: list[int], new: int) -> Asked:
    ids = torch.tensor([prompt])
    answer = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False,
        eos_token_id=None, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    best = torch.cat(answer.logits).topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > CLEAR, "a tie has no right answer; change the seed"
    return Asked(prompt=prompt, expected=answer.sequences[0, len(prompt) :].tolist())


def _plan(embedded: Embedded, servers: int, folder: Path) -> Plan:
    """Experts have one to three hosts; users of one server in three have constant routes, of the
    next a staircase past all servers, of the third a hybrid that leaves, returns and ends
    elsewhere."""
    cluster = folder / "cluster.yaml"
    cluster.write_text(cluster_yaml([f"server-{index}" for index in range(servers)]))
    plan = make_plan(
        embedded.profile, embedded.spec, load_cluster(cluster), cluster_hash=file_hash(cluster)
    )
    rng = np.random.default_rng(servers)
    hosts = rng.random(plan.hosts.shape) < 0.1
    layer, expert = np.indices(hosts.shape[1:])
    hosts[rng.integers(servers, size=layer.shape), layer, expert] = True
    access, layers = np.arange(servers)[:, None], np.arange(embedded.spec.layer_count)
    constant = np.broadcast_to(access, (servers, layers.size))
    staircase = np.broadcast_to(layers * servers // layers.size, constant.shape)
    hybrid = (access + np.array([0, 3, 0, 2, 2, 1])[layers * 6 // layers.size]) % servers
    routes = np.choose(access % 3, [constant, staircase, hybrid])
    return replace(plan, hosts=hosts, routes=routes)


def test_twelve_requests_at_once_get_what_transformers_generates(
    embedded: Embedded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = _plan(embedded, SERVERS, tmp_path)
    monkeypatch.setenv("TRIMMOE_CACHE", str(tmp_path))
    pieces = Pieces(policy=exact(), app=partial(create_app))
    with forked(
        str(embedded.folder), embedded.profile, plan, embedded.spec, pieces,
        kv_slots=REQUESTS, emulate=False, encrypt=True,
    ) as urls, ThreadPoolExecutor(REQUESTS) as pool:  # fmt: skip
        answer = partial(_answer, embedded.folder.name)
        got = list(pool.map(answer, itertools.cycle(urls), embedded.asked))
    assert got == [asked.expected for asked in embedded.asked]


def _answer(model: str, url: str, asked: Asked) -> list[int]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        made: Any = client.completions.create(
            model=model, prompt=asked.prompt, max_tokens=len(asked.expected), temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )  # fmt: skip
    return made.choices[0].token_ids
