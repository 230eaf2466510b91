"""Fig. 9: the three models of the paper."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trimmoe.experiments.figures.base import (
    Content,
    Grid,
    cell,
    change,
    fastest_lossless,
    figure_json,
    find,
    named,
    percent,
    share,
    table,
)
from trimmoe.experiments.figures.bench import Bench, replay_row
from trimmoe.experiments.figures.contenders import letter, pinned_best
from trimmoe.experiments.figures.draw import bars, picture

MODELS = ("switch-base-8e", "qwen1.5-moe-a2.7b", "mixtral-8x7b")
_RUN = (
    "edgeshard",
    "pipeline",
    "mod",
    "mod-matched",
    "moe2",
    "moe2-matched",
    "substitute-only",
    "exact",
    "trimmoe",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Models:
    """Everybody without load, on the main world and on every geometry asked for."""

    number: str = "9"
    title: str = "Comparison across MoE models"
    paper: str = (
        "Against MoE^2 latency falls by 40.4 % (Switch-Base-8E) to 39.6 % (Mixtral-8x7B), the "
        "saving grows from 21 to 93 ms; quality retention stays above 99.2 %."
    )

    def measure(self, bench: Bench) -> Content:
        """Replays."""
        worlds = {}
        benches = {bench.world.name: bench}
        benches |= {m: bench.on(m) for m in bench.geometries if m != bench.world.name}
        for name, other in benches.items():
            arenas, left_out = {}, {}
            for arena, contenders in (("letter", letter()), ("pinned_best", pinned_best())):
                chosen = tuple(one for one in contenders if one.of in _RUN or one.lossless)
                kept, missing = other.there(chosen)
                left_out |= missing
                arenas[arena] = [named(one, replay_row(other.replayed(one))) for one in kept]
            described = other.world.described()
            worlds[name] = {"world": described, "arenas": arenas, "left_out": left_out}
        return figure_json(self, bench, {"worlds": worlds})

    def plot(self, content: Content, path: Path) -> None:
        """Latency by model, one row per arena."""
        worlds = content["worlds"]
        with picture(path, 2, len(worlds), size=(5 * len(worlds), 6.4)) as panels:
            for column, (name, world) in enumerate(worlds.items()):
                for row, (arena, rows) in enumerate(world["arenas"].items()):
                    bars(panels[row, column], rows, "delay_ms", "ms per token, without load")
                    panels[row, column].set_title(f"{name}, {_SHORT[arena]}", fontsize=9)

    def grids(self, content: Content) -> dict[str, Grid]:
        """Latency, traffic and charged loss by model and arena."""
        return {
            f"{name}, {_SHORT[arena]}": table(_COLUMNS, rows)
            for name, world in content["worlds"].items()
            for arena, rows in world["arenas"].items()
        }

    def findings(self, content: Content) -> list[str]:
        """Ours against MoE^2, the best lossless of others and our own, model by model."""
        found = []
        for name, world in content["worlds"].items():
            for arena, rows in world["arenas"].items():
                ours, masked = find(rows, "trimmoe"), find(rows, "moe2")
                assert ours is not None
                text = f"{name}, {_SHORT[arena]}: ours {ours['delay_ms']:.2f} ms"
                if masked is not None:
                    saved = masked["delay_ms"] - ours["delay_ms"]
                    less = percent(change(ours["delay_ms"], masked["delay_ms"]), signed=True)
                    text += f", {less} against MoE^2 ({saved:.2f} ms)"
                for own in (False, True):
                    best = fastest_lossless(rows, ours=own)
                    if best is not None:
                        less = percent(change(ours["delay_ms"], best["delay_ms"]), signed=True)
                        whose = "exact execution on our plan" if own else best["title"]
                        text += f", {less} against {whose}"
                kept = percent(1.0 - ours["charged_loss_per_token"])
                found.append(f"{text}; {kept} retained as charged, not measured.")
            found += world["left_out"].values()
        return found


_SHORT = {"letter": "as the paper ran it", "pinned_best": "pinned"}
_COLUMNS = (
    ("method", cell("title")),
    ("ms", cell("delay_ms", ".2f")),
    ("P99", cell("delay_p99_ms", ".1f")),
    ("MB/1000", cell("mb_per_1000_tokens", ".2f")),
    ("remote", share("remote_share")),
    ("charged", cell("charged_loss_per_token", ".4f")),
)
