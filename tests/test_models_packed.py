"""Families that run by their own modules, held in few bits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from factories import random_cluster, random_profile
from nodes import answers, guessing, request, running, tokens_of
from synthetic import random_plan
from trimmoe.core.errors import UserError
from trimmoe.core.precision import Precision
from trimmoe.models.base import ExpertNotLoaded
from trimmoe.models.compiled.quantise import pack
from trimmoe.models.exact import exact_logits, greedy
from trimmoe.models.general.packed import PackedEmbedding, PackedLinear
from trimmoe.models.general.packed_experts import GatedStack, PackedStack
from trimmoe.models.general.view import GeneralView
from trimmoe.models.load import open_model
from zoo import Specimen, prompts, specimen

FAMILIES = [
    "gpt_oss",
    *(
        pytest.param(one, marks=pytest.mark.slow)
        for one in ("deepseek_v3", "gemma4", "nemotron_h", "jamba")
    ),
]
"""Biases and transposed experts; compressed keys and groups; a table that scales and that the head
shares; experts without a gate; states."""


@pytest.fixture(scope="module")
def it(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Specimen:
    return specimen(request.param, tmp_path_factory.mktemp(request.param))


def _view(it: Specimen, precision: Precision, **more: Any) -> GeneralView:
    # Compiled steps hold their weights themselves.
    view = open_model(it.folder, quantise=precision, compiled=False, **more)
    assert isinstance(view, GeneralView)
    return view


def _restored(weight: torch.Tensor, precision: Precision) -> torch.Tensor:
    return torch.from_numpy(pack(weight.detach().numpy().copy(), precision).restored)


def _round(it: Specimen, view: GeneralView, precision: Precision) -> int:
    """Give transformers' model the weights that `view` holds; returns of how many layers."""
    reference, count = it.reference, 0
    decoder = reference.get_decoder()
    with torch.no_grad():
        for own, their in zip(view._parts.layers, decoder.layers, strict=True):
            for name, module in own.named_modules():
                if isinstance(module, PackedLinear):
                    path = ".".join(part for part in name.split(".") if part != "inner")
                    linear = their.get_submodule(path)
                    linear.weight.copy_(_restored(linear.weight, precision))
                    count += 1
            for module in their.modules():
                _round_experts(module, precision)
        head, table = reference.get_output_embeddings(), reference.get_input_embeddings()
        for weight in {id(one.weight): one.weight for one in (head, table)}.values():
            weight.copy_(_restored(weight, precision))
    return count


def _round_experts(module: torch.nn.Module, precision: Precision) -> None:
    if not hasattr(module, "has_gate"):
        return
    for name, parameter in module.named_parameters():
        if parameter.dim() == 3:
            for one in parameter:
                one = one.T if module.is_transposed else one
                # Sixteen rows have something in common in few bits, none of gates and others.
                are_apart = name.startswith("gate_up") and not module.is_transposed
                for part in one.chunk(2) if are_apart else [one]:
                    part.copy_(_restored(part, precision))


def _share_packed(view: GeneralView) -> float:
    """Of the dense part, by number; what the spec counts is all of it and nothing else."""
    decoder, ending = view._running._decoder, view._parts.ending
    modules = [
        *decoder.modules(),
        *(one for layer in view._parts.layers for one in layer.modules()),
    ]
    held = {
        id(one.held): one.held for one in modules if isinstance(one, PackedLinear | PackedEmbedding)
    }
    if ending._held is not None:
        held[id(ending._held)] = ending._held
    packed = sum(math.prod(one.packed.shape) for one in held.values())
    left = {
        id(one): one.numel()
        for module in modules
        for one in module._parameters.values()
        if one is not None
    }
    every = packed + sum(left.values())
    # But for biases that routers choose by.
    assert view.spec.dense_bytes == pytest.approx(Precision.INT4.size_bytes(every, 4), rel=2e-3)
    return packed / every


