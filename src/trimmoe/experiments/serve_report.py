"""The result of `trimmoe bench serve`, as a table and as the JSON that vLLM's tool writes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trimmoe.core.artifact import written_whole
from trimmoe.experiments.serve_bench import CHAT_SUFFIX, METRICS, Load

_TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "whole request",
}


def result_json(
    load: Load, figures: dict[str, Any], *, date: str, tokenizer_id: str | None = None
) -> dict[str, Any]:
    """The figures with what was asked, under vLLM's names; `date` as YYYYMMDD-HHMMSS."""
    return {
        "date": date,
        "backend": "openai-chat" if load.endpoint.endswith(CHAT_SUFFIX) else "openai",
        "model_id": load.model,
        "tokenizer_id": tokenizer_id,
        "num_prompts": len(load.prompts),
        "request_rate": "inf" if math.isinf(load.request_rate) else load.request_rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
        **figures,
    }


def save_result(path: Path, content: dict[str, Any]) -> None:
    """Write the JSON, whole or not at all."""
    with written_whole(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n")


def print_result(
    console: Console,
    content: dict[str, Any],
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
) -> None:
    """Throughput in a line or two, latencies in a table."""
    failed = f", [red]{content['failed']} failed[/red]" if content["failed"] else ""
    console.print(
        f"{content['completed']} requests in {content['duration']:.2f} s{failed}: "
        f"{content['request_throughput']:.2f} requests/s, "
        f"{content['output_throughput']:.1f} output tokens/s, "
        f"{content['total_token_throughput']:.1f} tokens/s"
    )
    if content["request_goodput"] is not None:
        console.print(f"Goodput: {content['request_goodput']:.2f} requests/s")
    columns = ["mean", "median", "std", *(f"p{value:g}" for value in percentiles)]
    table = Table("ms", *columns)
    for name in METRICS:
        if name in metrics:
            values = [f"{content[f'{column}_{name}_ms']:.1f}" for column in columns]
            table.add_row(_TITLES[name], *values)
    console.print(table)
