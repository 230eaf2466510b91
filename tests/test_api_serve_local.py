"""`trimmoe serve-local` as users run it: a process of its own, a port, Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from factories import random_cluster, random_profile
from synthetic import random_plan
from tiny import LAYERS, write_tiny_checkpoint
from trimmoe import cli
from trimmoe.core.plan import plan_header
from trimmoe.models.load import open_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a profile and a plan beside it."""
    folder = tmp_path_factory.mktemp("serve")
    (folder / "toy").mkdir()
    write_tiny_checkpoint(folder / "toy")
    spec = open_model(folder / "toy", hashed=True).spec
    rng = np.random.default_rng(4)
    profile = random_profile(rng, spec)
    cluster = random_cluster(rng, servers=3)
    hashes = {"model": spec.model_hash, "profile": profile.hash}
    header = plan_header(cluster, settings={}, input_hashes=hashes, seed=0)
    profile.save(folder / "profile.trim")
    replace(random_plan(rng, spec, cluster), header=header).save(folder / "plan.trim")
    return folder


@contextmanager
def started(*arguments: object) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The command's base URL and process; it must have ended when the block does."""
    command = [sys.executable, "-m", "trimmoe.cli", "serve-local", "--port", 0, *arguments]
    process = subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"COLUMNS": "200", "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.search(r"http://[\d.]+:\d+", said)
        assert found, said or (process.stderr and process.stderr.read())
        yield found.group(), process
        assert process.poll() is not None, "the test ends the process"
    finally:
        process.kill()
        process.communicate()


def complete(url: str, **changes: object) -> httpx.Response:
    body = {"model": "toy", "prompt": "Hello", "max_tokens": 6, "ignore_eos": True, **changes}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def stopped_cleanly(process: subprocess.Popen[str]) -> None:
    """Ctrl-C ends the process without a complaint."""
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == 0, complaint
    assert "Traceback" not in complaint


def test_without_profile_and_plan_the_exact_model_answers(folder: Path) -> None:
    with started("--model", folder / "toy") as (url, process):
        ledger = complete(url, quality_budget=0.5).json()["usage"]["trimmoe"]
        assert ledger["layers_executed"] == 5 * LAYERS
        assert ledger["hops"] == ledger["budget_spent"] == ledger["layers_skipped"] == 0
        stopped_cleanly(process)


def test_with_a_plan_requests_are_trimmed_within_the_budget(folder: Path) -> None:
    given = ["--profile", folder / "profile.trim", "--plan", folder / "plan.trim"]
    options = ["--budget", 0.4, "--api-key", "secret", "--served-model-name", "toy"]
    with started("--model", folder / "toy", *given, *options) as (url, process):
        assert complete(url).status_code == 401
        client = httpx.Client(headers={"Authorization": "Bearer secret"}, timeout=60)
        body = {"model": "toy", "prompt": "Hello", "max_tokens": 30, "ignore_eos": True}
        ledger = client.post(f"{url}/v1/completions", json=body).json()["usage"]["trimmoe"]
        client.close()
        assert ledger["hops"] > 0
        assert ledger["budget_credited"] == pytest.approx(29 * 0.4)
        assert 0 < ledger["budget_spent"] <= ledger["budget_credited"]
        stopped_cleanly(process)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--profile", "profile.trim"], "--plan"),
        (["--plan", "plan.trim"], "--profile"),
        (["--method", "magic"], "magic"),
        (["--api-key", ""], "api-key"),
        (["--profile", "none.trim", "--plan", "plan.trim"], "calibrate"),
        (["--profile", "profile.trim", "--plan", "plan.trim", "--access", "mars"], "mars"),
        (["--host", "203.0.113.1"], "--host"),
    ],
)
def test_wrong_options_are_one_sentence(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: Sequence[str],
    says: str,
) -> None:
    monkeypatch.chdir(folder)
    assert says in refusal(["--port", "0", *arguments], monkeypatch, capsys)


def test_a_taken_port_is_said_before_the_model_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert port in refusal(["--port", port], monkeypatch, capsys)


def refusal(
    arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    command = ["trimmoe", "serve-local", "--model", "toy", *arguments]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    said = capsys.readouterr().err
    assert stopped.value.code == 2, said
    return said
