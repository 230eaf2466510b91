"""`trimmoe plan --dry-run`: what a model takes and what fits where, from config.json alone."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trimmoe.core.cluster_file import load_cluster
from trimmoe.core.specs import ClusterSpec
from trimmoe.models.from_config import ModelSizes, sizes_from_config
from trimmoe.placement.capacity import human_bytes
from trimmoe.placement.dry_run import Fit, dry_run

RESERVED_TOKENS = 8192
"""Positions of KV cache that a server keeps room for in a dry run."""


def print_dry_run(config: Path, cluster: Path, console: Console) -> None:
    """Print sizes and fit; raises `UserError` for a file that cannot be read."""
    sizes, machines = sizes_from_config(config), load_cluster(cluster)
    reserve = RESERVED_TOKENS * sizes.kv_bytes_per_token
    fit = dry_run(
        machines, sizes.spec, extra_bytes=sizes.encoder_expert_bytes, kv_reserve_bytes=reserve
    )
    for line in _sizes(sizes):
        console.print(line, highlight=False)
    console.print(_table(machines, sizes, fit))
    console.print(escape(_verdict(machines, sizes, fit)), highlight=False)


def _sizes(sizes: ModelSizes) -> list[str]:
    spec = sizes.spec
    lines = [
        f"{escape(spec.name)} ({spec.family}, {sizes.dtype}): {human_bytes(sizes.stored_bytes)} of "
        "weights, on disk and to fetch.",
        f"{spec.layer_count} MoE layers of {spec.expert_count} experts, {spec.top_k} a token: "
        f"{human_bytes(spec.total_expert_bytes)} of experts, "
        f"{human_bytes(int(spec.expert_bytes[0, 0]))} each.",
        f"Dense part, on every server: {human_bytes(spec.dense_bytes)}; KV cache: "
        f"{human_bytes(sizes.kv_bytes_per_token)} per position, {RESERVED_TOKENS} positions kept "
        "free below.",
    ]
    if sizes.encoder_expert_bytes:
        lines.append(
            f"The encoder's experts, {human_bytes(sizes.encoder_expert_bytes)}, are not placed but "
            "held beside the dense part; a model with an encoder runs in one process only."
        )
    if sizes.dtype != "float32":
        lines.append(
            "On a CPU the default is float32, where everything takes twice this; "
            f"--dtype {sizes.dtype} keeps the sizes shown."
        )
    return lines


def _table(cluster: ClusterSpec, sizes: ModelSizes, fit: Fit) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("server", no_wrap=True)
    for name in ("memory", "for experts", "experts", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    total = sizes.spec.expert_bytes.size
    for index, name in enumerate(cluster.server_names):
        table.add_row(
            escape(name),
            human_bytes(int(cluster.memory_bytes[index])),
            human_bytes(int(fit.room_bytes[index])) if fit.holds_dense[index] else "dense too big",
            str(fit.experts[index]),
            f"{fit.experts[index] / total:.0%}",
        )
    return table


def _verdict(cluster: ClusterSpec, sizes: ModelSizes, fit: Fit) -> str:
    name = sizes.spec.name
    if fit.refusal is not None:
        verdict = f"It does not fit. {fit.refusal}"
    else:
        verdict = f"It fits: room for {fit.copies:.2f} copies of the experts of {name}."
        whole = [
            each for each, all_of_it in zip(cluster.server_names, fit.holds_all, strict=True)
            if all_of_it
        ]  # fmt: skip
        alone = f"{', '.join(whole)} would hold it alone." if whole else "No server holds it alone."
        verdict = f"{verdict} {alone}"
    if cluster.memory_ratio is not None:
        verdict += (
            f" (With its memory_ratio of {cluster.memory_ratio:g} the cluster {cluster.name} would "
            "be scaled to the model; shown is its memory as given.)"
        )
    return verdict
