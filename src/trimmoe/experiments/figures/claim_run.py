"""The worlds that the claims are judged on, and the run over all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from trimmoe.core.profile import Profile, load_profile
from trimmoe.core.trace import Trace, load_trace
from trimmoe.experiments.figures.bench import Bench, Execute
from trimmoe.experiments.figures.claim_facts import depth_facts, facts_of, ours_by_letter
from trimmoe.experiments.figures.claim_list import Facts
from trimmoe.experiments.figures.claim_page import Assumed
from trimmoe.experiments.figures.models import MODELS
from trimmoe.experiments.figures.world import (
    Announce,
    Effort,
    generated_world,
    made_world,
)
from trimmoe.experiments.random_clusters import paper_cluster
from trimmoe.experiments.simulation import model_of
from trimmoe.simulator.generate import Parameters

IMPORTANCES = ((0.45, 0.65), (0.55, 0.55), (0.65, 0.45))
"""Of the first and the last layer: the generator's own, one that depth does not change, and its
reverse."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much a run takes."""

    worlds: int
    """Of each kind; each has a cluster and, where they are generated, tokens of its own."""
    effort: Effort
    passages: int
    """Of held-out text, executed on every world."""
    context: int
    """Tokens of each that come before, its prompt, which only methods by the letter trim."""
    steps: int
    """Tokens of each that are decoded."""


