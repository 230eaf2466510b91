"""Profile and plan of a cluster: made once, found again, refused where they do not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from factories import random_profile
from launching import Files, cluster_yaml, write_files
from trimmoe.core.errors import UserError
from trimmoe.experiments.joining import JoinedPlanner
from trimmoe.experiments.preparation import prepare
from trimmoe.experiments.sample_text import sample_text
from trimmoe.experiments.serve_cluster import serve_as_head
from trimmoe.models.load import model_spec
from trimmoe.runtime.launch.artifacts import Artifacts, cluster_of
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.deployment import Hello
from trimmoe.runtime.launch.model import served_name
from trimmoe.runtime.launch.several import HeadOptions


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_files(tmp_path_factory.mktemp("files"))


def _config(files: Files, **more: object) -> ServeConfig:
    given = {"cluster": files.cluster, "model": str(files.model)} | more
    return ServeConfig.model_validate(given)


def _prepared(config: ServeConfig, cache: Path) -> tuple[Artifacts, list[str]]:
    said: list[str] = []
    return prepare(config, sample=_sample, say=said.append, cache_dir=cache), said


def _sample() -> str:
    return sample_text("calibration")[:40_000]


def test_what_is_given_is_used(files: Files, tmp_path: Path) -> None:
    made, said = _prepared(_config(files, profile=files.profile, plan=files.plan), tmp_path)
    assert made.plan.header.input_hashes["profile"] == made.profile.hash
    assert said == []
    assert list(tmp_path.iterdir()) == []


def test_a_plan_brings_its_cluster(files: Files, tmp_path: Path) -> None:
    config = _config(files, cluster=None, profile=files.profile, plan=files.plan)
    assert cluster_of(config).server_names == cluster_of(_config(files)).server_names
    made, _ = _prepared(config, tmp_path)
    assert made.plan.cluster.name == "test4"


def test_a_plan_is_made_once_and_again_for_another_cluster(files: Files, tmp_path: Path) -> None:
    config = _config(files, profile=files.profile, plan_iterations=20)
    first, said = _prepared(config, tmp_path)
    assert said == ["Planning for test4 ..."]
    again, said = _prepared(config, tmp_path)
    assert said == []
    assert again.plan.hash == first.plan.hash
    other = tmp_path / "other.yaml"
    other.write_text(cluster_yaml(("x", "y", "z")))
    third, said = _prepared(config.model_copy(update={"cluster": other}), tmp_path)
    assert said == ["Planning for test3 ..."]
    assert third.plan.cluster.server_names == ("x", "y", "z")


def test_a_plan_that_any_server_may_leave_is_another_one(files: Files, tmp_path: Path) -> None:
    roomy = tmp_path / "roomy.yaml"
    roomy.write_text(cluster_yaml(("x", "y", "z"), ratio=2.4))
    config = _config(files, cluster=roomy, profile=files.profile, plan_iterations=20)
    plain, _ = _prepared(config, tmp_path)
    made, said = _prepared(config.model_copy(update={"survive": 1}), tmp_path)
    assert said == ["Planning for test3 ..."]
    assert made.plan.hash != plain.plan.hash
    assert (made.plan.hosts.sum(axis=0) > 1).all()
    small = _config(files, profile=files.profile, plan_iterations=20, survive=1)
    with pytest.raises(UserError, match=r"2 hosts of every expert .* are missing"):
        _prepared(small, tmp_path)


def test_whoever_joins_is_planned_for_so_that_any_may_go(files: Files) -> None:
    config = ServeConfig(model=str(files.model), profile=files.profile, plan_iterations=20)
    joined = {
        name: Hello(version="1", servers=(name,), address=name, memory_bytes=2 * 10**9, cores=cores)
        for cores, name in enumerate(("x", "y", "z"), start=1)
    }
    for survive in (0, 1, 2):
        config = config.model_copy(update={"survive": survive})
        made = JoinedPlanner(config, print, Console(quiet=True), None).nominal(joined)
        assert (made.plan.hosts.sum(axis=0) > survive).all()
    options = HeadOptions(address="127.0.0.1", port=1, servers=("x",), token=None)
    with pytest.raises(UserError, match="it takes 3 servers; raise --servers"):
        serve_as_head(config, print, Console(quiet=True), options=options, count=2, replan=True)


def test_a_damaged_plan_is_made_again(files: Files, tmp_path: Path) -> None:
    config = _config(files, profile=files.profile, plan_iterations=20)
    first, _ = _prepared(config, tmp_path)
    (kept,) = (tmp_path / "plans").iterdir()
    kept.write_bytes(b"torn")
    again, said = _prepared(config, tmp_path)
    assert "is damaged and is made again" in said[0]
    assert again.plan.hash == first.plan.hash


@pytest.mark.slow
def test_without_a_profile_the_model_is_calibrated_once(files: Files, tmp_path: Path) -> None:
    config = _config(files, calibration_tokens=1500, plan_iterations=0)
    first, said = _prepared(config, tmp_path)
    assert said[0] == "Calibrating tiny (once; this takes minutes) ..."
    again, said = _prepared(config, tmp_path)
    assert said == []
    assert again.profile.hash == first.profile.hash
    assert first.profile.header.settings["tokens"] == 1500


def test_a_cache_that_cannot_be_written_costs_time_only(files: Files, tmp_path: Path) -> None:
    (tmp_path / "plans").write_text("a file where the folder should be")
    config = _config(files, profile=files.profile, plan_iterations=20)
    made, said = _prepared(config, tmp_path)
    assert made.plan.cluster.name == "test4"
    assert "the next start will do it again" in said[1]


def test_a_plan_for_another_cluster_is_refused(files: Files, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(cluster_yaml(("x", "y", "z")))
    config = _config(files, cluster=other, profile=files.profile, plan=files.plan)
    with pytest.raises(UserError, match="made for another cluster file"):
        _prepared(config, tmp_path)


def test_a_plan_from_another_profile_is_refused(files: Files, tmp_path: Path) -> None:
    spec = model_spec(files.model, hashed=True)
    other = tmp_path / "other.safetensors"
    random_profile(np.random.default_rng(4), spec).save(other)
    with pytest.raises(UserError, match="made from another profile"):
        _prepared(_config(files, profile=other, plan=files.plan), tmp_path)


def test_a_profile_of_another_model_is_refused(files: Files, tmp_path: Path) -> None:
    other = write_files(tmp_path)  # The same weights under the same name are the same model.
    config = _config(files, model=str(other.model), profile=files.profile, plan=files.plan)
    _prepared(config, tmp_path)
    (other.model / "config.json").write_text(
        (other.model / "config.json")
        .read_text()
        .replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05')
    )
    with pytest.raises(UserError, match="calibrat"):
        _prepared(config, tmp_path)


def test_an_unreadable_plan_is_one_sentence(files: Files, tmp_path: Path) -> None:
    torn = tmp_path / "plan.safetensors"
    torn.write_bytes(files.plan.read_bytes()[:100])
    config = _config(files, profile=files.profile, plan=torn)
    with pytest.raises(UserError, match="is not a TrimMoE plan or is damaged"):
        _prepared(config, tmp_path)


def test_users_call_a_model_by_its_folder_or_hub_id(files: Files) -> None:
    assert served_name(str(files.model)) == "tiny"
    assert served_name("embedded") == "embedded"
    assert served_name("mistralai/Mixtral-8x7B-v0.1") == "mistralai/Mixtral-8x7B-v0.1"
