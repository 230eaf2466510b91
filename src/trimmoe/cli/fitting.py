"""The command that fits a draft head to a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from trimmoe.cli.options import Device, Model, Output, Texts, console, require_folder
from trimmoe.experiments.opening import resolved
from trimmoe.progress import Bars


def draft_head(
    model: Model,
    text: Texts,
    output: Output,
    minutes: Annotated[float, typer.Option(min=0.01, help="Of training.")] = 10.0,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Of training, in place of minutes: the same on every machine."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=4000, help="Of text to learn from.")] = 2_000_000,
    sequences: Annotated[
        int, typer.Option(min=64, help="Of what the model goes on with, to learn from.")
    ] = 4096,
    seed: int = 0,
    device: Device = "auto",
) -> None:
    """Fit a draft head, which guesses on from a model's states: servers guess faster with it.

    It learns from the whole model in transformers, which has to fit into the device's memory. An
    accelerator does in minutes what a processor does in hours.
    """
    import torch

    from trimmoe.calibrate.draft_head import FitSettings, Taught, fit_draft_head, open_taught
    from trimmoe.calibrate.text import read_texts, token_windows
    from trimmoe.models.draft_head import FILE
    from trimmoe.models.draft_head_file import save_draft_head
    from trimmoe.models.load import known_device, load_tokenizer, model_spec

    require_folder(output)
    path = resolved(model)
    settings = FitSettings(minutes=minutes, steps=steps, sequences=sequences, seed=seed)
    settings = settings.within(model_spec(path).context_length)
    length = settings.prompt + settings.going_on
    windows = token_windows(
        read_texts(text), load_tokenizer(path), tokens=tokens, window=length, seed=seed
    )
    taught: Taught = open_taught(Path(path), known_device(device))
    with Bars() as bars:
        task = bars.add_task("draft head", total=1.0)
        head = fit_draft_head(
            taught,
            torch.from_numpy(windows),
            settings,
            lambda doing, done: bars.update(task, description=doing, completed=done),
        )
    save_draft_head(head, output)
    shares = ", ".join(f"{share:.0%}" for share in head.right)
    console.print(
        f"Wrote {escape(str(output))}. On held-out text so many drafts of a chain are right where "
        f"those before them were: {shares}. Servers use it as {FILE} in the model's folder, or "
        "with --draft-head."
    )
