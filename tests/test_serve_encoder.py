"""`trimmoe serve` with a model that reads prompts with an encoder, as processes: answers are those
of transformers' `generate`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

from factories import random_profile
from launching import PATIENCE_S, Serving, cluster_yaml, free_ports
from tiny import OF_BYTES, byte_tokenizer, write_random
from trimmoe.core.cluster_file import load_cluster
from trimmoe.models.load import model_spec
from trimmoe.placement.make import make_plan

pytestmark = pytest.mark.slow
SERVERS = ("desk", "shelf", "attic")
CROSSED = 1
"""The server that every route crosses."""
PROMPTS = ("Once upon a time", "a", "there was a server that went away for good")
NEW = 40
START: dict[str, Any] = {"decoder_start_token_id": 258}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    folder: Path
    serving: Serving
    port: int

    def client(self, server: int) -> openai.OpenAI:
        url = f"http://127.0.0.1:{self.port + server}/v1"
        return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("switch")
    config = SwitchTransformersConfig(
        **OF_BYTES,
        d_model=32,
        d_kv=8,
        d_ff=24,
        num_layers=6,
        num_sparse_encoder_layers=3,
        num_decoder_layers=6,
        num_sparse_decoder_layers=3,
        num_heads=4,
        num_experts=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        initializer_factor=2.0,
        **START,
    )
    write_random(SwitchTransformersForConditionalGeneration, config, folder, seed=0)
    (folder / "cluster.yaml").write_text(cluster_yaml(SERVERS))
    spec, machines = model_spec(folder, hashed=True), load_cluster(folder / "cluster.yaml")
    profile = random_profile(np.random.default_rng(3), spec)
    profile.save(folder / "profile")
    plan = make_plan(profile, spec, machines, cluster_hash="")
    access = np.arange(len(SERVERS))
    routes = np.stack([access, np.full_like(access, CROSSED), (access + 1) % len(SERVERS)], axis=1)
    replace(plan, routes=routes).save(folder / "plan")
    port = free_ports(110)
    command = [
        *("-m", "trimmoe.cli", "serve", "--model", str(folder), "--profile"),
        *(str(folder / "profile"), "--plan", str(folder / "plan"), "--port-base", str(port)),
    ]
    with Serving(command, cache=folder / "cache") as serving:
        serving.said("Ready")
        yield Cluster(folder=folder, serving=serving, port=port)


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> list[list[int]]:
    """What transformers itself generates."""
    kind: Any = SwitchTransformersForConditionalGeneration
    model = kind.from_pretrained(cluster.folder).eval()

    def greedy(prompt: str) -> list[int]:
        ids = torch.tensor([byte_tokenizer()(prompt)["input_ids"]])
        made = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        return made[0, 1:].tolist()

    return [greedy(prompt) for prompt in PROMPTS]


def _asked(stack: ExitStack, cluster: Cluster, server: int, prompt: str) -> Any:
    return stack.enter_context(
        cluster.client(server).completions.create(
            model=cluster.folder.name, prompt=prompt, max_tokens=NEW, temperature=0, stream=True,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
    )  # fmt: skip


def _tokens(stream: Any) -> list[int]:
    return [token for event in stream for each in event.choices for token in each.token_ids or []]


def test_an_encoder_reads_the_text_that_a_client_sends(
    cluster: Cluster, expected: list[list[int]]
) -> None:
    """At every server."""
    with ExitStack() as stack, ThreadPoolExecutor(len(PROMPTS)) as pool:
        streams = [_asked(stack, cluster, at, prompt) for at, prompt in enumerate(PROMPTS)]
        assert list(pool.map(_tokens, streams)) == expected
