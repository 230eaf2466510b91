"""What several commands share: options, and opening what they name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from trimmoe.core.errors import UserError
from trimmoe.core.precision import Precision

console = Console()

Model = Annotated[
    str,
    typer.Argument(
        help="A checkpoint folder, hub id or GGUF file, or `embedded` for the model that ships."
    ),
]
ModelOption = Annotated[
    str, typer.Option("--model", help="A checkpoint folder, hub id or GGUF file, or `embedded`.")
]
Texts = Annotated[
    list[Path],
    typer.Option("--text", help="UTF-8 text or .jsonl[.gz] with a `text` field; repeatable."),
]
ProfileOption = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        help="Made by `trimmoe calibrate`; default: what comes with the embedded model.",
    ),
]
PlanOption = Annotated[Path, typer.Option("--plan", help="Made by `trimmoe plan`.")]
CLUSTER_HELP = "A cluster file, or the name of a sample: see `trimmoe clusters`."
Output = Annotated[Path, typer.Option("--output", "-o", help="Where to write the result.")]
DraftHead = Annotated[
    str | None,
    typer.Option(
        "--draft-head",
        help=(
            "Guesses on from the model's states: `auto`, `mtp` for the checkpoint's own layer, "
            "`none` or a file; default: auto."
        ),
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        help="A small model of the same vocabulary that guesses too: folder, hub id or GGUF file.",
    ),
]
Budget = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Flip rate a generated token may lose on average.")
]
GivenBudget = Annotated[
    float | None,
    typer.Option(
        "--budget",
        min=0.0,
        max=1.0,
        help="Flip rate a token may lose on average; default: none under `auto`, else 0.02.",
    ),
]
Confidence = Annotated[
    float, typer.Option(min=0.0, help="Confidence an early exit needs; above 1 nothing exits.")
]
Device = Annotated[str, typer.Option(help="Where the model runs, e.g. `cpu` or `cuda`.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16"],
    typer.Option(help="Arithmetic; `auto`: float32 on a CPU, the checkpoint's own elsewhere."),
]
Quantise = Annotated[
    Precision,
    typer.Option("--quantise", help="Keep weights in few bits; only in float32 on a CPU."),
]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        envvar="TRIMMOE_API_KEY", help="Key that opens the API; repeatable; default: none."
    ),
]
TlsCertificate = Annotated[
    Path | None,
    typer.Option(help="PEM file to serve HTTPS with: the certificate and its chain."),
]
TlsKey = Annotated[Path | None, typer.Option(help="PEM file of the certificate's key.")]
ScoringOption = Annotated[
    Literal["layers", "steps"],
    typer.Option(
        "--scoring",
        help="Known text by layers, all at once, or token by token; only rounding differs.",
    ),
]


def require_folder(path: Path) -> None:
    """Refuse before an hour's work what could not be written after it."""
    if not path.parent.is_dir():
        raise UserError(f"The folder {path.parent} does not exist; create it or write elsewhere.")
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file to write.")


def say(line: str) -> None:
    """Print one line as it is."""
    console.print(escape(line), highlight=False, soft_wrap=True)


def show_dry_run(
    config: Path | None, cluster: Path, more: Path | None, precision: Precision
) -> None:
    """`trimmoe plan --dry-run`; raises `UserError` if the arguments are those of a plan."""
    if config is None or more is not None:
        raise UserError("A dry run is `trimmoe plan --dry-run --config config.json CLUSTER`.")
    from trimmoe.experiments.dry_run import print_dry_run

    print_dry_run(config, cluster, console, precision)
