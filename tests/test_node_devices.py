"""Servers on several devices: states travel by the processor, each server computes in its dtype."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from nodes import Servers, answers, hybrid_routes, running, staircase_routes, tokens_of, world
from questions import Questions
from recording import Anew
from serving import Tiny
from trimmoe.core.errors import UserError
from trimmoe.models import together
from trimmoe.models.base import MoEView
from trimmoe.models.decoder_view import DecoderView
from trimmoe.models.load import known_device, open_model
from trimmoe.models.replay import Replays

ACCELERATOR = known_device("auto")
NEEDS_ONE = pytest.mark.skipif(ACCELERATOR.type == "cpu", reason="there is no accelerator here")


@pytest.fixture
def questions(tiny: Tiny) -> Questions:
    return Questions(tiny=tiny)


def _views(
    monkeypatch: pytest.MonkeyPatch,
    kinds: list[tuple[torch.device, torch.dtype]],
    *,
    compiled: bool = True,
) -> dict[int, MoEView]:
    """Have servers open their views on these devices in these dtypes."""
    opened: dict[int, MoEView] = {}

    def view(self: Servers, server: int) -> MoEView:
        if server not in opened:
            hosts, (device, dtype) = self.plan.hosts[server], kinds[server]
            held = {layer: np.flatnonzero(here).tolist() for layer, here in enumerate(hosts)}
            opened[server] = open_model(
                self.tiny.folder, experts=held, device=device, dtype=dtype, compiled=compiled
            )
        return opened[server]

    monkeypatch.setattr(Servers, "view", view)
    return opened


async def test_servers_in_other_dtypes_understand_one_another(
    tiny: Tiny, questions: Questions, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = torch.device("cpu")
    kinds = [(here, torch.float32), (here, torch.bfloat16), (here, torch.float32)]
    opened = _views(monkeypatch, kinds)
    profile, plan = world(tiny, servers=3, routes=hybrid_routes(3))
    async with running(tiny, profile=profile, plan=plan) as cluster:
        made = await answers(cluster, questions.among(3))
        await cluster.all_free()
        assert not any(node.malformed for node in cluster.nodes.values())
    assert [opened[server].dtype for server in range(3)] == [dtype for _, dtype in kinds]
    # In bfloat16 predictions may differ, but every answer is made to its end.
    for events, expected in zip(made, questions.answers, strict=True):
        assert events[-1].finish_reason in ("stop", "length")
        assert tokens_of(events)[0] in range(tiny.view.spec.vocab_size)
        assert len(events) <= max(len(expected), 64)


@NEEDS_ONE
@pytest.mark.parametrize("routes", [staircase_routes, hybrid_routes])
async def test_an_accelerator_beside_processors_gives_the_answers_of_transformers(
    tiny: Tiny, questions: Questions, monkeypatch: pytest.MonkeyPatch, routes
) -> None:
    kinds = [(ACCELERATOR, torch.float32), (torch.device("cpu"), torch.float32)]
    _views(monkeypatch, kinds)
    profile, plan = world(tiny, servers=2, routes=routes(2))
    async with running(tiny, profile=profile, plan=plan) as cluster:
        made = await answers(cluster, questions.among(2))
        await cluster.all_free()
    assert [tokens_of(events) for events in made] == questions.answers


async def test_servers_that_record_their_steps_give_the_answers_of_transformers(
    tiny: Tiny, questions: Questions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds all experts of the layers that its routes cross there."""
    monkeypatch.setattr(together, "can_group", lambda *_: True)
    here, records = torch.device("cpu"), [Anew(), Anew()]
    opened = _views(monkeypatch, [(here, torch.float32)] * 2, compiled=False)
    profile, plan = world(tiny, servers=2, routes=[[0, 0, 1, 1], [1, 1, 0, 0]])
    plan = replace(plan, hosts=np.ones_like(plan.hosts))
    async with running(tiny, profile=profile, plan=plan) as cluster:
        for server, view in opened.items():
            assert isinstance(view, DecoderView)
            view._replays = Replays(view, records[server])
        made = await answers(cluster, questions.among(2))
        await cluster.all_free()
    assert [tokens_of(events) for events in made] == questions.answers
    assert all(record.run > record.made > 0 for record in records)


def test_a_device_that_is_not_here_is_refused_in_a_sentence() -> None:
    assert known_device("cpu") == torch.device("cpu")
    for device in ("cuda:99", "mps" if ACCELERATOR.type != "mps" else "cuda"):
        with pytest.raises(UserError, match=r"use the device cpu|use one of"):
            known_device(device)
