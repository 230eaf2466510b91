"""Equal-quality curves: delay and traffic against the loss of quality, for every method that trades
quality, since single points at different losses do not compare."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from trimmoe.core.profile import Profile
from trimmoe.cost.actions import ActionSpace
from trimmoe.experiments.figures.base import (
    Content,
    Grid,
    change,
    fastest_lossless,
    figure_json,
    named,
    percent,
)
from trimmoe.experiments.figures.bench import BUDGET, Bench, replay_row
from trimmoe.experiments.figures.contenders import EXACT, Contender, pinned_best
from trimmoe.experiments.figures.draw import line, picture
from trimmoe.experiments.figures.goal import goal_sentences
from trimmoe.experiments.figures.quality import CHARGED, MEASURED
from trimmoe.experiments.methods import METHODS, PolicyMaker
from trimmoe.policy.base import Policy
from trimmoe.policy.baselines import LocalPrior, MixtureOfDepths, skip_thresholds
from trimmoe.policy.build import Deployment
from trimmoe.policy.settings import PolicySettings

SKIP_RATES = (0.005, 0.01, 0.02, 0.05)
BIASES = (0.02, 0.05, 0.1, 0.2)
LEVELS = (0.005, 0.01, 0.02)
"""Losses at which delays are compared."""


def _mixture(
    rate: float,
    space: ActionSpace,
    deployed: Deployment,
    profile: Profile,
    settings: PolicySettings,
) -> Policy:
    below = skip_thresholds(profile.importance_quantiles, rate)
    return MixtureOfDepths(space=space, routes=deployed.routes, below=below)


def _prior(
    bias: float,
    space: ActionSpace,
    deployed: Deployment,
    profile: Profile,
    settings: PolicySettings,
) -> Policy:
    return LocalPrior(space=space, routes=deployed.routes, bias=bias)


def _turned(name: str, knob: float, maker: PolicyMaker) -> Contender:
    method = METHODS[name]
    return Contender(
        key=f"curves/{name}/{knob:g}",
        title=f"{method.title} {knob:g}",
        method=replace(method, policy=maker),
    )


def _settings(bench: Bench) -> Iterator[tuple[str, str, Contender, float]]:
    """Curve, setting, contender and budget of every point."""
    by_name = {one.of: one for one in pinned_best()}
    for of in ("trimmoe", "substitute-only"):
        for budget in bench.effort.budgets:
            yield by_name[of].method.title, f"{budget:g}", by_name[of], budget
    for rate in SKIP_RATES:
        turned = _turned("mixture-of-depths", rate, partial(_mixture, rate))
        yield "Mixture-of-Depths", f"{rate:g}", turned, BUDGET
    for bias in BIASES:
        yield (
            "Local-Prior",
            f"{bias:g}",
            _turned("local-prior", bias, partial(_prior, bias)),
            BUDGET,
        )
    yield "MoE^2 (adapted)", "", by_name["moe2"], BUDGET


@dataclass(frozen=True, kw_only=True, slots=True)
class Curves:
    """All methods that trade quality, on our plan, beside the lossless ones."""

    number: str = "E"
    title: str = "Delay and traffic at equal quality"
    paper: str = "Not in the paper, which compares methods at different losses of quality."

    def measure(self, bench: Bench) -> Content:
        """A point per method and setting; executed too where the model is at hand."""
        lossless, _ = bench.there(tuple(one for one in pinned_best() if one.lossless))
        points, executed = [], []
        for curve, setting, contender, budget in _settings(bench):
            if not bench.there((contender,))[0]:
                continue
            label = {"curve": curve, "setting": setting}
            points.append(label | replay_row(bench.replayed(contender, budget)))
            if bench.execute is not None:
                executed.append(label | bench.executed(contender, budget))
        flat = [named(one, replay_row(bench.replayed(one))) for one in lossless]
        body: Content = {"lossless": flat, "points": points, "executed": None}
        body["at_equal_charge"] = _at_levels(points, "charged_loss_per_token", flat)
        if bench.execute is not None:
            # Executed as well: on the same passages, so that delays compare token by token.
            ran = [named(one, bench.executed(one)) for one in lossless]
            flips = _at_levels(executed, "flip_rate", ran)
            body["executed"] = {"lossless": ran, "points": executed, "at_equal_flips": flips}
        body["goal"] = goal_sentences(body)
        return figure_json(self, bench, body)

    def plot(self, content: Content, path: Path) -> None:
        """Delay and traffic against what was charged and, below, against what flipped."""
        kinds = [("points", "charged_loss_per_token", CHARGED, content["points"])]
        if content["executed"]:
            kinds.append(
                (
                    "executed",
                    "flip_rate",
                    f"{MEASURED}, share of tokens",
                    content["executed"]["points"],
                )
            )
        with picture(path, len(kinds), 2, size=(12, 3.8 * len(kinds))) as panels:
            for row, (_, key, label, points) in zip(panels, kinds, strict=True):
                for panel, value, name in zip(
                    row,
                    ("delay_ms", "mb_per_1000_tokens"),
                    ("ms per token", "MB per 1000 tokens"),
                    strict=True,
                ):
                    _draw(panel, points, key, value)
                    for flat in content["lossless"]:
                        if flat["of"] == EXACT:
                            panel.axhline(flat[value], color="#555555", ls=":", label="exact")
                    panel.set(xlabel=label, ylabel=name, xlim=(-0.001, 0.08))
                    panel.legend(fontsize=7)

    def grids(self, content: Content) -> dict[str, Grid]:
        """The least delay of every method within a loss."""
        found = {f"Least ms per token within a {CHARGED}": _grid(content["at_equal_charge"])}
        if content["executed"]:
            at = content["executed"]["at_equal_flips"]
            found[f"Least ms per token within {MEASURED}"] = _grid(at)
        return found

    def findings(self, content: Content) -> list[str]:
        """Who is fastest within 2 %, and by how much against lossless execution."""
        found = [_verdict(content["at_equal_charge"], content["lossless"], CHARGED)]
        executed = content["executed"]
        if executed:
            found.append(_verdict(executed["at_equal_flips"], executed["lossless"], MEASURED))
        return found


def _verdict(at: dict[str, dict[str, float]], lossless: list[Content], what: str) -> str:
    level = f"{LEVELS[-1]:g}"
    fastest = min(at, key=lambda name: at[name][level])
    least_ms = at[fastest][level]
    beside = []
    for own in (False, True):
        best = fastest_lossless(lossless, ours=own)
        if best is not None:
            saved = percent(change(least_ms, best["delay_ms"]), signed=True)
            beside.append(f"{saved} against {best['title']} ({best['delay_ms']:.2f} ms)")
    return f"Within 2 % {what}, {fastest} is fastest: {least_ms:.2f} ms, {', '.join(beside)}."


def _at_levels(
    points: list[Content], key: str, lossless: list[Content]
) -> dict[str, dict[str, float]]:
    """Least delay of each curve at a loss of at most each level; lossless execution on our plan
    is a point of every curve."""
    start = [row["delay_ms"] for row in lossless if row["of"] == EXACT]
    return {
        curve: {
            f"{level:g}": min(
                start + [p["delay_ms"] for p in points if p["curve"] == curve and p[key] <= level]
            )
            for level in LEVELS
        }
        for curve in dict.fromkeys(point["curve"] for point in points)
    }


def _draw(panel, points: list[Content], key: str, value: str) -> None:
    for index, curve in enumerate(dict.fromkeys(point["curve"] for point in points)):
        chosen = sorted((p for p in points if p["curve"] == curve), key=lambda p: p[key])
        line(panel, [p[key] for p in chosen], [p[value] for p in chosen], curve, index)


def _grid(at: dict[str, dict[str, float]]) -> Grid:
    return Grid(
        headings=("method", *(f"at most {percent(level)}" for level in LEVELS)),
        rows=[
            (name, *(f"{row[f'{level:g}']:.2f}" for level in LEVELS)) for name, row in at.items()
        ],
    )
