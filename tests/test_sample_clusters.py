"""The sample clusters of the package: found by name, listed, written, and a sensible default."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trimmoe import cli
from trimmoe.core.cluster_file import load_cluster
from trimmoe.core.errors import UserError
from trimmoe.core.sample_clusters import cluster_path, sample_names, sample_path, sample_summary
from trimmoe.experiments.default_cluster import default_cluster
from trimmoe.runtime.launch.config import serve_config


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder outside any checkout."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["trimmoe", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0)


@pytest.mark.parametrize("name", sample_names())
def test_every_sample_is_found_by_its_own_name(name: str) -> None:
    assert load_cluster(Path(name)).name == name
    assert sample_summary(name).endswith(".")


def test_a_file_of_a_samples_name_is_that_file(elsewhere: Path) -> None:
    mine = sample_path("pair40").read_text().replace("name: pair40", "name: mine")
    (elsewhere / "local4").write_text(mine)
    assert load_cluster(Path("local4")).name == "mine"
    assert cluster_path(Path("home3")) == cluster_path(Path("home3.yaml")) == sample_path("home3")
    assert cluster_path(Path("there/home3")) == Path("there/home3")


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(UserError, match="home3, local4"):
        load_cluster(Path("local5"))


def test_they_are_listed_within_eighty_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(monkeypatch, "clusters") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in sample_names())
    assert max(map(len, shown.splitlines())) <= 80


def test_one_is_shown_and_written_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    assert run(monkeypatch, "clusters", "pair40") == 0
    text = sample_path("pair40").read_text()
    assert capsys.readouterr().out == text
    assert run(monkeypatch, "clusters", "pair40", "-o", "mine.yaml") == 0
    assert (elsewhere / "mine.yaml").read_text() == text
    assert run(monkeypatch, "clusters", "nowhere") == 2
    assert "pair40" in capsys.readouterr().err


def test_settings_may_name_a_sample_or_a_file_beside_them(elsewhere: Path) -> None:
    assert serve_config(None, {"cluster": "local4"}).cluster == sample_path("local4")
    folder = elsewhere / "settings"
    folder.mkdir()
    settings = folder / "serve.yaml"
    settings.write_text("cluster: home3\n")
    assert serve_config(settings, {}).cluster == sample_path("home3")
    (folder / "home3").write_text("mine")
    assert serve_config(settings, {}).cluster == folder / "home3"


def test_only_where_nobody_names_servers_the_default_does() -> None:
    def chosen(_config: object) -> Path:
        return sample_path("single")

    assert serve_config(None, {}, default_cluster=chosen).cluster == sample_path("single")
    named = serve_config(None, {"cluster": "pair40"}, default_cluster=chosen)
    assert named.cluster == sample_path("pair40")
    assert serve_config(None, {"plan": "a.trim"}, default_cluster=chosen).cluster is None
    with pytest.raises(UserError, match="Nothing says which servers"):
        serve_config(None, {})


def test_the_demonstration_needs_memory_and_the_model_that_ships() -> None:
    assert default_cluster("embedded", free_bytes=20 * 10**9)[0] == "local4"
    for model, free in (("embedded", 2 * 10**9), ("my/model", 20 * 10**9)):
        name, why = default_cluster(model, free_bytes=free)
        assert name == "single"
        assert "\n" not in why
