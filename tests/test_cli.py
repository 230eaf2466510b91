"""The command line on a tiny model: the whole way once, and every kind of bad input.

A user's mistake ends in one clear sentence and exit code 2, with nothing half-written left behind.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from launching import Serving
from tiny import write_tiny_checkpoint
from trimmoe import cli
from trimmoe.calibrate.settings import CalibrationSettings
from trimmoe.core.artifact import Header, save_artifact
from trimmoe.core.errors import UserError
from trimmoe.core.plan import load_plan
from trimmoe.core.profile import PROFILE_KIND, load_profile
from trimmoe.experiments.sample_text import sample_text

CLUSTER = Path(__file__).parents[1] / "clusters" / "home3.yaml"


@dataclass(frozen=True, kw_only=True)
class Result:
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line in this process."""

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["trimmoe", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        seen = capsys.readouterr()
        return Result(code=int(stopped.value.code or 0), out=seen.out, err=seen.err)

    return call


@dataclass(frozen=True, kw_only=True)
class Made:
    """A model, a profile and a plan that fit each other."""

    model: Path
    text: Path
    profile: Path
    plan: Path

    def options(self) -> list[object]:
        return ["--model", self.model, "--profile", self.profile, "--plan", self.plan]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("made")
    (folder / "model").mkdir()
    result = Made(
        model=write_tiny_checkpoint(folder / "model"),
        text=folder / "text.txt",
        profile=folder / "profile.trim",
        plan=folder / "plan.trim",
    )
    result.text.write_text(sample_text("held-out")[:6000])
    arguments = [
        ["calibrate", result.model, "--text", result.text, "-o", result.profile, "--tokens", 2500],
        ["plan", result.profile, CLUSTER, "--model", result.model, "-o", result.plan],
    ]
    for one in arguments:
        with Serving(["-m", "trimmoe.cli", *map(str, one)]) as ran:
            assert ran.ended() == 0, ran.text
    return result


def test_a_profile_by_the_letter_is_asked_for_by_name(
    made: Made, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads on the state (7), exit layers at p_J whatever exits flip."""
    asked: list[CalibrationSettings] = []

    def calibrate(*given: object) -> None:
        asked.extend(one for one in given if isinstance(one, CalibrationSettings))
        raise UserError("Enough.")

    monkeypatch.setattr("trimmoe.calibrate.run.calibrate", calibrate)
    for options in ((), ("--exit-heads", "state", "--exit-risk", "1", "--confidence", "0.8")):
        result = run("calibrate", made.model, "-o", tmp_path / "p.trim", *options)
        assert_refused(result, "Enough.")
    default, letter = asked
    assert (default.exit_heads, default.exit_risk, default.confidence) == ("direction", 0.01, 0.9)
    assert (letter.exit_heads, letter.exit_risk, letter.confidence) == ("state", 1.0, 0.8)
    assert_refused(
        run("calibrate", made.model, "-o", tmp_path / "p.trim", "--exit-risk", 2), "from 0 to 1"
    )


def test_generate_streams_text_and_ends_with_the_ledger(made: Made, run: Run) -> None:
    names = load_plan(made.plan).cluster.server_names
    result = run("generate", "Hello", *made.options(), "--access", names[1], "--max-new-tokens", 5)
    assert result.code == 0
    assert result.out.startswith("Hello")
    for heading in ("run", "remote", "subst.", "skip", "exit", "hops", "kB", "ms", "budget"):
        assert heading in result.out
    assert "4 tokens decoded" in result.out


def test_generate_changes_nothing_where_no_budget_is_given(made: Made, run: Run) -> None:
    prompt, length = "What is a", ["--max-new-tokens", 12]
    exact = run("generate", prompt, *made.options(), *length, "--method", "exact").out
    default = run("generate", prompt, *made.options(), *length).out
    assert default.partition("Layers of each token")[0] == exact.partition("Layers of")[0]
    assert "spent 0.0000 of 0.0000 credited" in " ".join(default.split())
    trimmed = run("generate", prompt, *made.options(), *length, "--budget", 0.5).out
    assert "of 5.5000 credited" in " ".join(trimmed.split())


def test_compare_writes_table_json_and_picture(made: Made, run: Run, tmp_path: Path) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "layers.png"
    result = run(
        "compare", "--text", made.text, *made.options(), "--budget", 0.05, "--passages", 3,
        "--context", 16, "--steps", 6, "--json", figures, "--picture", picture,
    )  # fmt: skip
    assert result.code == 0, result.err
    content = json.loads(figures.read_text())
    rows = {row["method"]: row for row in content["methods"]}
    assert {"exact", "substitute-only", "trimmoe"} <= rows.keys()
    assert rows["exact"]["agreement"] == 1.0
    assert rows["exact"]["perplexity"] == pytest.approx(rows["exact"]["exact_perplexity"], rel=1e-4)
    assert content["input_hashes"]["profile"] == load_profile(made.profile).hash
    assert content["settings"]["seed"] == 0
    assert content["trimmoe_version"]
    for row in rows.values():
        assert row["budget_spent_per_token"] <= row["budget_per_token"]
        assert np.array(row["kinds_by_layer"]).sum(1).tolist() == [3 * 6] * 4
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_same_command_same_result(made: Made, run: Run, tmp_path: Path) -> None:
    first, second = tmp_path / "first.trim", tmp_path / "second.trim"
    for output in (first, second):
        run("plan", made.profile, CLUSTER, "--model", made.model, "-o", output)
    assert first.read_bytes() == second.read_bytes()


BROKEN_CLUSTER = """
name: broken
servers:
  - {name: a, tflops: 10, memory_gb: 8, users: 1}
  - {name: b, tflops: 10, memory_gb: 8, users: 1}
"""


@pytest.mark.parametrize(
    ("links", "says"),
    [
        ("links: {default: {gbps: -1, ms: 1}}", "gbps"),
        ("links: {default: {gbps: 1, ms: 1}}\ncolour: red", "colour"),
        ("links: {}", "link"),
    ],
)
def test_bad_cluster_files(made: Made, run: Run, tmp_path: Path, links: str, says: str) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(f"{BROKEN_CLUSTER}{links}\n")
    output = tmp_path / "plan.trim"
    result = run("plan", made.profile, cluster, "--model", made.model, "-o", output)
    assert_refused(result, says)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.yaml"]


def test_a_cluster_that_cannot_hold_the_model(made: Made, run: Run, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    small = BROKEN_CLUSTER.replace("memory_gb: 8", "memory_gb: 0.00001")
    cluster.write_text(f"{small}links: {{default: {{gbps: 1, ms: 1}}}}\n")
    result = run("plan", made.profile, cluster, "--model", made.model, "-o", tmp_path / "p")
    assert_refused(result, "short")


def test_missing_and_truncated_checkpoints(made: Made, run: Run, tmp_path: Path) -> None:
    output = tmp_path / "profile.trim"
    calibrate = ["--text", made.text, "-o", output]
    assert_refused(run("calibrate", tmp_path / "nothing", *calibrate), "nothing")
    (tmp_path / "cut").mkdir()
    for file in made.model.iterdir():
        (tmp_path / "cut" / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert_refused(run("calibrate", tmp_path / "cut", *calibrate), "model.safetensors")
    assert not output.exists()


def test_text_that_is_missing_empty_or_not_utf8(made: Made, run: Run, tmp_path: Path) -> None:
    output = tmp_path / "profile.trim"
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "short.txt").write_text("too short")
    for name in ("missing.txt", "empty.txt", "latin.txt"):
        result = run("calibrate", made.model, "--text", tmp_path / name, "-o", output)
        assert_refused(result, name)
    result = run("calibrate", made.model, "--text", tmp_path / "short.txt", "-o", output)
    assert_refused(result, "text")
    assert not output.exists()


def test_a_profile_of_another_model(
    made: Made, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_tiny_checkpoint(tmp_path, seed=1)
    capsys.readouterr()
    result = run(
        "plan", made.profile, CLUSTER, "--model", other, "-o", tmp_path / "plan.trim"
    )  # fmt: skip
    assert_refused(result, "trimmoe calibrate")
    options = ["--model", other, "--profile", made.profile, "--plan", made.plan]
    assert_refused(run("generate", "Hello", *options), "trimmoe calibrate")


def test_a_plan_of_another_profile(made: Made, run: Run, tmp_path: Path) -> None:
    other = tmp_path / "profile.trim"
    run("calibrate", made.model, "--text", made.text, "-o", other, "--tokens", 2500, "--seed", 5)
    options = ["--model", made.model, "--profile", other, "--plan", made.plan]
    assert_refused(run("generate", "Hello", *options), "trimmoe plan")


def test_artifacts_of_another_version_kind_or_damaged(made: Made, run: Run, tmp_path: Path) -> None:
    old, cut, plain = tmp_path / "old.trim", tmp_path / "cut.trim", tmp_path / "plain.trim"
    save_artifact(old, Header(kind=PROFILE_KIND, format_version=0), {"x": np.zeros(1)})
    cut.write_bytes(made.profile.read_bytes()[:-100])
    plain.write_text("this is no artifact")
    output = tmp_path / "plan.trim"
    for path, says in ((old, "format 0"), (cut, "damaged"), (plain, "not a TrimMoE profile")):
        result = run("plan", path, CLUSTER, "--model", made.model, "-o", output)
        assert_refused(result, says)
    swapped = ["--model", made.model, "--profile", made.plan, "--plan", made.profile]
    assert_refused(run("generate", "Hello", *swapped), "a profile is needed")


@pytest.mark.parametrize(
    ("prompt", "says"), [("", "empty"), ("  ", "empty"), ("word " * 200, "context")]
)
def test_prompts_that_cannot_be_continued(made: Made, run: Run, prompt: str, says: str) -> None:
    assert_refused(run("generate", prompt, *made.options()), says)


def test_names_that_do_not_exist(made: Made, run: Run, tmp_path: Path) -> None:
    assert_refused(run("generate", "Hello", *made.options(), "--access", "mars"), "mars")
    assert_refused(run("generate", "Hello", *made.options(), "--method", "magic"), "magic")
    missing = tmp_path / "no" / "folder" / "plan.trim"
    result = run("plan", made.profile, CLUSTER, "--model", made.model, "-o", missing)
    assert_refused(result, "does not exist")


def test_numbers_out_of_range(made: Made, run: Run) -> None:
    result = run("generate", "Hello", *made.options(), "--budget", "-0.1")
    assert result.code == 2
    assert "budget" in result.err
    assert "Traceback" not in result.err


def assert_refused(result: Result, says: str) -> None:
    """One sentence on standard error that contains `says`, exit code 2, no traceback."""
    assert result.code == 2, result.out + result.err
    assert says in result.err
    assert result.err.startswith("trimmoe: ")
    assert "Traceback" not in result.err
    assert result.err.strip().count("\n") == 0


def test_serve_says_what_it_would_open_and_opens_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMMOE_RUN", str(tmp_path / "run"))
    said = run(
        "serve", "--check", "--cluster", "local4", "--port-base", 9000, "--api-key", "secret"
    )
    assert said.code == 0
    assert "HTTP: for all accounts of this machine, with an API key" in said.out
    assert "127.0.0.1:9003" in said.out
    assert f"{tmp_path}/run/9000/3.link" in said.out
    assert "9100" not in said.out
    assert not (tmp_path / "run").exists()
    head = ("serve", "--head", "--servers", 2, "--check", "--address", "10.0.0.1")
    said = run(*head, "--server", "desk", "--host", "0.0.0.0")
    assert "10.0.0.1:7900" in said.out
    assert "HTTP: for whoever reaches it. Plain" in said.out
    refused = run("serve", "--join", "10.0.0.1", "--check")
    assert (refused.code, "give --check there" in refused.err) == (2, True)
