"""The recipes of the embedded model's candidates, on models of a few thousand weights."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tools.embedded import measure
from tools.embedded.distill import DistillSettings, Student, dense_walk, divergence
from tools.embedded.network import (
    BF16,
    UpcycledLayer,
    blocks_ffn,
    dense_ffn,
    dense_layer,
    gated_ffn,
)
from tools.embedded.pack import upcycled_tensors, write_deltas
from tools.embedded.stages import Bench, distill_stage
from tools.embedded.text import Source
from tools.embedded.upcycle import (
    UpcycleSettings,
    branch_texts,
    by_topic,
    mixture,
    new_layers,
    text_routers,
    upcycle,
)
from tools.embedded.upcycled_checkpoint import UPCYCLED_FORMAT, merge_upcycled, mixtral_config
from torch.nn import functional
from transformers import AutoModelForCausalLM

from carving import (
    CARVED,
    UPCYCLED,
    carved_checkpoint,
    carved_layers,
    checkpoint_of,
    some_tokens,
    tiny_bench,
)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return tiny_bench(tmp_path, UPCYCLED)


def randomised(layers: list[UpcycledLayer]) -> list[UpcycledLayer]:
    """Experts and routers that differ clearly."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for layer in layers:
            layer.router.copy_(torch.randn(layer.router.shape, generator=generator))
            for factor in layer.b.values():
                factor.copy_(0.2 * torch.randn(factor.shape, generator=generator))
    return layers


def upcycled_checkpoint(bench: Bench, layers: list[UpcycledLayer]) -> Path:
    path = bench.work / "deltas.safetensors"
    write_deltas(path, upcycled_tensors(layers), UPCYCLED, {}, form=UPCYCLED_FORMAT)
    tensors = merge_upcycled(bench.dense, load_file(path), UPCYCLED)
    return checkpoint_of(bench.work / "upcycled", tensors, mixtral_config(UPCYCLED))


def test_upcycled_layer_starts_as_the_dense_one(bench: Bench) -> None:
    layer = new_layers(bench, rank=2, seed=0)[1]
    torch.nn.init.normal_(layer.router)
    x = torch.randn(2, 9, CARVED.hidden).to(BF16)
    output, _, mask = layer(x)
    wanted = dense_ffn(x, dense_layer(bench.dense, 1))
    torch.testing.assert_close(output, wanted, atol=0.03, rtol=0.03)
    assert (mask.sum(-1) == UPCYCLED.top_k).all()


def test_upcycled_output_is_the_selected_experts_by_their_gates(bench: Bench) -> None:
    layer = randomised(new_layers(bench, rank=2, seed=0))[0]
    x = torch.randn(11, CARVED.hidden).to(BF16)
    output, probabilities, mask = layer(x)
    gates = probabilities * mask
    gates = gates / gates.sum(-1, keepdim=True)
    every = torch.stack([layer.expert(x, e) for e in range(UPCYCLED.experts)], dim=1)
    wanted = (every.float() * gates[..., None]).sum(1)
    torch.testing.assert_close(output.float(), wanted, atol=0.03, rtol=0.03)
    assert (every[:, 0] - every[:, 1]).float().abs().mean() > 0.05


def test_experts_run_apart_give_what_they_give_side_by_side(bench: Bench) -> None:
    layers = randomised(new_layers(bench, rank=2, seed=0))
    model = measure.load_weights(upcycled_checkpoint(bench, layers))
    x = torch.randn(2, 9, CARVED.hidden).to(BF16)
    gates = torch.rand(2, 9, UPCYCLED.experts) * (torch.rand(2, 9, UPCYCLED.experts) < 0.5)
    apart = blocks_ffn(x, model.layers[0], gates, UPCYCLED)
    together = gated_ffn(x, model.layers[0], gates, UPCYCLED)
    torch.testing.assert_close(apart, together, atol=0.05, rtol=0.05)


def test_divergence_from_tokens_is_the_cross_entropy_with_its_gradient() -> None:
    embed = torch.randn(50, 16)
    states = torch.randn(30, 16).to(BF16)
    follows = torch.randint(50, (30,))
    loss, gradient = divergence(states, follows, embed.to(BF16), chunk=7)
    free = states.float().requires_grad_()
    wanted = functional.cross_entropy(free @ embed.T, follows)
    wanted.backward()
    assert free.grad is not None
    assert loss == pytest.approx(wanted.item(), rel=0.01)
    torch.testing.assert_close(gradient.float(), free.grad, atol=2e-3, rtol=0.05)


def test_divergence_from_the_teacher_is_zero_at_the_teacher() -> None:
    embed, states = torch.randn(50, 16).to(BF16), torch.randn(30, 16).to(BF16)
    loss, gradient = divergence(states, states, embed)
    assert loss == pytest.approx(0.0, abs=1e-6)
    assert not gradient.any()


