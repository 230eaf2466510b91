"""`trimmoe experiment figure` and `all` from the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from trimmoe import cli


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["trimmoe", "experiment", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_a_figure_of_a_geometry_needs_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new" / "folder"
    code = run(
        monkeypatch, "figure", "7", "--model", "switch-base-8e", "--quick", "-o", str(folder)
    )
    assert code == 0
    content = json.loads((folder / "fig07.json").read_text())
    assert content["world"]["source"] == "generated"
    assert content["world"]["layers"] == 6
    assert len(content["rows"][0]["exit_share"]) == 6
    assert (folder / "fig07.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("figure", "3", "-o", "x"), "There is no figure 3"),
        (("all", "--profile", "p.trim", "-o", "x"), "--profile and --trace together"),
        (("claims", "--letter-profile", "p.trim", "-o", "x"), "--letter-trace together"),
        (
            ("claims", "--letter-profile", "p.trim", "--letter-trace", "t.trim", "-o", "x"),
            "beside --profile",
        ),
        (("all", "--measure", "-o", "x"), "--measure executes a model"),
        (("all", "--plan", "p.trim", "-o", "x"), "--plan needs the --profile"),
        (("all", "--model", "gpt-9", "--quick", "-o", "x"), "There is no geometry"),
    ],
)
def test_mistakes_end_in_one_sentence(
    arguments: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, *arguments) == 2
    assert said in capsys.readouterr().err
