"""Commands that show and write what comes with the package: clusters, sample-text.

Everything heavy is imported inside the command that needs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from trimmoe.cli.options import Output, console, require_folder
from trimmoe.core.errors import UserError
from trimmoe.core.sample_clusters import sample_names, sample_path, sample_summary


def clusters(
    name: Annotated[
        str | None, typer.Argument(help="Show this sample's file.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write it to this file instead, so that you can change it."
        ),
    ] = None,
) -> None:
    """List the sample clusters, whose names do wherever a cluster file is asked for."""
    if name is None:
        if output is not None:
            raise UserError("Say which sample to write, e.g. `trimmoe clusters home3 -o my.yaml`.")
        console.print(_listing())
        return
    if name not in sample_names():
        raise UserError(f"There is no sample `{name}`; choose from {', '.join(sample_names())}.")
    text = sample_path(name).read_text(encoding="utf-8")
    if output is None:
        print(text, end="")
        return
    from trimmoe.core.artifact import written_whole

    require_folder(output)
    with written_whole(output) as temporary:
        temporary.write_text(text, encoding="utf-8")
    console.print(f"Wrote {escape(str(output))}.")


def _listing() -> Table:
    from trimmoe.core.cluster_file import load_cluster

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), width=min(console.width, 80))
    table.add_column("name", no_wrap=True)
    table.add_column("servers", justify="right")
    table.add_column("what it is")
    for name in sample_names():
        servers = load_cluster(sample_path(name)).server_count
        table.add_row(name, str(servers), escape(sample_summary(name)))
    return table


def sample_text(
    output: Output,
    part: Annotated[Literal["calibration", "held-out"], typer.Option()] = "calibration",
) -> None:
    """Write English prose that every Python carries: a text to try things with."""
    from trimmoe.experiments.sample_text import write_sample_text

    require_folder(output)
    write_sample_text(output, part)
    console.print(f"Wrote {escape(str(output))}.")
