"""Fig. 10: what each component contributes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from trimmoe.experiments.figures.base import (
    Content,
    Grid,
    cell,
    change,
    figure_json,
    named,
    percent,
    table,
)
from trimmoe.experiments.figures.bench import Bench, replay_row
from trimmoe.experiments.figures.contenders import Contender, letter, pinned_best
from trimmoe.experiments.figures.draw import draw_bars
from trimmoe.experiments.figures.quality import CHARGED
from trimmoe.experiments.methods import METHODS
from trimmoe.policy.settings import PolicySettings

_NOTHING = 0.005
"""Smaller relative differences are not made much of."""
ABLATIONS = ("no-skip", "no-exit", "no-look-ahead", "no-redundancy")
EXITS = ("final-exits", "lossless")
"""What drafts are worth: exits answered and charged instead, and drafts alone."""


def _levers_off(**levers: bool) -> Callable[[PolicySettings], PolicySettings]:
    return lambda policy: replace(policy, levers=replace(policy.levers, **levers))


_LETTER_CHANGES = {
    "no-skip": _levers_off(skip=False, drop_slots=False),
    "no-exit": _levers_off(exit=False),
    "no-look-ahead": lambda policy: replace(policy, horizon=1),
}


def pinned_ablations() -> tuple[Contender, ...]:
    """Ours on our plan, whole, with one part less, and by the exits it has."""
    whole = next(one for one in pinned_best() if one.of == "trimmoe")
    less = (
        Contender(key=f"pinned/{name}", title=METHODS[name].title, method=METHODS[name], of=name)
        for name in (*ABLATIONS, *EXITS)
    )
    return (whole, *less)


def letter_ablations() -> tuple[Contender, ...]:
    """The paper's preset on its plan, whole and with one part less."""
    whole = next(one for one in letter() if one.of == "trimmoe")
    less = [
        replace(
            whole,
            key=f"letter/{name}",
            title=METHODS[name].title,
            of=name,
            change=_LETTER_CHANGES[name],
        )
        for name in _LETTER_CHANGES
    ]
    by_load = replace(METHODS["paper"], seed="dispersed", home=True, load_replicas=True)
    bare = replace(
        whole,
        key="letter/no-redundancy",
        title=METHODS["no-redundancy"].title,
        of="no-redundancy",
        method=by_load,
    )
    return (whole, *less, bare)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ablation:
    """Without skips, exits, look-ahead and redundancy, one at a time; pinned, also what drafts are
    worth."""

    number: str = "10"
    title: str = "Ablation study"
    paper: str = (
        "Every removal raises latency and traffic, skipping most (142 to 176 ms); the degradation "
        "of all variants stays small and is slightly smaller without skips."
    )

    def measure(self, bench: Bench) -> Content:
        """Replays of every variant, pinned and to the letter."""
        arenas = {}
        for name, contenders in (("pinned", pinned_ablations()), ("letter", letter_ablations())):
            kept, _ = bench.there(contenders)
            arenas[name] = [named(one, replay_row(bench.replayed(one))) for one in kept]
        return figure_json(self, bench, {"arenas": arenas})

    def plot(self, content: Content, path: Path) -> None:
        """Delay, traffic and charged loss."""
        arenas = {_TITLES[name]: rows for name, rows in content["arenas"].items()}
        draw_bars(path, _PANELS, arenas, size=(15, 5))

    def grids(self, content: Content) -> dict[str, Grid]:
        """One table per arena."""
        return {
            _TITLES[name]: table(_COLUMNS, [row | {"whole": rows[0]} for row in rows])
            for name, rows in content["arenas"].items()
        }

    def findings(self, content: Content) -> list[str]:
        """Which part matters most, and which not at all."""
        found = []
        for name, rows in content["arenas"].items():
            whole, others = rows[0], rows[1:]
            effect = {row["title"]: change(row["delay_ms"], whole["delay_ms"]) for row in others}
            most = max(effect, key=lambda title: effect[title] or 0.0)
            idle = [title for title, more in effect.items() if abs(more or 0.0) < _NOTHING]
            worse = [title for title, more in effect.items() if (more or 0.0) <= -_NOTHING]
            text = f"{_TITLES[name]}: dearest {most} ({percent(effect[most], signed=True)})"
            if idle:
                text += f"; hardly any effect: {', '.join(idle)}"
            for title in worse:
                text += f"; faster {title} ({percent(effect[title], signed=True)})"
            found.append(text + " (paper: every part counts, skipping +23.9 %).")
        return found


_TITLES = {
    "pinned": "pinned, our plan",
    "letter": "the paper's preset (migrate: not physical)",
}
_PANELS = (
    ("delay_ms", "ms per token, without load"),
    ("mb_per_1000_tokens", "MB per 1000 tokens"),
    ("charged_loss_per_token", CHARGED),
)


def _against_whole(key: str) -> Callable[[Content], str]:
    return lambda row: percent(change(row[key], row["whole"][key]), signed=True)


_COLUMNS = (
    ("variant", cell("title")),
    ("ms", cell("delay_ms", ".2f")),
    ("against whole", _against_whole("delay_ms")),
    ("MB/1000", cell("mb_per_1000_tokens", ".2f")),
    ("against whole", _against_whole("mb_per_1000_tokens")),
    ("charged", cell("charged_loss_per_token", ".4f")),
    ("U (21)", cell("utility", ".3f")),
)
