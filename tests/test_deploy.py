"""The files that others' tools read: compose, workflows, the Dockerfile. None of them can run here;
what they call has to exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from trimmoe import cli

ROOT = Path(__file__).parents[1]
COMPOSE = ROOT / "deploy" / "compose.yaml"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SCHEMAS = {COMPOSE: "compose-spec"} | dict.fromkeys(WORKFLOWS, "github-workflows")


def services() -> dict[str, Any]:
    return yaml.safe_load(COMPOSE.read_text())["services"]


def parsed(arguments: list[str]) -> dict[str, Any]:
    """What our command line makes of arguments, without running them."""
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    return commands[arguments[0]].make_context(arguments[0], arguments[1:]).params


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.name)
def test_they_are_what_their_readers_expect(path: Path) -> None:
    pytest.importorskip("check_jsonschema", reason="comes with the extra `dev`")
    schema = f"vendor.{SCHEMAS[path]}"
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_workflows_call_targets_that_there_are() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = set[str]()
    for path in WORKFLOWS:
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            for step in job["steps"]:
                called |= set(re.findall(r"\bmake ([a-z]+)", step.get("run", "")))
    assert {"check", "test", "docs", "dist"} <= called <= targets


def test_three_servers_find_each_other_behind_one_gateway() -> None:
    asked = {name: parsed(each["command"]) for name, each in services().items()}
    gateway = asked.pop("gateway")
    head = next(name for name, given in asked.items() if given["head"])
    assert asked[head]["servers"] == len(asked) == 3
    assert {given["join"] for name, given in asked.items() if name != head} == {head}
    assert [given["server"] for given in asked.values()] == [[name] for name in asked]
    assert gateway["server"] == [f"http://{name}:8000" for name in asked]


def test_addresses_are_those_of_the_network() -> None:
    at = {name: each["networks"]["cluster"]["ipv4_address"]
          for name, each in services().items() if name != "gateway"}  # fmt: skip
    assert len(set(at.values())) == 3
    assert parsed(services()["desk"]["command"])["address"] == at["desk"]
    (subnet,) = yaml.safe_load(COMPOSE.read_text())["networks"]["cluster"]["ipam"]["config"]
    assert all(subnet["subnet"].startswith(each.rpartition(".")[0]) for each in at.values())
    (published,) = services()["gateway"]["ports"]
    port = parsed(services()["gateway"]["command"])["port"]
    assert published == f"127.0.0.1:{port}:{port}"


def test_the_image_has_what_it_copies_and_runs_a_command() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        for source in line.split():
            assert (ROOT / source).exists()
            assert f"!{source}" in allowed
    assert parsed(yaml.safe_load(re.findall(r"^CMD (\[.+\])$", text, re.MULTILINE)[0]))
    assert re.findall(r"^RUN trimmoe (\S+)$", text, re.MULTILINE) == ["fetch"]
