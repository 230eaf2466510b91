"""The command that lists what is served: models.

Everything heavy is imported inside the command that needs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimmoe.cli.options import console


def models(
    config: Annotated[
        Path | None,
        typer.Argument(help="Show what the model of this config.json takes.", show_default=False),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Say why other families are not served.")
    ] = False,
) -> None:
    """List the families that are served, or the memory that a model takes."""
    from trimmoe.experiments.known_models import print_families, print_memory

    if config is None:
        print_families(console, every=every)
    else:
        print_memory(config / "config.json" if config.is_dir() else config, console)
