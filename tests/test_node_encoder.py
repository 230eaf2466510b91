"""Switch Transformers over several servers: the encoder runs where the user is, the layers of the
decoder along the route."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoints
from factories import random_cluster, random_profile
from nodes import answers, read, request, running, tokens_of
from synthetic import random_plan
from trimmoe.models.encoder_decoder import EncoderDecoderView
from trimmoe.models.load import open_model
from trimmoe.runtime.node.records.checks import Geometry, check
from trimmoe.runtime.node.records.messages import Reserve
from trimmoe.runtime.node.records.packing import MalformedMessage
from trimmoe.runtime.node.records.samplings import pack_sampling
from trimmoe.runtime.probe import time_work
from trimmoe.runtime.sampling import Sampling
from wires import soon
from zoo import _Untold as Untold

NEW = 12
SERVERS = 4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Untold:
    folder = checkpoints.write("switch_untied", tmp_path_factory.mktemp("switch"))
    return Untold(folder=folder, view=open_model(folder), tokenizer=None)


def _asked() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 90, length).tolist() for length in (9, 2, 14)]


def _generated(folder: Path, prompt: list[int], start_token: int) -> list[int]:
    """What transformers itself generates."""
    ids = torch.tensor([prompt])
    made = checkpoints.reference(folder).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False,
        eos_token_id=None, decoder_start_token_id=start_token,
    )  # fmt: skip
    return made[0, 1:].tolist()


def _expected(tiny: Untold) -> list[list[int]]:
    view = tiny.view
    assert isinstance(view, EncoderDecoderView)
    made = [_generated(tiny.folder, one, view.start_token) for one in _asked()]
    assert len({tuple(one) for one in made}) == len(made)
    return made


async def test_servers_answer_as_transformers_does(tiny: Untold) -> None:
    """Users of three servers at once, on routes that mix servers."""
    rng = np.random.default_rng(2)
    profile, cluster = random_profile(rng, tiny.view.spec), random_cluster(rng, servers=SERVERS)
    plan = random_plan(rng, tiny.view.spec, cluster, density=0.3)
    assert any(len(set(route)) > 1 for route in plan.routes.tolist())
    async with running(tiny, profile=profile, plan=plan) as servers:
        users = [(at, request(one, NEW)) for at, one in enumerate(_asked())]
        made = await answers(servers, users)
        await servers.all_free()
    assert [tokens_of(events) for events in made] == _expected(tiny)


async def test_one_place_serves_one_user_after_the_other(tiny: Untold) -> None:
    """Of prompts of unequal length, in answers of few steps, which are much the same steps."""
    rng = np.random.default_rng(2)
    profile, cluster = random_profile(rng, tiny.view.spec), random_cluster(rng, servers=SERVERS)
    plan = random_plan(rng, tiny.view.spec, cluster, density=0.3)
    async with running(tiny, profile=profile, plan=plan) as servers:
        made = [await answers(servers, [(0, request(one, NEW // 3))]) for one in _asked()]
    expected = [whole[: NEW // 3] for whole in _expected(tiny)]
    assert [tokens_of(events) for (events,) in made] == expected


async def test_an_answer_survives_a_server(tiny: Untold) -> None:
    rng = np.random.default_rng(1)
    profile, cluster = random_profile(rng, tiny.view.spec), random_cluster(rng, servers=SERVERS)
    plan = random_plan(rng, tiny.view.spec, cluster, density=0.3)
    plan.hosts[0] |= plan.hosts[1]
    async with running(tiny, profile=profile, plan=plan) as servers:
        streams = [
            servers.nodes[access].service.submit(request(one, NEW))
            for access, one in zip((0, 2, 3), _asked(), strict=True)
        ]
        begun = [await soon(anext(stream)) for stream in streams]
        await servers.kill(1)
        rest = await soon(asyncio.gather(*(read(stream) for stream in streams)))
        await servers.all_free()
    made = [[one.token, *tokens_of(more)] for one, more in zip(begun, rest, strict=True)]
    assert made == _expected(tiny)


def test_a_place_without_what_the_encoder_made_is_refused(tiny: Untold) -> None:
    spec = tiny.view.spec
    geometry = Geometry(
        layer_count=spec.layer_count,
        server=0,
        server_count=1,
        hidden_size=spec.hidden_size,
        top_k=spec.top_k,
        vocab_size=spec.vocab_size,
        context_length=spec.context_length,
        widths=tiny.view.widths,
        loaded=tiny.view.loaded,
        has_encoder=True,
    )
    asked = Reserve(
        sequence=0,
        route=[0] * spec.layer_count,
        sampling=pack_sampling(Sampling()),
        budget=0.0,
        waits=False,
    )
    check(geometry, 0, asked, [torch.zeros(5, spec.hidden_size)])
    for wrong in (
        [],
        [torch.zeros(0, spec.hidden_size)],
        [torch.zeros(5, spec.hidden_size + 1)],
        [torch.zeros(spec.context_length + 1, spec.hidden_size)],
        [torch.zeros(5, spec.hidden_size, dtype=torch.int64)],
    ):
        with pytest.raises(MalformedMessage):
            check(geometry, 0, asked, wrong)


def test_work_is_timed_with_something_to_attend_to(tiny: Untold) -> None:
    assert (time_work(tiny.view) > 0).all()
