"""The command line: `trimmoe --help` lists the commands.

Everything heavy is imported inside the command that needs it, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

import trimmoe
from trimmoe.cli import (
    chat,
    failing,
    fitting,
    measure,
    models,
    planning,
    prepare,
    samples,
    serving,
    serving_here,
)
from trimmoe.core.errors import UserError
from trimmoe.experiments.commands import app as experiments
from trimmoe.experiments.serve_commands import app as bench
from trimmoe.experiments.simulation_commands import record, simulate

# Before torch starts: large tensors in large pages. Where a page fault is dear, as in virtual
# machines, this alone doubles the speed of calibration.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

app = typer.Typer(
    help="Serve Mixture-of-Experts models across unequal machines, skipping needless hops.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
COMMANDS = (
    prepare.fetch,
    models.models,
    samples.clusters,
    samples.sample_text,
    prepare.calibrate,
    fitting.draft_head,
    planning.plan,
    prepare.probe,
    prepare.tune,
    record,
    measure.generate,
    measure.compare,
    measure.evaluate,
    simulate,
    serving.serve,
    chat.chat,
    chat.demo,
    serving_here.serve_local,
    serving.stop,
    failing.gateway,
    failing.chaos,
)


def _tell_version(asked: bool) -> None:
    if asked:
        print(f"trimmoe {trimmoe.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_tell_version, is_eager=True),
    ] = False,
) -> None:
    pass


for command in COMMANDS:
    app.command(command.__name__.replace("_", "-"))(command)
app.add_typer(experiments, name="experiment")
app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command line; a user's mistake is one sentence and exit code 2."""
    try:
        app(standalone_mode=True)
    except UserError as error:
        Console(stderr=True).print(f"trimmoe: {escape(str(error))}", style="red", soft_wrap=True)
        sys.exit(2)