def test_branch_learns_its_text_and_goes_on_where_it_stopped(bench: Bench) -> None:
    one = replace(bench, geometry=replace(UPCYCLED, experts=1, top_k=1))
    settings = DistillSettings(
        steps=40, windows=2, lr=1e-2, skip_share=0.0, drop_share=0.0, exit_weight=0.0
    )
    tokens = (torch.arange(80 * 16).view(80, 16) % 5 + 1).to(torch.int32)
    layers = new_layers(one, rank=2, seed=0)
    distill_stage(one, layers, tokens, settings, seed=0, name="branch", taught=False)
    lines = [json.loads(line) for line in (bench.work / "branch.log").read_text().splitlines()]
    assert len(lines) == settings.steps
    assert lines[-1]["nll"] < 0.7 * lines[0]["nll"]

    again = new_layers(one, rank=2, seed=1)
    distill_stage(one, again, tokens, settings, seed=0, name="branch", taught=False)
    assert torch.equal(again[2].b["up"], layers[2].b["up"])
    assert len((bench.work / "branch.log").read_text().splitlines()) == settings.steps


def test_mixture_s_experts_are_the_branches(bench: Bench) -> None:
    one = replace(bench, geometry=replace(UPCYCLED, experts=1, top_k=1))
    branches = [new_layers(one, rank=2, seed=seed) for seed in range(UPCYCLED.experts)]
    for seed, branch in enumerate(branches):
        torch.nn.init.normal_(branch[0].b["down"], std=0.1 * (seed + 1))
    routers = [torch.randn(UPCYCLED.experts, CARVED.hidden) for _ in range(CARVED.layers)]
    states = [[layer.state_dict() for layer in branch] for branch in branches]
    whole = mixture(bench, states, routers, rank=2)
    x = torch.randn(6, CARVED.hidden).to(BF16)
    for expert, branch in enumerate(branches):
        assert torch.equal(whole[0].expert(x, expert), branch[0].expert(x, 0))
    assert torch.equal(whole[3].router, routers[3])


def test_topics_part_documents_by_their_words() -> None:
    sea = [f"harbour ship sail storm captain {n} anchor" for n in range(10)]
    sums = [f"equation number proof {n} theorem integer algebra" for n in range(10)]
    mixed = [text for pair in zip(sea, sums, strict=True) for text in pair]
    parts = by_topic(mixed, 2, seed=0)
    assert sorted(map(sorted, parts)) == sorted(map(sorted, (sea, sums)))
    assert by_topic(mixed, 1, seed=0) == [mixed]


def test_a_file_is_one_branch_or_as_many_as_asked_for(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "wiki.jsonl.gz", "wt") as handle:
        for n in range(12):
            words = "ship sail harbour" if n % 2 else "theorem proof integer"
            handle.write(json.dumps({"text": f"{words} {words} {n}"}) + "\n")
    (tmp_path / "tale.txt").write_text("Once upon a time.")
    sources = [Source.parse(f"{tmp_path}/wiki.jsonl.gz=2"), Source.parse(f"{tmp_path}/tale.txt")]
    texts = branch_texts(sources, seed=0)
    assert list(texts) == ["wiki-0", "wiki-1", "tale-0"]
    assert sum(len(texts[name]) for name in ("wiki-0", "wiki-1")) == 12


def test_first_routers_tell_the_branches_texts_apart(bench: Bench) -> None:
    few = replace(bench, geometry=replace(UPCYCLED, experts=2, layers=2))
    low, high = some_tokens(8, 16) // 2, 48 + some_tokens(8, 16) // 2
    routers = text_routers(few, [low, high], spread=1.0)
    embed = bench.dense["embed"].to(BF16)
    layers = [dense_layer(bench.dense, index) for index in range(2)]
    for branch, tokens in enumerate((low, high)):
        (x, _), *_ = dense_walk(tokens, layers, embed, few.geometry)
        chosen = functional.linear(x.float(), routers[0]).argmax(-1)
        assert (chosen == branch).float().mean() > 0.8


@pytest.mark.parametrize("form", ["carved", "upcycled"])
def test_measured_model_is_what_transformers_runs(bench: Bench, form: str) -> None:
    if form == "carved":
        checkpoint = carved_checkpoint(bench, carved_layers(bench))
    else:
        checkpoint = upcycled_checkpoint(bench, randomised(new_layers(bench, rank=2, seed=0)))
    tokens = some_tokens(1, 24)
    model = measure.load_weights(checkpoint)
    assert model.geometry == (CARVED if form == "carved" else UPCYCLED)
    with torch.inference_mode():
        *_, (hidden, _, _) = measure.walk(model, tokens)
        here = measure.logits_of(model, hidden)[0].float()
        theirs: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        there = theirs(tokens).logits[0]
    assert functional.cosine_similarity(here, there).mean() > 0.995


