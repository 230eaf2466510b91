"""What a model takes in memory, what there is, and what the command line makes of the two."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

import checkpoints
from tiny import write_tiny_checkpoint
from trimmoe.calibrate.settings import CalibrationSettings
from trimmoe.cli import app
from trimmoe.core.errors import UserError
from trimmoe.core.precision import Precision
from trimmoe.core.profile import load_profile
from trimmoe.experiments.opening import BESIDE_WEIGHTS_BYTES, open_view, with_room_for_copies
from trimmoe.experiments.preparation import _calibrated
from trimmoe.models import memory
from trimmoe.models.compiled.view import CompiledView
from trimmoe.models.load import (
    MemoryNeeds,
    memory_needs,
    model_spec,
    open_model,
)


@pytest.mark.parametrize("family", [*checkpoints.DECODERS, "switch"])
def test_a_model_needs_what_it_reads(family: str, tmp_path: Path) -> None:
    path = checkpoints.write(family, tmp_path)
    needs, view = memory_needs(path), open_model(path)
    assert needs.whole_bytes == view.bytes_read.dense + view.bytes_read.experts
    streamed = open_model(path, streamed=True)
    streamed.experts(0, torch.zeros(1, 32), torch.tensor([[0]]), torch.ones(1, 1))
    assert needs.streamed_bytes == streamed.bytes_read.dense + streamed.bytes_read.experts
    half = memory_needs(path, dtype=torch.bfloat16)
    assert (2 * half.whole_bytes, 2 * half.streamed_bytes) == (
        needs.whole_bytes,
        needs.streamed_bytes,
    )


def _parameters() -> int:
    gc.collect()
    return sum(type(one) is torch.nn.Parameter for one in gc.get_objects())


@pytest.mark.parametrize("family", checkpoints.DECODERS)
def test_compiled_blocks_keep_no_weights_but_their_own(family: str, tmp_path: Path) -> None:
    path = checkpoints.write(family, tmp_path)
    before = _parameters()
    view = open_model(path)
    assert isinstance(view, CompiledView)
    assert _parameters() == before


def _group(folder: Path, limit: str) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text("700\n")
    (folder / "memory.stat").write_text("anon 500\ninactive_file 150\nactive_file 50\n")
    return folder


def test_a_container_has_what_its_limit_leaves_with_what_may_be_dropped(tmp_path: Path) -> None:
    assert memory._group_bytes(tmp_path) is None
    assert memory._group_bytes(_group(tmp_path, "max")) is None
    assert memory._group_bytes(_group(tmp_path, "1000")) == 450
    assert memory._group_bytes(_group(tmp_path, "400")) == 0


def test_the_smaller_of_machine_and_container_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemFree: 1 kB\nMemAvailable:  4 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    cpu = torch.device("cpu")
    assert memory.available_bytes(cpu) == 4096
    _group(tmp_path, "1000")
    assert memory.available_bytes(cpu) == 450


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)
    text = folder / "text.txt"
    text.write_text(" ".join(rng.choice(["the", "cat", "sat", "on", "a", "mat"], size=2000)))
    return write_tiny_checkpoint(folder / "tiny"), text


@pytest.mark.parametrize(
    ("quantise", "says"),
    [
        (
            Precision.NONE,
            "hold it in fewer bits with --quantise (0.0 GB in int8 or 0.0 GB in int4)",
        ),
        (Precision.INT8, "fewer bits with --quantise (0.0 GB in int4), or spread it over more"),
        (Precision.INT4, "are free; spread it over more machines."),
    ],
)
def test_what_is_not_there_is_refused_before_it_is_read(
    quantise: Precision, says: str, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = model_spec(files[0], dtype=torch.float32, quantise=quantise)
    needed = spec.dense_bytes + spec.total_expert_bytes
    # Weights of float32 may be such that half as many bits hold them.
    least = needed // 2 if quantise is Precision.NONE else needed

    def with_free(size: int | None, **more: Any) -> None:
        monkeypatch.setattr("trimmoe.models.load.available_bytes", lambda device: size)
        open_model(files[0], dtype=torch.float32, quantise=quantise, **more)

    for free in (None, least):
        with_free(free)
    with pytest.raises(UserError, match=re.escape(says)):
        with_free(least - 1)
    with_free(least - 1, experts={0: [0]})


def test_every_command_that_opens_a_model_asks_whether_there_is_room(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trimmoe.models.load.available_bytes", lambda device: 1)
    with pytest.raises(UserError, match=r"of memory, and 0\.0 GB are free"):
        open_view(str(files[0]), "float32", "cpu")
    assert open_view(str(files[0]), "float32", "cpu", streamed=True).bytes_read.experts == 0


@pytest.mark.parametrize("compiled", [True, False])
def test_what_is_read_of_a_model_is_shown(
    compiled: bool, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    total, read = [0], [0]

    @contextmanager
    def bar(_: str, total_bytes: int) -> Generator[Callable[[int], None]]:
        total[0] = total_bytes
        yield lambda more: read.append(more)

    monkeypatch.setattr("trimmoe.models.load.bytes_bar", bar)
    open_model(files[0], dtype=torch.float32, compiled=compiled, shown=True)
    assert sum(read) == total[0] > 0
    open_model(files[0], dtype=torch.float32, compiled=compiled)
    assert total == [0]


def test_a_server_calibrates_a_model_that_does_not_fit_layer_by_layer(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = memory_needs(files[0], dtype=torch.float32)
    free = needs.streamed_bytes + BESIDE_WEIGHTS_BYTES
    monkeypatch.setattr(memory, "available_bytes", lambda device: free)
    monkeypatch.setattr("trimmoe.calibrate.run.calibrate", lambda view, *_: view)
    said: list[str] = []
    view: Any = _calibrated(str(files[0]), "float32", ["a"], CalibrationSettings(), said.append)
    assert view.bytes_read.experts == 0
    assert "reading each layer's experts from disk" in said[0]


def test_what_copies_lose_is_measured_where_there_is_room_for_them(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    view, settings = open_model(files[0], dtype=torch.float32), CalibrationSettings()
    wanted = Precision.INT8.size_bytes(view.spec.total_expert_bytes // 4, 4)
    said: list[str] = []
    for free in (None, wanted):
        monkeypatch.setattr(memory, "available_bytes", lambda device, free=free: free)
        assert with_room_for_copies(view, settings, said.append) is settings
    assert said == []
    monkeypatch.setattr(memory, "available_bytes", lambda device: wanted - 1)
    assert with_room_for_copies(view, settings, said.append).rung_tokens == 0
    assert "what they lose is not measured" in said[0]
    none = replace(settings, rung_tokens=0)
    assert with_room_for_copies(view, none, said.append) is none
    assert len(said) == 1


@pytest.fixture
def run(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Result, str]]:
    """Calibrates where so much memory is left; what it printed and the profile's hash. By the
    model's own modules, as those are what streamed weights pass: compiled blocks round otherwise.
    """
    monkeypatch.setattr("trimmoe.models.decoder.can_compile", lambda *_: False)

    def calibrate(free: int | None, *options: str) -> tuple[Result, str]:
        monkeypatch.setattr(memory, "available_bytes", lambda device: free)
        output = tmp_path / "p.profile"
        output.unlink(missing_ok=True)
        arguments = ["calibrate", files[0], "--text", files[1], "-o", output, "--tokens", 1100]
        result = CliRunner().invoke(app, [*map(str, arguments), *options])
        return result, load_profile(output).hash if result.exit_code == 0 else ""

    return calibrate


def test_calibration_streams_by_itself_where_the_weights_do_not_fit(
    files: tuple[Path, Path], run: Callable[..., tuple[Result, str]]
) -> None:
    needs: MemoryNeeds = memory_needs(files[0])
    whole, wanted = run(needs.whole_bytes + BESIDE_WEIGHTS_BYTES)
    assert "from disk" not in whole.output
    tight, found = run(needs.streamed_bytes + BESIDE_WEIGHTS_BYTES)
    assert "reading each layer's experts from disk" in " ".join(tight.output.split())
    assert wanted != ""
    assert found == wanted
    short, none = run(needs.streamed_bytes)
    assert short.exit_code != 0
    assert none == ""
    said = str(short.exception) + short.output
    assert "Even with one layer's experts at a time" in " ".join(said.split())


def test_asked_to_stream_it_does_and_asked_not_to_it_does_not(
    run: Callable[..., tuple[Result, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def noting(*arguments: object, **options: bool) -> object:
        asked.append(options["streamed"])
        return open_model(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("trimmoe.models.load.open_model", noting)
    streamed, first = run(None, "--streamed")
    whole, second = run(0, "--whole")
    assert asked == [True, False]
    assert "from disk" not in streamed.output + whole.output
    assert first != ""
    assert second == first