SIZES = {
    "tiny": Size(
        worlds=1,
        effort=Effort(seeds=(0,), sequences=4, length=4, load_tokens=20, output_tokens=3,
                      horizon_tokens=4, search_iterations=5, profile_tokens=512),
        passages=1, context=8, steps=4,
    ),
    "small": Size(
        worlds=8,
        effort=Effort(seeds=(0,), sequences=16, length=8, load_tokens=320, output_tokens=8,
                      horizon_tokens=16, search_iterations=40, profile_tokens=2048),
        passages=8, context=32, steps=24,
    ),
    "default": Size(
        worlds=12,
        effort=Effort(seeds=(0,), sequences=24, length=12, load_tokens=600, output_tokens=20,
                      horizon_tokens=24, search_iterations=100, profile_tokens=4096),
        passages=16, context=48, steps=24,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Claimed:
    """What a run found."""

    worlds: dict[str, list[Facts]]
    assumed: list[Assumed]
    inputs: dict[str, dict[str, str]]
    """Hashes, by world."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """A real model's profile and trace, and text to execute it on, if any."""

    model: str
    profile: Path
    trace: Path
    text: tuple[Path, ...] = ()
    letter_profile: Path | None = None
    letter_trace: Path | None = None
    """For the column by the letter, of the same model; None: it has those above."""

    def by_letter(self) -> Recorded:
        """As the column by the letter has it."""
        return replace(
            self,
            profile=self.letter_profile or self.profile,
            trace=self.letter_trace or self.trace,
            letter_profile=None,
            letter_trace=None,
        )


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asked for."""

    geometry: str
    """Of the generated tokens."""
    recorded: Recorded | None
    size_name: str
    seed: int
    worlds_asked: int | None = None
    """None: as many as the size has."""

    @property
    def size(self) -> Size:
        return SIZES[self.size_name]

    @property
    def worlds(self) -> int:
        return self.size.worlds if self.worlds_asked is None else self.worlds_asked


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldFacts:
    """What one world says."""

    columns: dict[str, Facts]
    inputs: dict[str, dict[str, str]]
    """Hashes of what it was made from."""


Executors = Callable[[Profile, int], Execute]
"""What executes the model in a world, by its profile and number."""


def run_claims(asked: Asked, announce: Announce) -> Claimed:
    """Every claim on as many worlds as were asked for: another cluster each, and other tokens where
    these are generated. Raises `UserError`."""
    size, seed = asked.size, asked.seed
    execute = executors(asked)
    found = [world_facts(asked, each, execute, announce) for each in worlds_of(asked)]
    assumed = [_assumed(asked.geometry, each, size.effort, seed, announce) for each in IMPORTANCES]
    return gathered(found, assumed)


def worlds_of(asked: Asked) -> range:
    """Their numbers, which are the seeds of what is drawn in them."""
    return range(asked.seed, asked.seed + asked.worlds)


def gathered(found: Sequence[WorldFacts], assumed: list[Assumed]) -> Claimed:
    """A run of its worlds, in their order."""
    columns = dict.fromkeys(name for each in found for name in each.columns)
    return Claimed(
        worlds={name: [each.columns[name] for each in found] for name in columns},
        assumed=assumed,
        inputs={name: hashes for each in found for name, hashes in each.inputs.items()},
    )


def world_facts(
    asked: Asked, number: int, execute: Executors | None, announce: Announce
) -> WorldFacts:
    """All columns of one world; the same however many worlds a run has."""
    recorded, effort = asked.recorded, asked.size.effort

    def told(what: str) -> None:
        announce(f"world {number}, {what}")

    models = {
        name: _generated(name, effort, number, told)
        for name in dict.fromkeys((asked.geometry, *MODELS))
    }
    bench = models[asked.geometry]
    inputs = {f"{name}, cluster {number}": one.world.inputs for name, one in models.items()}
    compared = {name: models[name] for name in MODELS}
    columns: dict[str, Facts] = {"letter, generated": facts_of(bench, "letter", compared)}
    if recorded is not None:
        bench = letter = _real(recorded, effort, number, execute, told)
        inputs[f"{bench.world.name}, cluster {number}"] = bench.world.inputs
        if recorded.letter_profile is not None:
            letter = _real(recorded.by_letter(), effort, number, execute, told)
            inputs[f"{letter.world.name} by the letter, cluster {number}"] = letter.world.inputs
        columns["letter, embedded"] = facts_of(letter, "letter", {})
    columns["pinned"] = facts_of(bench, "pinned", compared)
    return WorldFacts(columns=columns, inputs=inputs)


def _generated(geometry: str, effort: Effort, seed: int, announce: Announce) -> Bench:
    cluster = paper_cluster(seed)
    world = generated_world(geometry, cluster, effort, seed=seed, announce=announce)
    return Bench(world=world, effort=effort, seed=seed, announce=announce)


def _real(
    recorded: Recorded, effort: Effort, seed: int, execute: Executors | None, announce: Announce
) -> Bench:
    """As much of the real tokens as the effort has, others in every world as far as there are."""
    spec = model_of(recorded.model)
    profile, trace = load_profile(recorded.profile), load_trace(recorded.trace)
    profile.require_model(spec)
    trace = some_sequences(trace, effort.sequences, effort.length, seed)
    world = made_world(
        spec.name, "recorded", spec, profile, trace, paper_cluster(seed), effort, seed=seed,
        announce=announce,
    )  # fmt: skip
    executed = None if execute is None else execute(profile, seed)
    return Bench(world=world, effort=effort, seed=seed, announce=announce, execute=executed)


def some_sequences(trace: Trace, sequences: int, length: int, number: int) -> Trace:
    """The last `length` tokens, which have most before them, of `sequences` sequences; of each
    `number` the following ones, and again from the first behind the last."""
    count, length = min(sequences, trace.sequence_count), min(length, trace.length)
    chosen = (number * count + np.arange(count)) % trace.sequence_count
    last = np.arange(trace.length - length, trace.length)
    rows = (chosen[:, None] * trace.length + last).reshape(-1)
    arrays = {name: getattr(trace, name)[rows] for name in trace.columns}
    return replace(trace, length=length, **arrays)


def executors(asked: Asked) -> Executors | None:
    """What executes the model in each world, on passages of its own, if there is text for it.
    Raises `UserError`."""
    recorded, size, seed = asked.recorded, asked.size, asked.seed
    if recorded is None or not recorded.text:
        return None
    from trimmoe.calibrate.text import read_texts
    from trimmoe.experiments.figures.executed import PassageSettings, executor
    from trimmoe.experiments.opening import open_view, resolved
    from trimmoe.models.load import load_tokenizer

    path = resolved(recorded.model)
    view, tokenizer = open_view(path, "auto", "cpu"), load_tokenizer(path)
    ids = tokenizer("\n\n".join(read_texts(list(recorded.text))), verbose=False)["input_ids"]
    part = len(ids) // size.worlds
    passages = PassageSettings(count=size.passages, context=size.context, steps=size.steps)

    def of(profile: Profile, number: int) -> Execute:
        # Of more worlds than the size has those that follow draw from the same parts again.
        begin = (number - seed) % size.worlds * part
        some = ids[begin : begin + part]
        return executor(view, profile, some, passages, seed=number)

    return of


def _assumed(
    geometry: str, importance: tuple[float, float], effort: Effort, seed: int, announce: Announce
) -> Assumed:
    """Fig. 7(b) by the letter where importance does that with depth."""
    world = generated_world(
        geometry, paper_cluster(seed), replace(effort, search_iterations=1), seed=seed,
        parameters=Parameters(importance=importance), announce=announce,
    )  # fmt: skip
    bench = Bench(world=world, effort=effort, seed=seed, announce=announce)
    facts = depth_facts(bench, ours_by_letter(bench))
    return Assumed(importance=importance, deeper_skips=facts.get("trimmoe.deeper_skips"))
