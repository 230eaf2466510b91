"""What `trimmoe evaluate` is asked for, checked before anything heavy is imported or opened."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from trimmoe.core.errors import UserError
from trimmoe.evaluate.local_data import LocalData, input_hashes, local_data
from trimmoe.evaluate.optional import require_harness
from trimmoe.experiments.evaluate_settings import EvaluateSettings
from trimmoe.experiments.methods import find_method


def evaluation(
    names: Sequence[str],
    folder: Path | None,
    settings: EvaluateSettings,
    console: Console,
    *,
    model: str,
    profile: Path,
    plan: Path,
    dtype: str,
    device: str,
) -> dict[str, Any]:
    """Evaluate tasks by name, over the files in `folder` or the hub's; prints a table.

    Raises `UserError` for what cannot be evaluated, before the model is opened where possible.
    """
    require_harness()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # It warns of its own definitions.
    if not names:
        raise UserError("There is no task to evaluate; name some with --tasks.")
    for name in settings.methods:
        find_method(name)
    data = [] if folder is None else _local(names, folder, settings)

    from trimmoe.evaluate.tasks import hub_tasks, local_task
    from trimmoe.experiments import evaluate as experiment
    from trimmoe.experiments.subject import open_subject

    tasks = {one.name: local_task(one) for one in data} if data else hub_tasks(names)
    subject = open_subject(model, profile, plan, dtype=dtype, device=device)
    results = list(experiment.evaluate_tasks(subject, tasks, settings))
    content = experiment.evaluation_json(settings, subject, results, input_hashes(data))
    experiment.print_evaluation(console, content)
    return content


def _local(names: Sequence[str], folder: Path, settings: EvaluateSettings) -> list[LocalData]:
    return [
        local_data(name, folder, limit=settings.limit, seed=settings.seed)
        for name in dict.fromkeys(names)
    ]