@pytest.mark.parametrize("it", FAMILIES, indirect=True)
def test_tokens_are_those_of_transformers_with_the_same_weights(it: Specimen) -> None:
    view = _view(it, Precision.INT4)
    assert _round(it, view, Precision.INT4) >= len(view._parts.layers)
    assert _share_packed(view) > 0.85
    asked = prompts(9, 14)
    assert greedy(view, asked, 8) == [it.generated(one, 8) for one in asked]
    with torch.no_grad():
        theirs = [it.reference(torch.tensor([one])).logits[0] for one in asked]
    for ours, their in zip(exact_logits(view, asked), theirs, strict=True):
        torch.testing.assert_close(ours, their, rtol=0, atol=2e-3 * float(their.abs().max()))


@pytest.mark.parametrize("it", FAMILIES, indirect=True)
def test_experts_give_the_same_bits_in_any_company_and_on_any_server(it: Specimen) -> None:
    whole = _view(it, Precision.INT8)
    parts = [
        _view(it, Precision.INT8, experts=lambda _, mine=mine: mine)
        for mine in ([0, 3, 5], [1, 2, 4, 6, 7])
    ]
    width = it.view.widths.part
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(9, width, generator=generator)
    gates = torch.rand(9, 2, generator=generator)
    experts = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(9)])
    assert isinstance(whole._stacks[0], GatedStack | PackedStack)
    together = whole.experts(0, rows, experts, gates, normed=rows)
    for row in range(9):
        at = slice(row, row + 1)
        alone = whole.experts(0, rows[at], experts[at], gates[at], normed=rows[at])
        assert torch.equal(together[at], alone)
    summed = torch.zeros_like(together)
    for part in parts:
        held = torch.tensor([[one in part.loaded[0] for one in row] for row in experts.tolist()])
        summed += part.experts(0, rows, torch.where(held, experts, -1), gates, normed=rows)
    assert torch.equal(summed, together)
    with pytest.raises(ExpertNotLoaded):
        parts[0].experts(0, rows, experts, gates, normed=rows)


@pytest.mark.parametrize("it", ["gpt_oss"], indirect=True)
@pytest.mark.parametrize("options", [{"dtype": torch.bfloat16}, {"streamed": True}])
def test_only_what_is_held_whole_in_float32_is_packed(
    it: Specimen, options: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match="cannot be quantised here"):
        open_model(it.folder, quantise=Precision.INT8, **options)


@pytest.mark.parametrize("it", ["deepseek_v3"], indirect=True)
async def test_four_servers_give_the_tokens_of_one_process(it: Specimen) -> None:
    """Each with few experts packed, with guesses; and not those of the whole numbers."""
    whole = open_model(it.folder, quantise=Precision.INT4)
    asked = prompts(9, 1, 14, 20)
    rng = np.random.default_rng(2)
    profile, cluster = random_profile(rng, whole.spec), random_cluster(rng, servers=4)
    plan = random_plan(rng, whole.spec, cluster, density=0.3)
    async with running(
        it.tiny(),
        profile=profile,
        plan=plan,
        policy=guessing(2),
        prefill_chunk=6,
        quantise=Precision.INT4,
    ) as servers:
        made = await answers(servers, [(at, request(one, 6)) for at, one in enumerate(asked)])
        await servers.all_free()
    tokens = [tokens_of(events) for events in made]
    assert tokens == greedy(whole, asked, 6)
    assert tokens != greedy(it.view, asked, 6)


@pytest.mark.parametrize("width", [48, 128])
def test_activations_do_not_depend_on_how_many_rows_there_are(width: int) -> None:
    """Rows whose ends fill the processor's vectors, and rows whose ends do not."""
    generator = torch.Generator().manual_seed(2)
    up, down = torch.randn(1, width, 32, generator=generator), torch.randn(1, 32, width // 2)
    made = {
        "layer": 0,
        "up": up,
        "down": down,
        "activation": lambda x: torch.nn.functional.gelu(x[:, : width // 2]) * x[:, width // 2 :],
        "whole": True,
    }
    stack = PackedStack([0], [made], Precision.INT8)
    rows = torch.randn(300, 32, generator=generator)
    chosen, gates = torch.zeros(300, 1, dtype=torch.int64), torch.ones(300, 1)
    together = stack(rows, chosen, gates)
    alone = [stack(rows[i : i + 1], chosen[:1], gates[:1]) for i in range(300)]
    assert torch.equal(together, torch.cat(alone))
