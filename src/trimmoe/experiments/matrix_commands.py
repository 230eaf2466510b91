"""`trimmoe experiment plan-matrix` as a command; everything heavy is imported inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plan_matrix(
    clusters: Annotated[
        list[str] | None, typer.Argument(help="Names or files; default: the matrix of six.")
    ] = None,
    *,
    profile: Annotated[Path, typer.Option("--profile", help="Of `embedded`.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for all that is made.")],
    method: Annotated[
        list[str] | None, typer.Option(help="Repeatable; default: exact, speculative and auto.")
    ] = None,
    streams: Annotated[
        list[int] | None, typer.Option(min=1, help="Repeatable; default: 1, 8 and 32.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of all methods, in turns.")] = 1,
    quantise: str = "int8",
    port_base: Annotated[int, typer.Option(min=1, max=65535)] = 8400,
) -> None:
    """Probe, plan, simulate and serve clusters: plans beside clocks, auto beside the best."""
    from rich.console import Console

    from trimmoe.experiments import plan_matrix as experiment

    asked = experiment.Matrix(
        profile=profile,
        folder=output,
        clusters=tuple(clusters or experiment.MATRIX),
        methods=tuple(method or experiment.METHODS),
        streams=tuple(streams or (1, 8, 32)),
        rounds=rounds,
        quantise=quantise,
        port_base=port_base,
    )
    experiment.show(asked, Console().print)
