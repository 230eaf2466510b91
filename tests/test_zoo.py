"""Every family that the table says is served answers as transformers does, token for token: in one
process, and on servers that guess and die."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from factories import random_cluster, random_profile
from nodes import answers, guessing, read, request, running, tokens_of
from synthetic import random_plan
from trimmoe.calibrate.run import calibrate
from trimmoe.calibrate.settings import CalibrationSettings
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.experiments.method_engines import make_engine
from trimmoe.models.base import MoEView
from trimmoe.models.compiled.forms import FORMS
from trimmoe.models.compiled.view import CompiledView
from trimmoe.models.exact import exact_logits, greedy
from trimmoe.models.general.catalogue import SERVED, TEXT_PARTS
from trimmoe.models.general.view import GeneralView
from trimmoe.models.load import open_model
from trimmoe.placement.make import make_plan
from trimmoe.policy.presets import PRESETS
from trimmoe.runtime.local import LocalDriver
from wires import soon
from zoo import REPRESENTATIVE, Specimen, families, prompts, specimen

OTHERS = sorted({*SERVED, *TEXT_PARTS} - {*REPRESENTATIVE})
ALL = [*REPRESENTATIVE, *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)]
"""Of all families, a few run in `make check`."""
SOME = families(("gemma4", "gpt_oss", "nemotron_h"), *REPRESENTATIVE)
COVERING = (
    *REPRESENTATIVE, "bailing_hybrid", "kimi_linear", "lfm2_moe", "mistral_large4", "qwen3_next",
)  # fmt: skip
"""Each way in which those that are served attend, keep state and route is in one of them."""
_WHOLE = {"deepseek_v3": "kimi_k25", "llama4_text": "llama4"}
"""Of families that are text parts of others, those others."""
ON_SERVERS = families(("qwen3_5_moe", "mixtral"), *(_WHOLE.get(one, one) for one in COVERING))
"""Servers see nothing of a family but its view, which is compared in one process for all."""
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
    ("deepseek_v2", {"q_lora_rank": None, "rope_parameters": _YARN}),
    ("deepseek_v3", {"rope_interleave": False, "norm_topk_prob": False, "v_head_dim": 24}),
    ("glm4_moe", {"use_qk_norm": True, "attention_bias": True, "n_group": 4, "topk_group": 2}),
    ("gpt_oss", {"rope_parameters": _YARN, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    (
        "minimax_m2",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            }
        },
    ),
]
"""What published models of compiled families have that the tiny ones lack."""
NEW = 10
_SMALL = CalibrationSettings(
    tokens=96,
    window=12,
    skip_samples=16,
    drop_samples=16,
    substitution_samples=16,
    pair_samples=4,
    bins=3,
    centroids=3,
    max_patterns=6,
    exit_agreement=0.0,
    stand_in_rank=2,
)


@pytest.fixture(scope="module")
def it(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Specimen:
    """The tiny model of a family; all tests of one family follow one another."""
    return specimen(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("it", ALL, indirect=True)
def test_one_process_generates_what_transformers_does(it: Specimen) -> None:
    """Sequences of unequal length together, whole prompts and in pieces."""
    asked = prompts(9, 1, 14)
    expected = [it.generated(one, NEW) for one in asked]
    assert greedy(it.view, asked, NEW) == expected
    # Or equal answers would say nothing of how prompts are read.
    for prompt, answer in zip(asked, expected, strict=True):
        if len(prompt) > 1:
            other = [*prompt[:-2], (prompt[-2] + 7) % 64, prompt[-1]]
            assert it.generated(other, NEW) != answer
    assert isinstance(it.view, CompiledView if _is_compiled(it) else GeneralView)
    if _is_compiled(it):
        modules = it.modules()
        assert isinstance(modules, GeneralView)
        assert greedy(modules, asked, NEW) == expected
        _routes_alike(it.view, modules)
    with torch.no_grad():
        theirs = [it.reference(torch.tensor([one])).logits[0] for one in asked]
    for chunk in (None, 5):
        for ours, their in zip(exact_logits(it.view, asked, chunk=chunk), theirs, strict=True):
            torch.testing.assert_close(ours, their, rtol=0, atol=2e-4 * float(their.abs().max()))


def _is_compiled(it: Specimen) -> bool:
    return it.reference.config.get_text_config().model_type in FORMS


def _routes_alike(view: MoEView, modules: MoEView) -> None:
    rows = torch.randn(20, view.spec.hidden_size, generator=torch.Generator().manual_seed(0))
    for layer in range(view.spec.layer_count):
        ours, theirs = view.route(layer, rows), modules.route(layer, rows)
        assert torch.equal(ours.experts, theirs.experts)
        torch.testing.assert_close(ours.gates, theirs.gates, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(ours.probabilities, theirs.probabilities, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "more"),
    [
        VARIANTS[0],
        *(pytest.param(*one, marks=pytest.mark.slow) for one in VARIANTS[1:]),
    ],
)
def test_compiled_steps_do_what_configurations_ask(
    family: str, more: dict[str, Any], tmp_path: Path
) -> None:
    it, asked = specimen(family, tmp_path, **more), prompts(9, 14)
    assert isinstance(it.view, CompiledView)
    assert greedy(it.view, asked, NEW) == [it.generated(one, NEW) for one in asked]
    with torch.no_grad():
        theirs = [it.reference(torch.tensor([one])).logits[0] for one in asked]
    for ours, their in zip(exact_logits(it.view, asked), theirs, strict=True):
        torch.testing.assert_close(ours, their, rtol=0, atol=1e-5 * float(their.abs().max()))
    _routes_alike(it.view, it.modules())


def test_what_compiled_steps_do_not_know_runs_by_modules(tmp_path: Path) -> None:
    it, (asked,) = specimen("deepseek_v3", tmp_path, attention_bias=True), prompts(9)
    assert isinstance(it.view, GeneralView)
    assert greedy(it.view, [asked], NEW) == [it.generated(asked, NEW)]


@pytest.mark.parametrize("it", ["gpt_oss"], indirect=True)
def test_copies_stand_in_for_experts_with_biases(it: Specimen) -> None:
    """Made of the checkpoint or of loaded experts, they are the same."""
    whole, (asked,) = it.view, prompts(9)
    spec = whole.spec
    held = np.zeros((spec.layer_count, spec.expert_count), dtype=bool)
    held[:, :3] = True
    bits = np.where(held, 0, 4)
    part = open_model(it.folder, experts=lambda _: range(3), stand_ins=bits)
    made = []
    for view, few in ((whole, bits), (part, bits), (whole, None)):
        assert isinstance(view, CompiledView)
        cache = view.new_cache(slots=1)
        batch = view.batch(cache, [cache.alloc()], [range(len(asked))])
        rows = batch.pack(view.embed(batch.pad([asked]), batch))
        at_hand = view.at_hand(held, few)
        made.append(view.run_home(0, spec.layer_count, rows, batch, cache, at_hand))
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


@pytest.mark.parametrize("it", SOME, indirect=True)
def test_a_view_reads_only_its_own_experts(it: Specimen) -> None:
    whole = it.view
    spec = whole.spec
    some = open_model(it.folder, experts={0: [3, 1]})
    assert some.loaded == (frozenset({1, 3}), *[frozenset()] * (spec.layer_count - 1))
    assert some.bytes_read.experts == 2 * spec.expert_bytes[0, 0]
    assert whole.bytes_read.experts == spec.total_expert_bytes
    assert some.bytes_read.dense == whole.bytes_read.dense
    hidden = torch.randn(4, spec.hidden_size, generator=torch.Generator().manual_seed(0))
    chosen, gates = torch.tensor([[3, 1], [1, -1], [-1, 3], [-1, -1]]), torch.rand(4, 2)
    expected = whole.experts(0, hidden, chosen, gates)
    assert torch.equal(some.experts(0, hidden, chosen, gates), expected)
    assert not expected[3].any()


@pytest.mark.parametrize("it", ALL, indirect=True)
def test_mass_is_the_share_of_what_the_router_gives(it: Specimen) -> None:
    view = it.view
    rows = torch.randn(6, view.spec.hidden_size, generator=torch.Generator().manual_seed(0))
    for layer in range(view.spec.layer_count):
        routing = view.route(layer, rows)
        masses = routing.probabilities.gather(1, routing.experts)
        torch.testing.assert_close(routing.probabilities.sum(1), torch.ones(6))
        assert (routing.probabilities >= 0).all()
        assert (masses[:, :-1] >= masses[:, 1:]).all()
        if view.spec.family in ("gemma4", "gemma4_text", "phimoe"):
            continue  # A scale of each expert; a gate beside the router's own softmax.
        shares = routing.gates / routing.gates.sum(1, keepdim=True)
        expected = masses / masses.sum(1, keepdim=True)
        torch.testing.assert_close(shares, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("it", ALL, indirect=True)
def test_what_a_token_would_be_equals_what_it_is(it: Specimen) -> None:
    view, (ids,) = it.view, prompts(12)
    cache = view.new_cache(slots=1)
    batch = view.batch(cache, [cache.alloc()], [range(12)])
    hidden = view.embed(batch.pad([ids]), batch)
    positions = torch.tensor([11, 0, 5, 5, 8])
    if not view.rewinds:
        with pytest.raises(NotImplementedError, match="recurrent"):
            view.attend_whatif(0, hidden[0, positions], positions, 0, cache)
        return
    for layer in range(view.spec.layer_count):
        attended = view.attend(layer, hidden, batch, cache)
        ours = view.attend_whatif(layer, hidden[0, positions], positions, 0, cache)
        torch.testing.assert_close(ours, attended[0, positions], atol=1e-4, rtol=1e-4)
        hidden = attended
    ended = view.tail(hidden, batch, cache)
    ours = view.tail_whatif(hidden[0, positions], positions, 0, cache)
    torch.testing.assert_close(ours, ended[0, positions], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("it", ON_SERVERS, indirect=True)
async def test_servers_that_guess_and_die_answer_as_one_process(it: Specimen) -> None:
    """Mixed routes over four servers, prompts in pieces; one server dies while answers are under
    way, and every expert is left."""
    asked = prompts(9, 1, 14)
    rng = np.random.default_rng(1)
    profile, cluster = random_profile(rng, it.view.spec), random_cluster(rng, servers=4)
    plan = random_plan(rng, it.view.spec, cluster, density=0.3)
    plan.hosts[0] |= plan.hosts[1]
    tiny, expected = it.tiny(), greedy(it.view, asked, 16)
    assert min(len(set(answer)) for answer in expected) > 1, "a token that says itself again"
    async with running(
        tiny, profile=profile, plan=plan, policy=guessing(2), prefill_chunk=6
    ) as servers:
        streams = [
            servers.nodes[access].service.submit(request(one, 16))
            for access, one in zip((0, 2, 3), asked, strict=True)
        ]
        begun = [await soon(anext(stream)) for stream in streams]
        await servers.kill(1)
        rest = await soon(asyncio.gather(*(read(stream) for stream in streams)))
        guesses = [node.front_end.speculation.guessing for node in servers.nodes.values()]
        await servers.all_free()
    assert [[one.token, *tokens_of(more)] for one, more in zip(begun, rest, strict=True)] == (
        expected
    )
    assert sum(one.made for one in guesses) > 0


@pytest.mark.parametrize("it", ["gemma4", "deepseek_v3"], indirect=True)
async def test_servers_without_guesses_answer_as_one_process(it: Specimen) -> None:
    asked = prompts(9, 1, 14, 20)
    rng = np.random.default_rng(2)
    profile, cluster = random_profile(rng, it.view.spec), random_cluster(rng, servers=4)
    plan = random_plan(rng, it.view.spec, cluster)
    async with running(it.tiny(), profile=profile, plan=plan, prefill_chunk=6) as servers:
        made = await answers(servers, [(at, request(one, NEW)) for at, one in enumerate(asked)])
        await servers.all_free()
    assert [tokens_of(events) for events in made] == greedy(it.view, asked, NEW)


@pytest.mark.parametrize("it", families(("gemma4",), *REPRESENTATIVE), indirect=True)
def test_calibration_plan_and_budget(it: Specimen) -> None:
    folder = it.folder
    view = open_model(folder, hashed=True)

    def tokenizer(text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % 64 for letter in text]}

    letters = np.random.default_rng(0).integers(0, 60, 600)
    text = "".join(chr(97 + letter) for letter in letters)
    profile = calibrate(view, tokenizer, [text], _SMALL, progress=False)
    cluster = random_cluster(np.random.default_rng(1), servers=4)
    plan = make_plan(profile, view.spec, cluster, cluster_hash="c")
    assert plan.hosts.any(0).all()
    _spends_within(view, profile, plan, budget=0.05)


@pytest.mark.parametrize("it", SOME, indirect=True)
def test_budgets_hold_at_every_prefix(it: Specimen) -> None:
    assert any(_spends_in_world(it.view, seed) > 0 for seed in range(3, 7))


def _spends_in_world(view: MoEView, seed: int) -> float:
    rng = np.random.default_rng(seed)
    profile = random_profile(rng, view.spec)
    plan = random_plan(rng, view.spec, random_cluster(rng, servers=4))
    return _spends_within(view, profile, plan, budget=0.05)


def _spends_within(view: MoEView, profile: Profile, plan: Plan, *, budget: float) -> float:
    """What three answers spend, of which no prefix spends more than it is credited."""
    policy = replace(PRESETS["trimmoe"](), budget=budget)
    engine = make_engine(plan, profile, view.spec, policy)
    driver = LocalDriver(view, profile, engine, slots=3, seed=1)
    for at, prompt in enumerate(prompts(3, 1, 5)):
        driver.open(at, prompt, access=at, budget=budget, confidence=0.9)
    last, spent = {0: 5, 1: 6, 2: 7}, np.zeros(3)
    for step in range(1, 7):
        for one in driver.decode(last):
            spent[one.sequence] += one.ledger.loss
            assert spent[one.sequence] <= budget * step + 1e-9
            last[one.sequence] = int(one.logits.argmax())
    return float(spent.sum())
