"""The in-process driver really executes what the engine says, on a tiny random model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2MoeForCausalLM

import checkpoints
from factories import random_cluster, random_profile
from synthetic import random_plan
from tiny import write_tiny_checkpoint
from trimmoe.core.events import Complete
from trimmoe.core.exit_states import ExitState
from trimmoe.core.ledger import Kind
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.experiments.method_engines import make_engine
from trimmoe.models.base import MoEView
from trimmoe.models.cache import cache_argument
from trimmoe.models.exact import exact_logits, greedy
from trimmoe.models.load import open_model
from trimmoe.policy.base import Decision, Observation, Policy
from trimmoe.policy.presets import PRESETS
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.decoder import Decoder, PlannedDecoder
from trimmoe.runtime.exact_decoder import ExactDecoder
from trimmoe.runtime.local import Decoded, LocalDriver
from trimmoe.runtime.service import GenerationRequest

PROMPTS = [[5, 9, 77, 31, 200], [120, 4], [64, 65, 66, 67, 68, 69, 70, 71]]
NEW = 8


@dataclass(kw_only=True)
class World:
    folder: Path
    view: MoEView
    profile: Profile
    plan: Plan

    def driver(self, settings: PolicySettings, **engine_changes) -> LocalDriver:
        engine = make_engine(self.plan, self.profile, self.view.spec, settings)
        engine = replace(engine, **engine_changes)
        return LocalDriver(self.view, self.profile, engine, slots=len(PROMPTS), seed=3)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    view = open_model(folder)
    rng = np.random.default_rng(1)
    profile = random_profile(rng, view.spec)
    plan = random_plan(rng, view.spec, random_cluster(rng, servers=4))
    return World(folder=folder, view=view, profile=profile, plan=plan)


def run(
    driver: LocalDriver,
    *,
    budget: float,
    confidence: float,
    new: int = NEW,
    prompts: list[list[int]] = PROMPTS,
) -> tuple[list[list[int]], list[list[Decoded]]]:
    """Decode all prompts together, greedily; tokens and what each step gave."""
    logits = {
        sequence: driver.open(
            sequence, prompt, access=sequence, budget=budget, confidence=confidence
        )
        for sequence, prompt in enumerate(prompts)
    }
    made: list[list[int]] = [[] for _ in prompts]
    steps = []
    for _ in range(new):
        tokens = {sequence: int(scores.argmax()) for sequence, scores in logits.items()}
        for sequence, token in tokens.items():
            made[sequence].append(token)
        steps.append(driver.decode(tokens))
        logits = {one.sequence: one.logits for one in steps[-1]}
    for sequence in range(len(prompts)):
        driver.close(sequence)
    return made, steps


def test_exact_execution_is_transformers_greedy_token_for_token(world: World) -> None:
    made, _ = run(world.driver(PRESETS["exact"]()), budget=0.0, confidence=2.0)
    reference: Any = Qwen2MoeForCausalLM.from_pretrained(world.folder)
    for prompt, tokens in zip(PROMPTS, made, strict=True):
        ids = torch.tensor([prompt])
        expected = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False,
            eos_token_id=None,
        )  # fmt: skip
        assert tokens == expected[0, len(prompt) :].tolist()


def test_no_budget_and_no_exits_is_the_exact_model_bit_for_bit(world: World) -> None:
    settings = replace(PRESETS["final-exits"](), budget=0.0)
    made, steps = run(world.driver(settings), budget=0.0, confidence=2.0)
    same, exact_steps = run(world.driver(PRESETS["exact"]()), budget=0.0, confidence=2.0)
    assert made == same == greedy(world.view, PROMPTS, NEW)
    for ours, theirs in zip(steps, exact_steps, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one.logits, other.logits)


def test_drafts_change_nothing_in_what_is_predicted(world: World) -> None:
    settings = PRESETS["lossless"]().but(draft_confidence=0.3, exits_weighed=False)
    driver = world.driver(settings)
    made, steps = run(driver, budget=0.0, confidence=0.9)
    assert made == greedy(world.view, PROMPTS, NEW)
    _, plain = run(world.driver(PRESETS["exact"]()), budget=0.0, confidence=2.0)
    wrong = right = 0
    for ours, theirs in zip(steps, plain, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.allclose(one.logits, other.logits, atol=1e-5)
            exited = one.ledger.kinds[:, Kind.EXITED].sum()
            wrong += one.ledger.audits > 0 and not exited
            right += exited > 0
    assert wrong
    assert right
    assert driver.state.feedback.false_exits == wrong


class Scripted(Policy):
    """A policy that skips the given layers and otherwise runs everything at home."""

    def __init__(self, skipped: set[int]) -> None:
        self.skipped = skipped

    def decide(self, observation: Observation) -> Decision:
        count = observation.experts.shape[0]
        skip = observation.layer in self.skipped
        return Decision(
            slot_expert=np.full_like(observation.experts, -1) if skip else observation.experts,
            slot_server=np.repeat(observation.server[:, None], observation.experts.shape[1], 1),
            destination=observation.server,
            delay_s=np.zeros(count),
            loss=np.zeros(count),
            ahead=np.full(observation.experts.shape[0], np.inf),
        )


def scripted(world: World, skipped: set[int], **settings) -> LocalDriver:
    policy = PRESETS["final-exits"]().but(
        audit_share=0.0, exit_risk=None, exits_charged=False, **settings
    )
    return world.driver(policy, policy=Scripted(skipped))


def test_a_skipped_layer_takes_the_residual_and_the_shared_expert(world: World) -> None:
    """Against transformers with the routed experts of that layer silenced after the prompt."""
    skipped = 2
    made, steps = run(scripted(world, {skipped}), budget=0.0, confidence=2.0, new=4)
    reference: Any = Qwen2MoeForCausalLM.from_pretrained(world.folder)
    named = cache_argument(reference)
    for sequence, (prompt, tokens) in enumerate(zip(PROMPTS, made, strict=True)):
        cache = reference(torch.tensor([prompt]), use_cache=True)[named]
        with _silenced(reference.model.layers[skipped].mlp.experts):
            for step, token in enumerate(tokens):
                output = reference(torch.tensor([[token]]), use_cache=True, **{named: cache})
                logits = steps[step][sequence].logits
                assert torch.allclose(output.logits[0, -1], logits, atol=1e-4)
    kinds = steps[0][0].ledger.kinds
    assert kinds[:, Kind.SKIPPED].tolist() == [0, 0, 1, 0]


class _silenced:
    """Inside the block, a module's output is zero."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def __enter__(self) -> None:
        self._hook = self._module.register_forward_hook(lambda *_: torch.zeros_like(_[2]))

    def __exit__(self, *_: object) -> None:
        self._hook.remove()


