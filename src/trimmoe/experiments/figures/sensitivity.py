"""How much the generator's assumptions decide: each parameter halved and doubled, one at a time.

The parameters are those of the world's own generated tokens, or fitted to a recorded trace and
profile. Plans stay those of the unchanged parameters: what moves is what is decided on them. How
often guesses are right moves `speculative` alone, which `agreement` sweeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from trimmoe.experiments.figures.agreement import (
    agreement_grid,
    agreement_sentence,
    draw_agreement,
    measure_agreement,
)
from trimmoe.experiments.figures.base import Content, Grid, figure_json, percent
from trimmoe.experiments.figures.bench import Bench
from trimmoe.experiments.figures.contenders import Contender, pinned_best
from trimmoe.experiments.figures.draw import picture
from trimmoe.experiments.figures.world import World
from trimmoe.placement.make import default, make_plan, paper
from trimmoe.simulator.fit import fit_parameters
from trimmoe.simulator.generate import Parameters, generate_trace
from trimmoe.simulator.generated_profile import generate_profile

FACTORS = (0.5, 2.0)
_PATTERNS = 8
"""In the look-ahead, which more of them make slower and hardly change."""
_SHARES = frozenset(
    (
        "affinity",
        "importance",
        "class_persistence",
        "exit_hazard",
        "exit_confidence",
        "exit_foresight",
        "class_ratio",
        "feasible_similarity",
        "home_agreement",
    )
)
_PROFILE_TOKENS = 2048
_MOST = 0.95
"""Of a share, where its double would be more."""
_NOTHING = 0.0005
"""Of the ratio: what a table does not show."""
PLACES = {"ours": "our plan", "home": "the paper's placement at home"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """Delay of exact execution and of ours, and their ratio, as each parameter changes."""

    number: str = "S"
    title: str = "Sensitivity to the generator's parameters"
    paper: str = "Not in the paper, which measured on its testbed."

    def measure(self, bench: Bench) -> Content:
        """Replays of a few hundred generated tokens each."""
        base, world = base_parameters(bench.world), bench.world
        if "generator" not in world.trace.header.settings:
            world = _planned(world, base, bench)
        rows = [{"parameter": None, "factor": 1.0} | _delays(world, base, bench)]
        for name, factor, changed in variations(base, bench.effort.sensitivity_parameters):
            bench.announce(f"{name} times {factor:g}")
            row = {"parameter": name, "factor": factor, "value": asdict(changed)[name]}
            rows.append(row | _delays(world, changed, bench))
        fitted = "generator" not in bench.world.trace.header.settings
        body = {"fitted": fitted, "parameters": asdict(base), "rows": rows}
        body["guesses"] = measure_agreement(bench, base, recorded=fitted)
        return figure_json(self, bench, body)

    def plot(self, content: Content, path: Path) -> None:
        """The ratio from halved to doubled, a line per parameter, one panel per placement; then
        that of guesses over how often they are right."""
        names = _names(content)
        with picture(path, 1, 3, size=(18, max(0.28 * len(names) + 1.4, 3.4))) as (panels,):
            draw_agreement(panels[2], content["guesses"])
            for panel, (place, label) in zip(panels[:2], PLACES.items(), strict=True):
                base = content["rows"][0][place]["ratio"]
                panel.axvline(base, color="#555555", ls=":")
                # Lest less than a tenth of a percent look like much.
                panel.plot([base - 0.02, base + 0.02], [0, 0], alpha=0.0)
                panel.ticklabel_format(axis="x", useOffset=False)
                for at, name in enumerate(reversed(names)):
                    ratios = [row[place]["ratio"] for row in _of(content, name)]
                    panel.plot(ratios, [at, at], color="#0072B2", linewidth=1.2)
                    panel.plot(ratios[0], at, color="#0072B2", marker="v", label="halved")
                    panel.plot(ratios[1], at, color="#D55E00", marker="^", label="doubled")
                panel.set_yticks(range(len(names)), list(reversed(names)), fontsize=7)
                panel.set_xlabel(f"TrimMoE over exact, {label}")
                panel.legend(*_first(*panel.get_legend_handles_labels()), fontsize=7)

    def grids(self, content: Content) -> dict[str, Grid]:
        """One table per placement: a line per parameter, halved and doubled side by side; and one
        of guesses."""
        found = {
            f"ms per token without load, {label}": Grid(
                headings=(
                    "parameter",
                    "value",
                    *(f"{what}, {how}" for how in ("halved", "doubled") for what in _WHAT),
                ),
                rows=_lines(content, place),
            )
            for place, label in PLACES.items()
        }
        return found | {_GUESSES: agreement_grid(content["guesses"])}

    def findings(self, content: Content) -> list[str]:
        """The range of the ratio and the parameter that moves it most, by placement; what hangs on
        the agreement of guesses."""
        whose = "fitted to the recorded tokens" if content["fitted"] else "of the generated tokens"
        found = [f"{len(_names(content))} parameters {whose}, one at a time, on unchanged plans."]
        for place, label in PLACES.items():
            base, rest = content["rows"][0][place]["ratio"], content["rows"][1:]
            ratios = [row[place]["ratio"] for row in rest]
            most = max(rest, key=lambda row: abs(row[place]["ratio"] - base))
            moved = (
                f"between {percent(min(ratios))} and {percent(max(ratios))} with any one parameter "
                f"halved or doubled; `{most['parameter']}` times {most['factor']:g} moves it most"
                if abs(most[place]["ratio"] - base) >= _NOTHING
                else "and no parameter halved or doubled moves that"
            )
            found.append(
                f"On {label} TrimMoE takes {percent(base)} of exact execution's delay, {moved}."
            )
        return [*found, agreement_sentence(content["guesses"])]


_WHAT = ("exact", "TrimMoE", "ratio")
_GUESSES = "Guesses on our plan: ms per token without load, hops over exact execution's"


def base_parameters(world: World) -> Parameters:
    """Those the world's tokens were generated by, or fitted to its recorded ones."""
    given: dict[str, Any] | None = world.trace.header.settings.get("generator")
    if given is None:
        return fit_parameters(world.trace, world.profile)
    pairs: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in given.items()}
    return Parameters(**pairs)


