"""A plan under load, on a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from io import StringIO
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from trimmoe.core.trace import Trace
from trimmoe.experiments.method_engines import possible_methods
from trimmoe.experiments.methods import find_method
from trimmoe.experiments.simulation import simulate_with_bar, simulation_json, simulation_table
from trimmoe.facade.model import Plan
from trimmoe.simulator.settings import Load, SimulationSettings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = ("pipeline", "exact", "auto")
_WIDTH = 80


def simulate(
    plan: Plan,
    *,
    rate: float | None = None,
    concurrency: int | None = None,
    methods: Sequence[str] = (),
    budget: float | None = None,
    confidence: float | None = None,
    prompt_tokens: float = 64.0,
    output_tokens: float = 64.0,
    duration_s: float = 10.0,
    warm_up_s: float = 2.0,
    seeds: int = 1,
    trace: Trace | None = None,
) -> Simulation:
    """Play methods under load: latency, throughput, queues and traffic on the plan's machines.

    Give `rate`, requests a second, or `concurrency`, requests running at all times. Prompts and
    answers have these mean lengths; `duration_s` virtual seconds are measured after the first
    `warm_up_s`, in so many independent runs. `methods` are names of `methods()`; by default a
    pipeline, where whole layers fit, `exact` and `auto`. Those that trim do so within `budget`, by
    default that of the model's `choice`, or 0.02.
    `trace` is what is replayed, `plan.record()` if none is given. Raises `UserError`.

    Examples:
        >>> import trimmoe
        >>> plan = trimmoe.load("embedded").plan("local4")
        >>> trace = plan.record(tokens=256)
        >>> load = trimmoe.simulate(plan, rate=20, methods=["exact"], duration_s=2, trace=trace)
        >>> load.figures["exact"]["tokens_per_s"] > 0
        True
    """
    choice = plan.model.choice.overridden(budget=budget, confidence=confidence)
    settings = SimulationSettings(
        load=Load(
            rate_per_s=rate,
            concurrency=concurrency,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
        ),
        budget=choice.allowed,
        confidence=choice.confidence,
        warm_up_s=warm_up_s,
        duration_s=duration_s,
        seeds=tuple(range(seeds)),
    )
    for name in methods:
        find_method(name)
    placed, profile, model = plan.placed, plan.profile, plan.model.spec
    named = tuple(methods) or possible_methods(placed, profile, model, METHODS)
    replayed = trace or plan.record()
    outcomes = simulate_with_bar(placed, profile, model, replayed, named, settings)
    return Simulation(
        content=simulation_json(placed, profile, replayed, settings, outcomes),
    )


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What `simulate` saw; printed, it is the table of `trimmoe simulate`."""

    content: dict[str, Any] = field(repr=False)
    """Everything, with all that is needed to repeat it, as `trimmoe simulate --json` writes it."""

    @cached_property
    def figures(self) -> dict[str, dict[str, float]]:
        """By method the means over all runs, such as `token_p99_ms`, `first_token_ms`,
        `tokens_per_s`, `server_use_max`, `hops_per_token` and `budget_spent_per_token`."""
        return {
            row["method"]: {name: each["mean"] for name, each in row["figures"].items()}
            for row in self.content["methods"]
        }

    def plot(self, path: str | PathLike[str] | None = None) -> Figure:
        """Delays, throughput and use of the busiest machine by method; also written to `path` as
        a PNG if one is given. Raises `UserError`."""
        from trimmoe.experiments.plots import load_picture, write_picture

        figure = load_picture(self.content)
        if path is not None:
            write_picture(figure, Path(path))
        return figure

    def __str__(self) -> str:
        text = StringIO()
        Console(file=text, width=_WIDTH).print(simulation_table(self.content))
        return text.getvalue()