def test_an_exited_token_predicts_from_the_state_it_left_with(world: World) -> None:
    """Confidence 0 makes every token exit after the first layer it executed."""
    made, steps = run(scripted(world, set()), budget=0.0, confidence=0.0, new=3)
    view = world.view
    for step in steps:
        for one in step:
            assert one.ledger.kinds[:, Kind.EXITED].tolist() == [0, 1, 1, 1]
    # The same by hand for the second prompt, of which only layer 0 runs.
    cache = view.new_cache(slots=1)
    slot = cache.alloc()
    _exact_prompt(view, cache, slot, PROMPTS[1])
    for step, token in enumerate(made[1]):
        position = len(PROMPTS[1]) + step
        batch = view.batch(cache, [slot], [[position]])
        with torch.inference_mode():
            hidden = view.embed(torch.tensor([[token]]), batch)
            flat = batch.pack(view.attend(0, hidden, batch, cache))
            routing = view.route(0, flat)
            routed = view.experts(0, flat, routing.experts, routing.gates)
            state = view.finish(0, flat, view.shared(0, flat), routed)
            logits = view.logits(state)[0]
        assert torch.allclose(logits, steps[step][1].logits, atol=1e-5)


def test_full_depth_checks_every_exit_that_goes_on_whole(world: World) -> None:
    """What it says is the exact model's prediction after the tokens that were really fed."""
    driver = scripted(world, set(), exit_state=ExitState.WHOLE)
    made, steps = run(driver, budget=0.0, confidence=0.0, new=4)
    exact = exact_logits(
        world.view, [prompt + tokens for prompt, tokens in zip(PROMPTS, made, strict=True)]
    )
    wrong = 0
    for sequence, prompt in enumerate(PROMPTS):
        for at, step in enumerate(steps):
            assert step[sequence].ledger.audits == 1
            truth = exact[sequence][len(prompt) + at].argmax()
            wrong += int(step[sequence].logits.argmax() != truth)
    feedback = driver.state.feedback
    assert (feedback.audits, feedback.false_exits) == (4 * len(PROMPTS), wrong)
    assert wrong > 0


