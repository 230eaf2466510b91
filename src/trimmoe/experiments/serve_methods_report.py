"""Methods on real servers beside one another: JSON, table and picture."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

import trimmoe
from trimmoe.core.profile import Profile
from trimmoe.experiments.figures.draw import bars, picture
from trimmoe.experiments.serve_methods import Kept, MethodsLoad
from trimmoe.runtime.launch.config import ServeConfig

_OURS = ("trimmoe", "trimming", "lossless", "speculative", "guessing", "final-exits", "exact")


def methods_json(
    rows: Sequence[dict[str, Any]],
    config: ServeConfig,
    profile: Profile,
    plans: Mapping[str, Kept],
    load: MethodsLoad,
    *,
    text_hash: str,
) -> dict[str, Any]:
    """Everything measured, with all that is needed to repeat it; `plans` by method."""
    one = next(iter(plans.values())).plan
    hashes = {name: kept.plan.hash for name, kept in plans.items()}
    return {
        "trimmoe_version": trimmoe.__version__,
        "configuration": {
            **config.model_dump(mode="json", exclude={"api_keys"}),
            "requests": len(load.prompts),
            "prompt_tokens": len(load.prompts[0]),
            "output_tokens": load.output_tokens,
            "streams": load.streams,
            "cores": os.cpu_count(),
        },
        "seed": load.seed,
        "input_hashes": {
            "model": profile.model_hash,
            "profile": profile.hash,
            "plans": hashes,
            "text": text_hash,
        },
        "cluster": one.cluster.name,
        "methods": list(rows),
    }


def methods_table(content: dict[str, Any]) -> Table:
    """One line per method that ran."""
    asked = content["configuration"]
    table = Table(
        title=f"{asked['requests']} requests, {asked['prompt_tokens']} + "
        f"{asked['output_tokens']} tokens, "
        f"on {content['cluster']}, {asked['streams']} at a time at each server",
        caption="Client's clock. ms: per token; msg: messages per token; flips: tokens that the "
        "exact model would not have given; equal: answers that are the exact model's",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("method", no_wrap=True)
    for heading in ("ttft", "p99", "ms", "p99", "tok/s", "msg", "skip", "exit", "flips", "equal"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in content["methods"]:
        if "refused" not in row:
            table.add_row(row["title"], *_cells(row))
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['mean_ttft_ms']:.0f}",
        f"{row['p99_ttft_ms']:.0f}",
        f"{row['mean_tpot_ms']:.1f}",
        f"{row['p99_tpot_ms']:.1f}",
        f"{row['output_throughput']:.1f}",
        f"{row['messages_per_token']:.1f}",
        f"{row['skipped_share']:.0%}",
        f"{row['exited_share']:.0%}",
        f"{row['flip_rate']:.1%}",
        f"{row['equal_answers']}/{row['answers']}",
    ]


def refusals(content: dict[str, Any]) -> list[str]:
    """A line for every method that did not run."""
    return [f"{row['title']}: {row['refused']}" for row in content["methods"] if "refused" in row]


def draw_methods(path: Path, content: dict[str, Any]) -> None:
    """Times, messages and flips as bars, as PNG; lossless methods of ours in colour too."""
    rows = [
        row | {"of": "trimmoe" if row["method"] in _OURS else "others"}
        for row in content["methods"]
        if "refused" not in row
    ]
    if not rows:
        return
    height = 1.2 + 0.28 * len(rows)
    with picture(path, 2, 2, size=(12.0, 2 * height)) as panels:
        bars(panels[0, 0], rows, "mean_tpot_ms", "ms per output token")
        bars(panels[0, 1], rows, "mean_ttft_ms", "ms to the first token")
        bars(panels[1, 0], rows, "messages_per_token", "messages per token")
        bars(panels[1, 1], rows, "flip_rate", "share of tokens that flip")
