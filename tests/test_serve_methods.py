"""Methods on real servers, side by side: figures by hand, and one run with real processes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from launching import SERVERS, free_ports, write_files
from quick import nursery, run_quickly
from tiny import LAYERS, write_tiny_checkpoint
from trimmoe import __version__, cli
from trimmoe.core.errors import UserError
from trimmoe.core.plan import load_plan
from trimmoe.core.profile import load_profile
from trimmoe.evaluate.reference import exact_answer
from trimmoe.experiments.serve_bench import Sent
from trimmoe.experiments.serve_methods import Ran, answer_flips, method_row
from trimmoe.experiments.serve_prompts import token_prompts
from trimmoe.models.base import MoEView
from trimmoe.models.load import open_model
from trimmoe.runtime.launch import family

PROMPT = (5, 9, 2, 40)


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> MoEView:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(folder)
    return open_model(folder)


def greedy(view: MoEView, count: int) -> list[int]:
    """The exact model's own answer."""
    answer: list[int] = []
    for _ in range(count):
        answer.append(int(exact_answer(view, PROMPT, [*answer, 0]).predictions[-1]))
    return answer


def test_an_answer_of_the_exact_model_flips_nowhere(view: MoEView) -> None:
    assert answer_flips(view, PROMPT, greedy(view, 6)) == 0
    assert answer_flips(view, PROMPT, []) == 0


def test_a_flip_is_what_the_exact_model_would_not_have_said_after_the_same_text(
    view: MoEView,
) -> None:
    """A wrong last token is one flip. A wrong first one is none: the prompt runs exactly, so that
    it cannot be a method's doing."""
    exact = greedy(view, 6)
    wrong = (exact[-1] + 1) % 50
    assert answer_flips(view, PROMPT, [*exact[:-1], wrong]) == 1
    assert answer_flips(view, PROMPT, [wrong]) == 0


def test_figures_of_a_method_by_hand(view: MoEView) -> None:
    """Two answers of 6 tokens, 5 of them decoded: 30 messages and one flip on 10 tokens."""
    exact = greedy(view, 6)
    usage = {"hops": 15, "bytes": 400, "layers_executed": 15, "layers_skipped": 5}

    def sent(answer: list[int]) -> Sent:
        return Sent(
            prompt_tokens=4, output_tokens=6, ttft_s=0.2, e2el_s=0.7, usage={"trimmoe": usage},
            token_ids=answer,
        )  # fmt: skip

    other = [*exact[:-1], (exact[-1] + 1) % 50]
    failed = Sent(error="gone")
    ran = Ran(method="exact", sent=(sent(exact), failed, sent(other)), duration_s=2.0)
    row = method_row(ran, [PROMPT] * 3, view)
    assert (row["completed"], row["failed"]) == (2, 1)
    assert row["mean_ttft_ms"] == pytest.approx(200)
    assert row["mean_tpot_ms"] == pytest.approx(100)
    assert row["output_throughput"] == pytest.approx(6)
    assert (row["messages_per_token"], row["bytes_per_token"]) == (3.0, 80.0)
    assert row["skipped_share"] == 0.25
    assert (row["flips"], row["decoded_tokens"], row["flip_rate"]) == (1, 10, 0.1)
    assert row["flip_rate_low_95"] < 0.1 < row["flip_rate_high_95"]
    assert (row["equal_answers"], row["answers"]) == (1, 2)


def test_what_did_not_run_says_why(view: MoEView) -> None:
    assert method_row(Ran(method="paper", refused="No."), [], view)["refused"] == "No."
    ran = Ran(method="exact", sent=(Sent(error="gone"),), duration_s=1.0)
    assert "gone" in method_row(ran, [PROMPT], view)["refused"]


def test_prompts_are_pieces_of_the_text() -> None:
    prompts = token_prompts(range(100), 5, 10, seed=3)
    assert all(each == tuple(range(each[0], each[0] + 10)) for each in prompts)
    assert prompts == token_prompts(range(100), 5, 10, seed=3)
    with pytest.raises(UserError, match="needs 10"):
        token_prompts(range(9), 1, 10, seed=0)


def test_methods_run_as_processes_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EdgeShard's answers are the exact model's; Mixture-of-Depths, no preset of ours, skips every
    layer that calibration found less important than an eighth of all, here each; what servers
    cannot run is said and not run."""
    files = write_files(tmp_path, SERVERS[:2], importance_quantiles=np.ones((LAYERS, 101)))
    nursery()
    before = family.descendants(os.getpid())
    names = ("edgeshard", "mixture-of-depths", "paper")
    text = tmp_path / "text"
    text.write_text("A quick brown fox. " * 30)
    monkeypatch.setenv("TRIMMOE_CACHE", str(tmp_path / "cache"))
    options = [
        *("--model", str(files.model), "--profile", str(files.profile)),
        *("--plan", str(files.plan), "--text", str(text), "-o", str(tmp_path / "out")),
        *("--requests", "4", "--prompt-tokens", "8", "--output-tokens", "12"),
        *("--port-base", str(free_ports(120))),
        *(part for name in names for part in ("--method", name)),
    ]
    monkeypatch.setattr(sys, "argv", ["trimmoe", "bench", "methods", *options])
    run_quickly(monkeypatch.setattr)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code
    assert family.descendants(os.getpid()) == before, "servers are left behind"
    content = json.loads((tmp_path / "out" / "methods.json").read_text())
    edgeshard, depths, paper = content["methods"]
    assert (tmp_path / "out" / "methods.png").stat().st_size > 0
    assert content["trimmoe_version"] == __version__
    hashes = content["input_hashes"]
    assert hashes["profile"] == load_profile(files.profile).hash
    assert hashes["plans"] == dict.fromkeys(names, load_plan(files.plan).hash)
    assert "KV cache" in paper["refused"]
    for row in (edgeshard, depths):
        assert (row["completed"], row["failed"], row["decoded_tokens"]) == (4, 0, 44)
        assert row["mean_ttft_ms"] > 0 < row["mean_tpot_ms"]
    assert (edgeshard["flips"], edgeshard["equal_answers"]) == (0, 4)
    assert edgeshard["skipped_share"] == 0
    assert depths["skipped_share"] == 1
    assert depths["flips"] > 0
