"""What experts give is added up alike wherever they run and in whatever order it comes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import zoo
from checkpoints import Folder, written_once
from nodes import answers, hybrid_routes, request, running, staircase_routes, world
from serving import Tiny
from tiny import LAYERS
from trimmoe.core.precision import Precision
from trimmoe.core.specs import BoolArray, IntArray
from trimmoe.models.base import DROPPED, MoEView
from trimmoe.models.load import open_model
from trimmoe.models.sums import sums_in
from trimmoe.runtime.node.records.sums import joined, parted
from trimmoe.runtime.sampling import Sampling
from trimmoe.runtime.service import TokenEvent

OPTIONS = {
    "compiled": {},
    "int8": {"quantise": Precision.INT8},
    "torch": {"compiled": False},
    "bfloat16": {"dtype": torch.bfloat16},
}
SERVERS, SLOTS = 4, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return written_once(tmp_path_factory.mktemp)


@pytest.fixture(scope="module", params=[*OPTIONS, "normed"])
def view(
    request: pytest.FixtureRequest, folder: Folder, tmp_path_factory: pytest.TempPathFactory
) -> MoEView:
    """`normed`: of a family whose layers norm what all experts give together."""
    if request.param == "normed":
        view = open_model(zoo.write("afmoe", tmp_path_factory.mktemp("afmoe")))
        assert view.widths.moving == view.widths.attended + view.widths.part
        return view
    return open_model(folder("qwen2_moe"), **OPTIONS[request.param])


def _at(experts: IntArray, host: IntArray, server: int) -> IntArray:
    return np.where(host[experts] == server, experts, DROPPED)


def _travelled(sums: Tensor, wide: BoolArray, view: MoEView) -> Tensor:
    """Sums as another server has them."""
    narrow, apart = parted(sums, wide, view.dtype)
    rows = np.flatnonzero(wide).tolist()
    return joined(narrow, apart[0] if apart else None, rows).to(sums_in(view.dtype, view.device))


@given(data=st.data(), seed=st.integers(0, 2**16), count=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_a_layer_gives_the_same_bits_whoever_runs_its_experts(
    view: MoEView, data: st.DataObject, seed: int, count: int
) -> None:
    """Eight slots of each row, dealt out to four servers that answer in any order."""
    rng, spec = np.random.default_rng(seed), view.spec
    hidden = torch.from_numpy(rng.standard_normal((count, spec.hidden_size))).to(view.dtype)
    # As models have them: some of the states are a thousand times the others.
    hidden[:, :2] *= 1000
    experts = rng.integers(0, spec.expert_count, (count, SLOTS))
    gates = torch.from_numpy(rng.random((count, SLOTS), dtype=np.float32))
    host = np.array(data.draw(st.lists(st.integers(0, SERVERS - 1), min_size=spec.expert_count,
                                       max_size=spec.expert_count)))  # fmt: skip
    whole = view.give(1, hidden, experts, gates)
    own, *others = data.draw(st.permutations(range(SERVERS)))
    mine = _at(experts, host, own)
    total = _travelled(view.gathered_part(1, hidden, mine, gates), (mine >= 0).sum(1) > 0, view)
    for server in others:
        its = _at(experts, host, server)
        sums = view.experts(1, hidden, torch.from_numpy(its), gates)
        total[:, -view.widths.part :] += _travelled(sums, (its >= 0).sum(1) > 1, view)
    assert torch.equal(view.whole(1, total.to(view.dtype)), whole)
    assert torch.equal(whole, view.finish(1, hidden, view.shared(1, hidden), view.experts(
        1, hidden, torch.from_numpy(experts), gates)))  # fmt: skip


def test_one_expert_alone_fits_into_the_models_own_numbers(view: MoEView) -> None:
    """So that it travels as it does in single precision."""
    hidden = torch.randn(3, view.spec.hidden_size, generator=torch.manual_seed(1)).to(view.dtype)
    alone = torch.tensor([[1, DROPPED], [DROPPED, 2], [DROPPED, DROPPED]])
    sums = view.experts(0, hidden, alone, torch.rand(3, 2))
    assert sums.dtype is sums_in(view.dtype, view.device)
    assert torch.equal(sums.to(view.dtype).to(sums.dtype), sums)
    assert not sums[2].any()


@given(wide=st.lists(st.booleans(), min_size=1, max_size=6))
def test_what_is_parted_is_joined_again(wide: list[bool]) -> None:
    rows = np.array(wide)
    sums = torch.rand(rows.size, 3, dtype=torch.float64, generator=torch.manual_seed(0))
    sums[~torch.from_numpy(rows)] = sums[~torch.from_numpy(rows)].float().double()
    narrow, apart = parted(sums, rows, torch.float32)
    assert narrow.dtype is torch.float32
    assert len(apart) == rows.any()
    assert sum(len(each) for each in (narrow, *apart)) == rows.size
    again = joined(narrow, apart[0] if apart else None, np.flatnonzero(rows).tolist())
    assert torch.equal(again.double(), sums)


def _scores(events: list[TokenEvent]) -> list[tuple[float | None, object]]:
    return [(event.logprob, event.top_logprobs) for event in events]


async def test_answers_are_the_same_to_the_last_bit_on_any_servers(tiny: Tiny) -> None:
    """Routes, hosts and company differ; log probabilities do not."""
    asked = [
        request([3 + n, 40, 9, 7 * n], 6 + n, sampling=Sampling(temperature=0.0, logprobs=5))
        for n in range(3)
    ]
    found = []
    for servers, routes, density in (
        (1, [[0] * LAYERS], 1.0),
        (2, staircase_routes(2), 0.4),
        (3, hybrid_routes(3), 0.2),
        (4, hybrid_routes(4), 0.9),
    ):
        profile, plan = world(tiny, servers=servers, routes=routes, density=density)
        async with running(tiny, profile=profile, plan=plan, prefill_chunk=4) as cluster:
            made = await answers(cluster, [(n % servers, one) for n, one in enumerate(asked)])
            if servers > 2:
                # The same again, by itself.
                alone = await answers(cluster, [(servers - 1, replace(asked[0]))])
                assert _scores(alone[0]) == _scores(made[0])
        found.append([_scores(events) for events in made])
    assert all(len(scores) == 6 + n for n, scores in enumerate(found[0]))
    assert found[1:] == found[:1] * 3