def test_carved_checkpoint_is_what_was_trained_but_for_eight_bits(bench: Bench) -> None:
    layers = carved_layers(bench)
    model = measure.load_weights(carved_checkpoint(bench, layers))
    for stored, layer in zip(model.layers, layers, strict=True):
        trained = layer.merged()
        for name in ("gate", "up", "down"):
            torch.testing.assert_close(
                getattr(stored, name), getattr(trained, name), atol=0.03, rtol=0.03
            )


def test_upcycled_checkpoint_is_what_was_trained_but_for_eight_bits(bench: Bench) -> None:
    layers = randomised(new_layers(bench, rank=2, seed=0))
    model = measure.load_weights(upcycled_checkpoint(bench, layers))
    tokens = some_tokens(2, 24)
    *_, (hidden, _, _) = measure.walk(model, tokens)
    x = torch.randn(20, CARVED.hidden).to(BF16)
    assert hidden.isfinite().all()
    for index, layer in enumerate(layers):
        stored = model.layers[index]
        for expert in range(UPCYCLED.experts):
            rows = slice(expert * CARVED.neurons, (expert + 1) * CARVED.neurons)
            active = functional.silu(x @ stored.gate[rows].T) * (x @ stored.up[rows].T)
            torch.testing.assert_close(
                active @ stored.down[:, rows].T, layer.expert(x, expert), atol=0.06, rtol=0.06
            )


def test_substitution_is_free_exactly_when_the_experts_are_alike(bench: Bench) -> None:
    torch.manual_seed(0)
    tokens = some_tokens(2, 48)
    alike = new_layers(bench, rank=2, seed=0)
    for layer in alike:
        torch.nn.init.normal_(layer.router)
    same = measure.load_weights(upcycled_checkpoint(bench, alike))
    exact = measure.perplexity(same, tokens)
    assert measure.perplexity(same, tokens, measure.substitute_one) == pytest.approx(
        exact, rel=0.01
    )
    assert measure.perplexity(same, tokens, measure.any_experts) == pytest.approx(exact, rel=0.01)
    (bench.work / "upcycled").rename(bench.work / "alike")

    apart = measure.load_weights(upcycled_checkpoint(bench, randomised(alike)))
    exact = measure.perplexity(apart, tokens)
    assert abs(measure.perplexity(apart, tokens, measure.any_experts) / exact - 1) > 0.02


@pytest.mark.parametrize("gating", [measure.substitute_one, measure.any_experts])
def test_replaced_experts_run_with_the_selected_ones_gates(gating: measure.Gating) -> None:
    torch.manual_seed(1)
    probabilities = torch.rand(40, 8).softmax(-1)
    chosen = probabilities.topk(3, dim=-1).indices
    mask = torch.zeros_like(probabilities).scatter_(-1, chosen, 1.0)
    found, before = gating(probabilities, mask, 0), probabilities * mask
    torch.testing.assert_close(
        found.sort(-1, descending=True).values, before.sort(-1, descending=True).values
    )
    assert not torch.equal(found > 0, before > 0)


def test_sizes_count_what_transformers_counts(bench: Bench) -> None:
    checkpoint = upcycled_checkpoint(bench, randomised(new_layers(bench, rank=2, seed=0)))
    found = measure.sizes(
        measure.load_weights(checkpoint), checkpoint, bench.work / "deltas.safetensors"
    )
    theirs: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert found["parameters"] == sum(p.numel() for p in theirs.parameters())
    idle = (UPCYCLED.experts - UPCYCLED.top_k) * 3 * CARVED.hidden * CARVED.neurons * CARVED.layers
    assert found["active_parameters"] == found["parameters"] - idle
    assert 0 < found["deltas_bytes"] < found["checkpoint_bytes"]


def test_whole_recipe_gives_experts_that_differ(bench: Bench) -> None:
    texts = {f"t{n}": [chr(97 + n) * 9 + chr(105 + n) * 7] * 60 for n in range(4)}
    settings = UpcycleSettings(
        rank=2, router_windows=4,
        branch=replace(UpcycleSettings().branch, steps=6, length=16, lr=1e-2),
        mix=replace(UpcycleSettings().mix, steps=3, length=16),
    )  # fmt: skip
    layers = upcycle(bench, texts, some_tokens(6, 16).to(torch.int32), settings, seed=0)
    updates = layers[0].b["down"]
    assert (updates[0] - updates[1]).abs().max() > 1e-3
    assert {path.stem for path in bench.work.glob("*.pt")} == {
        "mix",
        *(f"branch-{n}" for n in texts),
    }
    student = Student(bench.dense, layers, UPCYCLED)
    assert all(torch.isfinite(anchor).all() for anchor in student.anchors)
