"""The run itself: streams, a failure in the midst of them, and back to health, again and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from trimmoe.core.errors import UserError
from trimmoe.experiments.chaos.failures import Failure, failures, schedule
from trimmoe.experiments.chaos.mixed import Load
from trimmoe.experiments.chaos.stage import Stage, Usage
from trimmoe.experiments.chaos.streams import PROMPTS, Asking, Scene, Seen

_FREE_S = 20.0
"""By when servers have let go of everything once nobody asks for anything."""
_POLL_S = 0.05
_SHOWN = 30
"""Characters of answers that part."""
_LOOK_S = 5.0
_SETTLING_S = 600.0
_WARM = 2
"""Runs of all streams before the first failure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of one failure."""

    title: str
    right: int
    """Answers that were complete and equal to the undisturbed ones, of those `asked` for."""
    silence_s: float
    """The longest that any client waited for anything."""
    healthy_s: float | None
    """Until all servers took requests again; None if they never did."""
    faults: tuple[str, ...]
    notes: tuple[str, ...] = ()
    asked: int = len(PROMPTS)

    @property
    def ok(self) -> bool:
        return self.right == self.asked and not self.faults and self.healthy_s is not None


Samples = dict[tuple[str, int], list[Usage]]
"""What every process took, time and again, by name and number."""


@dataclass(kw_only=True, slots=True)
class Result:
    """A whole run."""

    outcomes: list[Outcome] = field(default_factory=list)
    samples: Samples = field(default_factory=dict)
    settling_s: float = 0.0
    """How long processes are left to fill their caches before they should be flat."""
    faults: list[str] = field(default_factory=list)
    """What was wrong at the end."""

    @property
    def ok(self) -> bool:
        return not self.faults and all(each.ok for each in self.outcomes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to do, for how long."""

    minutes: float
    seed: int
    tokens: int
    capacity: int
    kinds: tuple[str, ...] = ()
    """Of failures; none: all."""
    stuck_s: float = 120.0
    every_s: float | None = None
    """Under clients who never stop asking, a failure so often, or as soon as all is well again;
    None: eight streams, a failure in the midst of them, one after the other."""


async def run(stage: Stage, plan: Plan, say: Callable[[Outcome], None]) -> Result:
    """Start everything, disturb it, end it; `say` hears of every failure as it is over.

    Raises `UserError` if it does not start.
    """
    try:
        await stage.start()
        served = (await stage.client.get(f"{stage.gateway}/v1/models")).json()["data"][0]["id"]
        asking = Asking(
            client=stage.client,
            base=stage.gateway,
            model=served,
            tokens=plan.tokens,
            stuck_s=plan.stuck_s,
        )
        expected = await _undisturbed(asking)
        scene = Scene(
            stage=stage,
            asking=asking,
            rng=np.random.default_rng(plan.seed),
            capacity=plan.capacity,
            expected=expected,
            spared=None if plan.every_s is None else len(stage.names) - 1,
        )
        disturbed = _disturbed if plan.every_s is None else _under_load
        return await disturbed(scene, plan, say)
    finally:
        await stage.close()


async def _undisturbed(asking: Asking) -> list[Seen]:
    seen = list[Seen]()
    for _ in range(_WARM):
        seen = [Seen() for _ in PROMPTS]
        await asking.all(seen)
    for each in seen:
        if each.error or not each.finished:
            raise UserError(f"Undisturbed answers fail already ({each.error}); see the logs.")
    return seen


def _chosen(scene: Scene, plan: Plan) -> Iterator[Failure]:
    """All kinds once, whatever that takes, and then others until the time is over."""
    networked = scene.stage.lan is not None
    known = failures(scene.stage.names, networked=networked, spared=scene.spared)
    chosen = [each for each in known if not plan.kinds or each.kind in plan.kinds]
    least, end_s = len({each.kind for each in chosen}), time.monotonic() + 60 * plan.minutes
    for count, failure in enumerate(schedule(chosen, scene.rng)):
        if count >= least and time.monotonic() > end_s:
            return
        yield failure


async def _disturbed(scene: Scene, plan: Plan, say: Callable[[Outcome], None]) -> Result:
    result = Result()
    _sample(scene.stage, result.samples)
    for failure in _chosen(scene, plan):
        outcome = await _one(scene, failure)
        result.outcomes.append(outcome)
        say(outcome)
        if outcome.healthy_s is None:
            break
        _sample(scene.stage, result.samples)
    return result