def variations(
    base: Parameters, names: Sequence[str] | None = None
) -> Iterator[tuple[str, float, Parameters]]:
    """Each of these parameters, or of all, by every factor: name, factor, and all parameters."""
    for name in names or [item.name for item in fields(base)]:
        for factor in FACTORS:
            value = _scaled(name, getattr(base, name), factor)
            yield name, factor, replace(base, **{name: value})


def _scaled(name: str, value: Any, factor: float) -> Any:
    """`value` times `factor`; shares stay shares, a bound's excess is what is over the mean."""
    if isinstance(value, tuple):
        return tuple(_scaled(name, each, factor) for each in value)
    if isinstance(value, int):
        return max(1, round(value * factor))
    if name == "bound_excess":
        return 1.0 + (value - 1.0) * factor
    return min(value * factor, max(value, _MOST)) if name in _SHARES else value * factor


def _planned(world: World, base: Parameters, bench: Bench) -> World:
    """Plans for the structure that stands in for that of a recorded trace."""
    model, cluster = world.model, world.plan.cluster
    profile = _profile(world, base, bench)
    plan, letter = (
        make_plan(profile, model, cluster, settings, cluster_hash=cluster.name)
        for settings in (default(), paper())
    )
    return replace(world, plan=plan, paper_plan=letter)


def _structure(world: World, bench: Bench) -> int:
    """The seed of what belongs to the model: which expert is popular."""
    return world.trace.header.settings.get("structure_seed", bench.seed)


def _profile(world: World, parameters: Parameters, bench: Bench):
    return generate_profile(
        world.model,
        parameters,
        seed=_structure(world, bench),
        tokens=min(bench.effort.profile_tokens, _PROFILE_TOKENS),
        max_patterns=_PATTERNS,
    )


def _delays(world: World, parameters: Parameters, bench: Bench) -> Content:
    """Both policies on both plans."""
    structure = _structure(world, bench)
    profile = _profile(world, parameters, bench)
    trace = generate_trace(
        world.model,
        parameters,
        sequences=bench.effort.sensitivity_sequences,
        length=bench.effort.sensitivity_length,
        seed=bench.seed + 1,
        structure_seed=structure,
        profile_hash=profile.hash,
    )
    other = Bench(
        world=replace(world, source="generated", profile=profile, trace=trace),
        effort=bench.effort,
        seed=bench.seed,
    )
    found = {}
    for place in PLACES:
        exact, ours = (other.replayed(one).ledger for one in _pair(place))
        found[place] = {
            "exact_ms": exact.mean_delay_s * 1e3,
            "trimmoe_ms": ours.mean_delay_s * 1e3,
            "ratio": ours.mean_delay_s / exact.mean_delay_s,
            "charged_loss_per_token": ours.loss / ours.tokens,
        }
    return found


def _pair(place: str) -> tuple[Contender, Contender]:
    by_name = {one.of: one for one in pinned_best()}
    exact, ours = by_name["exact"], by_name["trimmoe"]
    if place == "ours":
        return exact, ours
    return (
        replace(exact, key="home/exact", on="paper"),
        replace(ours, key="home/trimmoe", on="paper"),
    )


def _names(content: Content) -> list[str]:
    """The parameters that were changed."""
    return list(dict.fromkeys(row["parameter"] for row in content["rows"][1:]))


def _of(content: Content, name: str) -> list[Content]:
    """A parameter's rows, halved first."""
    return [row for row in content["rows"] if row["parameter"] == name]


def _lines(content: Content, place: str) -> list[tuple[str, ...]]:
    base = content["rows"][0][place]
    lines = [("all as they are", "", *_cells(base), *_cells(base))]
    for name in _names(content):
        halved, doubled = (row[place] for row in _of(content, name))
        lines.append((name, _shown(content["parameters"][name]), *_cells(halved), *_cells(doubled)))
    return lines


def _cells(row: Content) -> tuple[str, ...]:
    return f"{row['exact_ms']:.2f}", f"{row['trimmoe_ms']:.2f}", percent(row["ratio"])


def _shown(value: Any) -> str:
    many = value if isinstance(value, tuple | list) else (value,)
    return " to ".join(f"{each:.3g}" for each in many)


def _first(handles: list, labels: list[str]) -> tuple[list, list[str]]:
    """One entry per label."""
    kept = [labels.index(label) for label in dict.fromkeys(labels)]
    return [handles[at] for at in kept], [labels[at] for at in kept]