def _exact_prompt(view: MoEView, cache, slot: int, prompt: list[int]) -> None:
    from trimmoe.models.exact import full_depth

    with torch.inference_mode():
        batch = view.batch(cache, [slot], [range(len(prompt))])
        full_depth(view, view.embed(torch.tensor([prompt]), batch), batch, cache)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_policy_decodes_all_sequences_and_replays(world: World, name: str) -> None:
    """The recorded events, through a fresh engine, give the same commands."""
    settings = PRESETS[name]().but(audit_share=0.5, exit_risk=None)
    driver = world.driver(settings)
    driver.log = []
    run(driver, budget=settings.budget, confidence=0.3)
    assert not driver.state.waves
    assert not driver.state.accounts
    state, completed = driver.engine.start(), 0
    for event, commands in driver.log:
        state, again = driver.engine.step(state, event)
        assert repr(again) == repr(commands)
        completed += sum(one.rows.size for one in again if isinstance(one, Complete))
    assert completed == NEW * len(PROMPTS)


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "switch"])
def test_every_family_decodes_exactly_through_the_engine(tmp_path: Path, family: str) -> None:
    """Prompt and decode, several sequences of unequal length at once, against `generate`."""
    folder = checkpoints.write(family, tmp_path)
    view = open_model(folder)
    rng = np.random.default_rng(2)
    world = World(
        folder=folder,
        view=view,
        profile=random_profile(rng, view.spec),
        plan=random_plan(rng, view.spec, random_cluster(rng, servers=4)),
    )
    prompts = [[token % 90 + 3 for token in prompt] for prompt in PROMPTS]
    driver = world.driver(PRESETS["exact"]())
    made, _ = run(driver, budget=0.0, confidence=2.0, prompts=prompts)
    reference = checkpoints.reference(folder)
    start_token = getattr(view, "start_token", None)
    for prompt, tokens in zip(prompts, made, strict=True):
        ids = torch.tensor([prompt])
        expected = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False,
            eos_token_id=None, decoder_start_token_id=start_token,
        )[0]  # fmt: skip
        start = len(prompt) if start_token is None else 1
        assert tokens == expected[start:].tolist()


@pytest.mark.parametrize("family", ["qwen2_moe", "switch"])
def test_an_answer_is_taken_up_where_it_was(tmp_path: Path, family: str) -> None:
    """With an encoder the prompt is its input, and the answer the decoder's."""
    view = open_model(checkpoints.write(family, tmp_path))
    rng = np.random.default_rng(2)
    engine = make_engine(
        random_plan(rng, view.spec, random_cluster(rng, servers=4)),
        random_profile(rng, view.spec),
        view.spec,
        PRESETS["exact"](),
    )
    decoders = [
        ExactDecoder(view, slots=1),
        PlannedDecoder(
            view,
            random_profile(rng, view.spec),
            engine,
            slots=1,
            server_names=("a", "b", "c", "d"),
        ),
    ]
    for decoder in decoders:
        asked = GenerationRequest(
            request_id="r", prompt_ids=(5, 9, 77, 31), max_new_tokens=NEW, exact=True
        )
        whole = _answered(decoder, asked)
        for cut in range(1, NEW):
            rest = _answered(decoder, replace(asked, received=tuple(whole[:cut])))
            assert whole[:cut] + rest == whole


def _answered(decoder: Decoder, request: GenerationRequest) -> list[int]:
    made = [int(decoder.open(0, request).argmax())]
    while len(request.received) + len(made) < request.max_new_tokens:
        made.append(int(decoder.decode({0: made[-1]})[0].logits.argmax()))
    decoder.close(0)
    return made
