"""`trimmoe models`: the families that are served, and what a model of one takes."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trimmoe.core.precision import Precision
from trimmoe.models.compiled.forms import FORMS
from trimmoe.models.from_config import ModelSizes, require_served, sizes_from_config
from trimmoe.models.general.catalogue import (
    COMPILED_TEXT_PARTS,
    ENCODER_DECODERS,
    FAST,
    SERVED,
    TEXT_PARTS,
    UNSERVED,
    keeps_states,
)
from trimmoe.placement.capacity import human_bytes

_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


def print_families(console: Console, *, every: bool) -> None:
    """List all families that are served; `every`: those that are not too, with the reason."""
    served = {
        **dict.fromkeys(FAST, "compiled"),
        **dict.fromkeys(SERVED, "its own modules"),
        **dict.fromkeys(FORMS, "compiled"),
        **dict.fromkeys(TEXT_PARTS, "its own modules, text alone"),
        **dict.fromkeys(COMPILED_TEXT_PARTS, "compiled, text alone"),
        **dict.fromkeys(ENCODER_DECODERS, "its own modules, encoder included"),
    }
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("family", "runs by", "attention keeps"):
        table.add_column(name, no_wrap=True)
    for family, how in sorted(served.items()):
        states = family not in ENCODER_DECODERS and keeps_states(family)
        table.add_row(family, how, "states, keys" if states else "keys")
    console.print(table)
    console.print(
        f"{len(served)} families have been shown to answer as transformers does, token for token. "
        "Others of transformers are tried by the same adapter.",
        highlight=False,
    )
    console.print(
        "A compiled step is that of float32, int8 and int4 on processors; elsewhere models run by "
        "their own modules.",
        highlight=False,
    )
    console.print(
        f"On processors all but {', '.join(ENCODER_DECODERS)} can be held in int8 and int4 "
        "(--quantise).",
        highlight=False,
    )
    if not every:
        console.print(f"`trimmoe models --all` says why {len(UNSERVED)} others are not served.")
        return
    for family, reason in sorted(UNSERVED.items()):
        console.print(f"{escape(family)} {escape(reason)}.", highlight=False)


def print_memory(config: Path, console: Console) -> None:
    """What the model that a config.json describes takes. Raises `UserError` if there is none, or
    it cannot be served."""
    require_served(config)
    sizes = sizes_from_config(config)
    spec = sizes.spec
    console.print(
        f"{escape(spec.name)} ({spec.family}): {spec.layer_count} MoE layers of "
        f"{spec.expert_count} experts, {spec.top_k} a token.",
        highlight=False,
    )
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("weights in", "each expert", "all experts", "dense part", "together"):
        table.add_column(name, justify="left" if name == "weights in" else "right", no_wrap=True)
    for name in _forms(sizes):
        expert, experts, dense = _in(sizes, name)
        table.add_row(name, *map(human_bytes, (expert, experts, dense, experts + dense)))
    console.print(table)
    state = f" and {human_bytes(sizes.state_bytes)} a sequence" if sizes.state_bytes else ""
    console.print(
        f"Every server holds the dense part; the experts are dealt out. Attention keeps "
        f"{human_bytes(sizes.kv_bytes_per_token)} a token{state}, in {sizes.dtype}.",
        highlight=False,
    )


def _forms(sizes: ModelSizes) -> list[str]:
    quantised = [one.value for one in (Precision.INT8, Precision.INT4)]
    return ["float32", "bfloat16", *([] if sizes.spec.family in ENCODER_DECODERS else quantised)]


def _in(sizes: ModelSizes, form: str) -> tuple[int, int, int]:
    """Bytes of one expert, of all, and of the dense part."""
    spec, own = sizes.spec, _WIDTHS[sizes.dtype]
    weights = (
        int(spec.expert_bytes[0, 0]) // own,
        spec.total_expert_bytes // own,
        spec.dense_bytes // own,
    )
    width = _WIDTHS.get(form, 0)
    precision = Precision.NONE if width else Precision(form)
    one, every, dense = (precision.size_bytes(count, width) for count in weights)
    return one, every, dense
