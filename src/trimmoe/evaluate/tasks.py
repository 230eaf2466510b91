"""Tasks of the lm-evaluation-harness, over the hub's data or over local files.

A local task is the harness' own definition, prompt, filters and measures, with only the data
replaced; SQuAD v1.1, which the harness lacks, is defined in `squad.yaml` beside this file.
Importing this module needs the harness, see `trimmoe.evaluate.optional`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
import yaml
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from trimmoe.core.errors import UserError
from trimmoe.evaluate.local_data import Document, LocalData

_HARNESS = Path(lm_eval.tasks.__path__[0])
_DEFINITIONS = {
    "wikitext": _HARNESS / "wikitext" / "wikitext.yaml",
    "gsm8k": _HARNESS / "gsm8k" / "gsm8k.yaml",
    "squad": Path(__file__).with_name("squad.yaml"),
}


def local_task(data: LocalData) -> Task:
    """The task over local documents; nothing is fetched."""
    with tempfile.TemporaryDirectory(prefix="trimmoe-") as name:
        folder = Path(name)
        files = {"test": _write(folder / "test.jsonl", data.documents)}
        if data.shots:
            files["shots"] = _write(folder / "shots.jsonl", data.shots)
        config = {
            "include": str(_DEFINITIONS[data.name]),
            "task": data.name,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {
                "data_files": files,
                "cache_dir": str(folder / "cache"),
                "keep_in_memory": True,
            },
            "training_split": None,
            "validation_split": None,
            "test_split": "test",
            "fewshot_split": "shots" if data.shots else "test",
        }
        (folder / "task.yaml").write_text(yaml.safe_dump(config))
        datasets.disable_progress_bars()
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        return manager.load([data.name])["tasks"][data.name]


def hub_tasks(names: Sequence[str]) -> dict[str, Task]:
    """The harness' own tasks by name, groups taken apart. Raises `UserError`."""
    manager = TaskManager()
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown:
        raise UserError(
            f"The lm-evaluation-harness has no task `{unknown[0]}`; `lm_eval ls tasks` lists them."
        )
    try:
        return manager.load(list(names))["tasks"]
    except Exception as error:  # The hub's client and data sets raise many kinds.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"Cannot fetch the data of {', '.join(names)} ({reason}); check the network, or give "
            "--data with local files."
        ) from error


def prepare(task: Any, *, num_fewshot: int | None, max_gen_toks: int | None, seed: int) -> None:
    """Settle what the harness' command line settles before it evaluates a task."""
    if num_fewshot is not None:
        task.set_config(key="num_fewshot", value=num_fewshot)
    elif task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    if max_gen_toks is not None and task.OUTPUT_TYPE == "generate_until":
        options = {"max_gen_toks": max_gen_toks}
        task.set_config(key="generation_kwargs", value=options, update=True)
    task.set_fewshot_seed(seed=seed)


def reference_answers(task: Any) -> list[tuple[str, str]]:
    """(prompt, worked answer) of what the task has asked to be generated, once per document."""
    pairs: dict[Any, tuple[str, str]] = {}
    for instance in task.instances:
        if instance.request_type != "generate_until" or instance.doc_id in pairs:
            continue
        target = task.doc_to_target(instance.doc)
        target = target[0] if isinstance(target, list) and target else target
        if isinstance(target, str) and target:
            delimiter = task.config.target_delimiter
            between = "" if target.startswith((" ", "\n")) else delimiter
            pairs[instance.doc_id] = (instance.args[0], between + target)
    return list(pairs.values())


def _write(path: Path, documents: Sequence[Document]) -> str:
    lines = (json.dumps(document, ensure_ascii=False) for document in documents)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)
