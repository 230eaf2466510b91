"""`trimmoe plan --dry-run`: what a model takes and what fits where, from config.json alone."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trimmoe.core.cluster_file import load_cluster
from trimmoe.core.precision import Precision
from trimmoe.core.specs import ClusterSpec
from trimmoe.experiments.expectation import READ_SHARE, expected_decoding
from trimmoe.models.from_config import ModelSizes, require_served, sizes_from_config
from trimmoe.models.general.catalogue import ENCODER_DECODERS
from trimmoe.placement.capacity import human_bytes
from trimmoe.placement.dry_run import Fit, dry_run

RESERVED_TOKENS = 8192
"""Positions of KV cache that a server keeps room for in a dry run."""


def print_dry_run(
    config: Path, cluster: Path, console: Console, precision: Precision = Precision.NONE
) -> None:
    """Print sizes, fit and what to expect; raises `UserError` for a file that cannot be read, and
    for a model that cannot be served."""
    require_served(config)
    sizes, machines = sizes_from_config(config, precision), load_cluster(cluster)
    reserve = sizes.cache_bytes(RESERVED_TOKENS)
    fit = dry_run(machines, sizes.spec, kv_reserve_bytes=reserve)
    for line in _sizes(sizes):
        console.print(line, highlight=False)
    console.print(_table(machines, sizes, fit))
    console.print(escape(_verdict(machines, sizes, fit)), highlight=False)
    if fit.refusal is None:
        console.print(escape(_expectation(machines, sizes, reserve)), highlight=False)


def _sizes(sizes: ModelSizes) -> list[str]:
    spec = sizes.spec
    held = sizes.dtype if sizes.precision is Precision.NONE else str(sizes.precision)
    lines = [
        f"{escape(spec.name)} ({spec.family}, {sizes.dtype}): {human_bytes(sizes.stored_bytes)} of "
        "weights, on disk and to fetch.",
        f"{sizes.parameters / 1e9:.2f} billion parameters, {sizes.active_parameters / 1e9:.2f} "
        f"active; as {held} all of it takes "
        f"{human_bytes(spec.dense_bytes + spec.total_expert_bytes)}.",
        f"{spec.layer_count} MoE layers of {spec.expert_count} experts, {spec.top_k} a token: "
        f"{human_bytes(spec.total_expert_bytes)} of experts, "
        f"{human_bytes(int(spec.expert_bytes[0, 0]))} each.",
        f"Dense part, on every server: {human_bytes(spec.dense_bytes)}; {_cache(sizes)}, "
        f"{RESERVED_TOKENS} positions kept free below.",
    ]
    return lines + _remarks(sizes)


def _cache(sizes: ModelSizes) -> str:
    parts = [f"KV cache: {human_bytes(sizes.kv_bytes_per_token)} per position"]
    if sizes.kept.windowed:
        share = sizes.kept.windowed / (sizes.kept.windowed + sizes.kept.per_position)
        parts.append(f"{share:.0%} of it for {sizes.kept.window} positions only")
    if sizes.state_bytes:
        parts.append(f"recurrent states: {human_bytes(sizes.state_bytes)} per sequence")
    return ", ".join(parts)


def _remarks(sizes: ModelSizes) -> list[str]:
    lines: list[str] = []
    if sizes.encoder_expert_bytes:
        lines.append(
            f"The encoder's experts, {human_bytes(sizes.encoder_expert_bytes)}, are in the dense "
            "part: the encoder runs on the server that a user asks, and is not spread over others."
        )
    if not sizes.stored_is_known:
        lines.append(
            f"How much the quantisation {escape(sizes.stored_as)} takes on disk is not known; "
            f"shown is {sizes.dtype}."
        )
    elif sizes.stored_as != sizes.dtype:
        lines.append(f"On disk it is {escape(sizes.stored_as)}; it is decoded as it is read.")
    if sizes.precision is not Precision.NONE:
        lines.append("Only processors serve quantised weights (--quantise) so far.")
        if sizes.spec.family in ENCODER_DECODERS:
            lines.append("Models with an encoder are not served quantised so far.")
    elif sizes.dtype != "float32":
        lines.append(
            "On a CPU the default is float32, where everything takes twice this; "
            f"--dtype {sizes.dtype} keeps the sizes shown."
        )
    return lines


def _expectation(cluster: ClusterSpec, sizes: ModelSizes, reserve: int) -> str:
    if cluster.read_bytes_per_s is None:
        return (
            "What speed to expect is said where every server of the cluster file has a gb_per_s, "
            "how fast it reads its memory."
        )
    if sizes.encoder_expert_bytes:
        return "What speed to expect is not said for models with an encoder."
    held = sizes.spec.dense_bytes + sizes.spec.total_expert_bytes
    found = expected_decoding(
        cluster,
        sizes.spec,
        bytes_per_parameter=held / sizes.parameters,
        kv_reserve_bytes=reserve,
    )
    return (
        f"Expected: {found.tokens_per_s:.1f} tokens a second for one sequence, exact and without "
        f"guesses. That is the cost model's figure for memory read at {READ_SHARE:.0%} of its "
        "nominal speed and routing drawn at random; nobody has run it."
    )


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
