"""`trimmoe serve-local` as users run it: a process of its own, a port, Ctrl-C."""

from __future__ import annotations

import re
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from factories import random_cluster, random_profile
from launching import Serving
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
def started(*arguments: object) -> Iterator[tuple[str, Serving]]:
    """The command's base URL and process; it must have ended when the block does."""
    command = ["-m", "trimmoe.cli", "serve-local", "--port", 0, *arguments]
    with Serving([str(part) for part in command]) as serving:
        serving.said("Ctrl-C to stop")
        found = re.search(r"http://[\d.]+:\d+", serving.text)
        assert found, serving.text
        yield found.group(), serving
        assert serving.process.poll() is not None, "the test ends the process"


def complete(url: str, **changes: object) -> httpx.Response:
    body = {"model": "toy", "prompt": "Hello", "max_tokens": 6, "ignore_eos": True, **changes}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def stopped_cleanly(serving: Serving) -> None:
    """Ctrl-C ends the process without a complaint."""
    serving.process.send_signal(signal.SIGINT)
    assert serving.ended() == 0, serving.text
    assert "Traceback" not in serving.text


def test_without_profile_and_plan_the_exact_model_answers(folder: Path) -> None:
    with started("--model", folder / "toy") as (url, serving):
        ledger = complete(url, quality_budget=0.5).json()["usage"]["trimmoe"]
        assert ledger["layers_executed"] == 5 * LAYERS
        assert ledger["hops"] == ledger["budget_spent"] == ledger["layers_skipped"] == 0
        stopped_cleanly(serving)


def test_with_a_plan_requests_are_trimmed_within_the_budget(folder: Path) -> None:
    given = ["--profile", folder / "profile.trim", "--plan", folder / "plan.trim"]
    options = ["--budget", 0.4, "--api-key", "secret", "--served-model-name", "toy"]
    with started("--model", folder / "toy", *given, *options) as (url, serving):
        assert complete(url).status_code == 401
        client = httpx.Client(headers={"Authorization": "Bearer secret"}, timeout=60)
        body = {"model": "toy", "prompt": "Hello", "max_tokens": 30, "ignore_eos": True}
        ledger = client.post(f"{url}/v1/completions", json=body).json()["usage"]["trimmoe"]
        client.close()
        assert ledger["hops"] > 0
        assert ledger["budget_credited"] == pytest.approx(29 * 0.4)
        assert 0 < ledger["budget_spent"] <= ledger["budget_credited"]
        stopped_cleanly(serving)


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


def test_a_draft_head_and_a_plan_do_not_go_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = ["--profile", "profile.trim", "--plan", "plan.trim"]
    assert "leave out --draft-head" in refusal(["--draft-head", "auto", *both], monkeypatch, capsys)


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
