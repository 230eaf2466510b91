"""The metrics as Prometheus checks them, and the dashboard's queries against them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from trimmoe.api.metrics import ApiMetrics, Measured
from trimmoe.core.ledger import Ledger
from trimmoe.runtime.counters import ExpertUse
from trimmoe.runtime.service import LinkStats, ServedModel, ServiceStats

DASHBOARD = Path(__file__).parent.parent / "deploy" / "grafana" / "trimmoe.json"
SCRAPED = {"instance", "job"}
"""Labels that Prometheus adds."""


class Service:
    """One that has had a request."""

    model = ServedModel(id="m", tokenizer=None, context_length=1, vocab_size=1, created=1)

    def stats(self) -> ServiceStats:
        link = LinkStats(source="a", destination="b", size_bytes=1, round_trip_s=1.0)
        used = np.ones((1, 1, len(ExpertUse)), dtype=np.int64)
        return ServiceStats(
            running=1, waiting=0, kv_cache_usage=0.5, links=(link,), expert_executions=used
        )


@cache
def exposition() -> str:
    """All that a server exports."""
    service: Any = Service()
    metrics, measured = ApiMetrics(service), Measured(prompt_tokens=3, started_s=0.0)
    ledger = replace(Ledger.empty(1, 1, 4), loss=0.1, budget=0.2)
    for now_s in (1.0, 2.0):
        metrics.token(measured, now_s, ledger)
    metrics.end(measured, 3.0, "stop")
    return metrics.exposition().decode()


@cache
def exported() -> dict[str, set[str]]:
    """The labels of each series."""
    made: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(exposition()):
        for sample in family.samples:
            made.setdefault(sample.name, set()).update(sample.labels)
    return made


def panels() -> list[Any]:
    return [each for each in json.loads(DASHBOARD.read_text())["panels"] if each["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    """Every panel's, with its title."""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def promtool(*arguments: str, told: str) -> str:
    """What it says of what it is told; fails if it finds fault, skips where it is not there."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("there is no promtool here; Debian's package `prometheus` has it")
    done = subprocess.run(
        [found, *arguments], input=told, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_prometheus_finds_no_fault_with_the_metrics() -> None:
    assert promtool("check", "metrics", told=exposition()) == ""


def test_names_are_those_that_prometheus_asks_for_without_it_too() -> None:
    for family in text_string_to_metric_families(exposition()):
        assert re.fullmatch(r"trimmoe_[a-z0-9_]+", family.name)
        assert family.documentation or family.name.endswith("_created")


def test_every_query_asks_for_what_servers_export() -> None:
    asked = list(queries())
    assert len(asked) > 20
    for title, query in asked:
        named = re.findall(r"(trimmoe_\w+)(?:\{([^}]*)\})?", query)
        assert named, title
        for name, selector in named:
            assert name in exported(), f"{title}: {name}"
            labels = {part.partition("=")[0].strip(" !~") for part in selector.split(",")}
            assert labels - {""} <= exported()[name] | SCRAPED, title
            for by in re.findall(r"by \(([^)]*)\)", query):
                assert set(by.split(", ")) <= exported()[name] | SCRAPED, title


def test_every_counter_and_every_time_has_its_panel() -> None:
    """What is exported and shown nowhere would not be missed if it broke."""
    shown = " ".join(query for _, query in queries())
    for name in exported():
        if not name.endswith(("_created", "_sum", "_count")):
            assert name in shown


def test_prometheus_understands_every_query(tmp_path: Path) -> None:
    variables = {"$__rate_interval": "1m", "$model": ".*", "$instance": ".*"}
    rules = []
    for at, (_, query) in enumerate(queries()):
        for name, value in variables.items():
            query = query.replace(name, value)
        assert "$" not in query
        rules.append({"record": f"panel:query:{at}", "expr": query})
    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", "--lint=none", str(file), told="")


def test_panels_do_not_lie_on_one_another() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        spot = panel["gridPos"]
        cells = {(spot["x"] + x, spot["y"] + y) for x in range(spot["w"]) for y in range(spot["h"])}
        assert not cells & taken, panel["title"]
        assert spot["x"] + spot["w"] <= 24
        taken |= cells
