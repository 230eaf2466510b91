"""Pictures: what a plan holds where, and what happened to the tokens in every layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from trimmoe.core.artifact import written_whole
from trimmoe.core.plan import Plan

# Okabe and Ito's palette, told apart by the colour-blind too; hatching tells the rest.
LAYER_LOOK = {
    "local_exact": ("#009E73", None),
    "local_substitute": ("#56B4E9", "//"),
    "remote_exact": ("#D55E00", None),
    "remote_substitute": ("#E69F00", "//"),
    "skipped": ("#CCCCCC", None),
    "exited": ("#FFFFFF", ".."),
    "local_stand_in": ("#009E73", "xx"),
    "remote_stand_in": ("#D55E00", "xx"),
}


def plot_plan(plan: Plan, path: Path) -> None:
    """Write `plan_picture` as a PNG, atomically. Raises `UserError` if the folder cannot be
    written."""
    figure = plan_picture(plan)
    with written_whole(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def plan_picture(plan: Plan) -> Figure:
    """The heat map of experts held per layer and server.

    Routes are drawn into the cells: a dot where the route of some access server with users runs
    the layer.
    """
    held = plan.hosts.sum(axis=2)
    servers, layers = held.shape
    figure = Figure(figsize=(2.0 + 0.28 * layers, 1.6 + 0.32 * servers), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    image = axes.imshow(held, aspect="auto", cmap="Blues", vmin=0, vmax=plan.hosts.shape[2])
    share = plan.cluster.access_share
    through = np.zeros((servers, layers))
    np.add.at(through, (plan.routes, np.arange(layers)[None, :]), share[:, None])
    server, layer = np.nonzero(through > 0)
    axes.scatter(layer, server, s=40 * through[server, layer] + 4, c="tab:orange", zorder=2)
    axes.set_yticks(range(servers), plan.cluster.server_names)
    axes.set_xlabel("MoE layer")
    axes.set_title(f"Experts held on {plan.cluster.name} (dots: where tokens run)")
    figure.colorbar(image, ax=axes, label="experts held")
    return figure


def plot_layers(path: Path, content: dict[str, Any]) -> None:
    """One panel per method: the share of tokens by what each layer did to them, as PNG."""
    rows = content["methods"]
    figure = Figure(figsize=(10, 2.1 * len(rows) + 0.8), layout="constrained")
    panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
    with mpl.rc_context({"hatch.linewidth": 0.5}):
        for panel, row in zip(panels, rows, strict=True):
            _draw_layers(panel, row)
    panels[-1].set_xlabel("MoE layer")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=6, loc="outside lower center", frameon=False)
    with written_whole(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130)


def _draw_layers(panel: Any, row: dict[str, Any]) -> None:
    kinds = np.array(row["kinds_by_layer"], dtype=float)
    share = kinds / kinds.sum(1, keepdims=True)
    layers, bottom = np.arange(1, len(share) + 1), np.zeros(len(share))
    for name, part in zip(row["kind_names"], share.T, strict=True):
        colour, hatch = LAYER_LOOK[name]
        panel.bar(
            layers,
            part,
            bottom=bottom,
            color=colour,
            hatch=hatch,
            edgecolor="#555555",
            linewidth=0.3,
            width=0.92,
            label=name.replace("_", " "),
        )
        bottom += part
    panel.set(ylim=(0, 1), xlim=(0.4, len(share) + 0.6), ylabel="share of tokens")
    panel.set_title(
        f"{row['title']}: {row['delay_per_token_ms']:.1f} ms and {row['hops_per_token']:.1f} hops "
        f"per token, {row['agreement']:.1%} agree with the exact model",
        fontsize=10,
        loc="left",
    )


LOAD_PANELS = (
    ("ms per token", (("token_p50_ms", "median"), ("token_ms", "mean"), ("token_p99_ms", "p99"))),
    ("ms to the first token", (("first_token_ms", "mean"), ("first_token_p99_ms", "p99"))),
    ("tokens per second", (("tokens_per_s", "all users"),)),
    ("share of the time at work", (("server_use_max", "server"), ("link_use_max", "link"))),
)
"""Titles of the panels of `load_picture`, and the figures in each."""
_COLOURS = ("#56B4E9", "#0072B2", "#D55E00")


def load_picture(content: dict[str, Any]) -> Figure:
    """What `simulation_json` says of each method under load: delays, throughput, and what the
    busiest server and link do."""
    rows = content["methods"]
    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    for panel, (title, shown) in zip(figure.subplots(2, 2).flat, LOAD_PANELS, strict=True):
        _draw_load(panel, title, shown, rows)
    load = content["settings"]["load"]
    asked = (
        f"{load['concurrency']} requests at a time"
        if load["rate_per_s"] is None
        else f"{load['rate_per_s']:g} requests a second"
    )
    figure.suptitle(f"{asked} on {content['cluster']}, on a virtual clock")
    return figure


def _draw_load(
    panel: Any, title: str, shown: tuple[tuple[str, str], ...], rows: list[dict[str, Any]]
) -> None:
    at, width = np.arange(len(rows)), 0.8 / len(shown)
    for place, (key, label) in enumerate(shown):
        values = [row["figures"][key]["mean"] for row in rows]
        left = at - 0.4 + (place + 0.5) * width
        panel.bar(left, values, width, label=label, color=_COLOURS[place])
    panel.set_xticks(at, [row["method"] for row in rows])
    panel.set_title(title, fontsize=10, loc="left")
    if len(shown) > 1:
        panel.legend(frameon=False, fontsize=8)


def write_picture(figure: Figure, path: Path) -> None:
    """Write a PNG, atomically. Raises `UserError` if the folder cannot be written."""
    with written_whole(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
