"""Generations of one turn on a machine: the next begins when the one before has ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launching import write_files
from trimmoe.core.errors import UserError
from trimmoe.core.plan import load_plan
from trimmoe.core.profile import load_profile
from trimmoe.experiments.serve_cluster import pieces_of
from trimmoe.models.load import model_spec
from trimmoe.runtime.launch import generation, machine
from trimmoe.runtime.launch.artifacts import Artifacts
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.deployment import deployment_of
from trimmoe.runtime.wire.keys import generate_token


class _Folder:
    """Has room for one supervisor."""

    def __init__(self) -> None:
        self.held = False
        self.begun: list[str] = []
        self.news = threading.Event()

    @contextmanager
    def supervising(self, folder: Any, job: str, *_: object) -> Iterator[tuple[Any, str]]:
        if self.held:
            raise UserError("Another `trimmoe serve` runs.")
        self.held = True
        self.begun.append(job)
        self.news.set()
        yield folder, job
        self.held = False


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> _Folder:
    found = _Folder()
    monkeypatch.setattr(generation, "supervising", found.supervising)
    monkeypatch.setattr(generation, "start_processes", lambda *_: ())
    monkeypatch.setattr(generation.Generation, "_supervised", lambda self: self._leaving.wait())
    return found


def _begun(job: str, **options: Any) -> Any:
    return generation.Generation(None, job, lambda _: None, ready_s=1.0, **options)  # type: ignore[arg-type]


def test_who_comes_after_waits_for_the_end_of_who_was_before(folder: _Folder) -> None:
    first = _begun("first")
    assert folder.news.wait(10)
    folder.news.clear()
    second = _begun("second", after=first)
    assert not folder.news.wait(0.5), "both at once"
    first.retire()
    assert folder.news.wait(10)
    second.end()
    second.join()
    assert folder.begun == ["first", "second"]
    assert not first.error
    assert not second.error


def test_who_waits_and_is_not_wanted_any_more_never_begins(folder: _Folder) -> None:
    first = _begun("first")
    second = _begun("second", after=first)
    second.retire()
    second.join()
    first.end()
    first.join()
    assert folder.begun == ["first"]


def test_a_head_that_forgot_may_want_the_turn_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that started by what it was given before, and a head that has planned anew: the new
    servers come after the old ones, not against them. Other turns wait for nobody."""

    class Begun:
        is_over, error = False, ""

        def __init__(self, folder: Any, *_: object, ready_s: float, after: Any) -> None:
            self.folder, self.after, self.retired = folder, after, False

        def retire(self) -> None:
            self.retired = True

    monkeypatch.setattr(machine, "Generation", Begun)
    monkeypatch.setattr(machine, "compile_decisions", lambda *_: None)
    monkeypatch.setattr(machine, "require_free", lambda _: None)
    made = write_files(tmp_path, ("desk", "attic"))
    artifacts = Artifacts(
        profile=load_profile(made.profile),
        plan=load_plan(made.plan),
        model=model_spec(made.model, hashed=True),
    )
    config = ServeConfig(model=str(made.model), policy="exact")
    addresses = {"desk": "10.0.0.1", "attic": "10.0.0.2"}
    before = deployment_of(config, artifacts, addresses)
    anew = deployment_of(config, artifacts, addresses | {"desk": "10.0.0.3"})
    beside = msgspec.structs.replace(before, turn=1)
    here = machine.Machine(("attic",), generate_token(), tmp_path, lambda _: None, pieces_of)
    here.want({"before": before}, {"before"})
    here.want({"anew": anew}, {"anew"})
    here.want({"anew": anew, "beside": beside}, {"anew", "beside"})
    found: dict[str, Any] = here._running
    assert found["before"].retired
    assert found["before"].after is None
    assert found["anew"].after is found["before"]
    assert found["beside"].after is None