async def _under_load(scene: Scene, plan: Plan, say: Callable[[Outcome], None]) -> Result:
    assert plan.every_s is not None
    result = Result(settling_s=min(_SETTLING_S, 30 * plan.minutes))
    load = Load(scene, plan.seed)
    looking = asyncio.create_task(_keep_sampling(scene.stage, result.samples))
    try:
        for failure in _chosen(scene, plan):
            next_s = time.monotonic() + plan.every_s
            outcome = await _beside(scene, load, failure, next_s)
            result.outcomes.append(outcome)
            say(outcome)
            if outcome.healthy_s is None:
                break
    finally:
        await load.stop()
        looking.cancel()
    result.faults += sorted(set(load.told().wrong))
    if left := await _left_over(scene.stage):
        result.faults.append(f"{left} requests were never let go of")
    return result


async def _beside(scene: Scene, load: Load, failure: Failure, next_s: float) -> Outcome:
    """One failure beside clients who go on asking, until the next one is due."""
    scene.notes.clear()
    began_s = time.monotonic()
    faults = await failure.happen(scene)
    healthy = await scene.stage.until_healthy()
    healthy_s = time.monotonic() - began_s
    if healthy and failure.after is not None:
        faults += await failure.after(scene)
    await asyncio.sleep(max(next_s - time.monotonic(), 0.0))
    told = load.told()
    return Outcome(
        title=failure.title,
        right=told.right,
        asked=told.asked,
        silence_s=told.silence_s,
        healthy_s=healthy_s if healthy else None,
        faults=(*faults, *sorted(set(told.wrong))),
        notes=tuple(scene.notes),
    )


async def _one(scene: Scene, failure: Failure) -> Outcome:
    scene.notes.clear()
    seen = [Seen() for _ in PROMPTS]
    streams = asyncio.create_task(scene.asking.all(seen))
    while not streams.done() and not all(each.events > 1 for each in seen):
        await asyncio.sleep(0.002)
    began_s = time.monotonic()
    faults = await failure.happen(scene)
    healthy = await scene.stage.until_healthy()
    healthy_s = time.monotonic() - began_s
    await streams
    if healthy and failure.after is not None:
        faults += await failure.after(scene)
    if healthy and (left := await _left_over(scene.stage)):
        faults.append(f"{left} requests were never let go of")
    right = sum(each.is_like(wanted) for each, wanted in zip(seen, scene.expected, strict=True))
    faults += _reasons(seen, scene.expected)
    return Outcome(
        title=failure.title,
        right=right,
        silence_s=max(each.silence_s for each in seen),
        healthy_s=healthy_s if healthy else None,
        faults=tuple(faults),
        notes=tuple(scene.notes),
    )


def _reasons(seen: Sequence[Seen], expected: Sequence[Seen]) -> list[str]:
    """What is wrong with answers, each once."""
    reasons = []
    for each, wanted in zip(seen, expected, strict=True):
        if each.is_like(wanted):
            continue
        if each.error:
            reasons.append(each.error)
        elif wanted.text.startswith(each.text):
            reasons.append("an answer is cut off")
        else:
            reasons.append(_parted(each.text, wanted.text))
    return sorted(set(reasons))


def _parted(text: str, wanted: str) -> str:
    """Where an answer is another one."""
    at = next(
        (at for at, (a, b) in enumerate(zip(text, wanted, strict=False)) if a != b), len(wanted)
    )
    return (
        f"after {at} characters an answer goes on with {text[at : at + _SHOWN]!r} in place of "
        f"{wanted[at : at + _SHOWN]!r}"
    )


async def _left_over(stage: Stage) -> int:
    """Requests that servers still have although nobody waits for any."""
    end_s = time.monotonic() + _FREE_S
    while (count := await stage.under_way()) and time.monotonic() < end_s:
        await asyncio.sleep(_POLL_S)
    return count


async def _keep_sampling(stage: Stage, samples: Samples) -> None:
    while True:
        _sample(stage, samples)
        await asyncio.sleep(_LOOK_S)


def _sample(stage: Stage, samples: Samples) -> None:
    for process, usage in stage.usage().items():
        samples.setdefault(process, []).append(usage)
