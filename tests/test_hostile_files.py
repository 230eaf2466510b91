"""Whatever is in a file, reading it is quick, or refused in one sentence."""

from __future__ import annotations

import contextlib
import json
import pickle
import traceback
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from hostile import Mutator, patiently
from hostile_files import (
    CLUSTER,
    artifacts,
    changed_artifact,
    changed_checkpoint,
    changed_cluster,
    changed_gguf,
)
from test_models_gguf import convert
from tiny import write_tiny_checkpoint
from trimmoe.core.cluster_file import MOST_SERVERS, load_cluster
from trimmoe.core.errors import UserError
from trimmoe.core.yaml_file import LARGEST_BYTES
from trimmoe.models.load import load_tokenizer, open_model
from trimmoe.runtime.launch.config import serve_config

PATIENCE_S = 60.0
"""For all of a test's files; each takes milliseconds."""


def one_sentence(load: Callable[[Path], Any], path: Path) -> bool:
    """Whether a file is read; if not, the error is one line of bounded length."""
    files = [path] if path.is_file() else list(path.iterdir())
    size, said, crash = sum(each.stat().st_size for each in files), "", ""
    tracemalloc.start()
    try:
        load(path)
    except UserError as error:
        said = str(error)
    except Exception as error:  # Of which not all can be shown.
        frames = traceback.extract_tb(error.__traceback__)
        crash = f"{type(error).__name__} {str(error)[:200]} at {frames[-1]}"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not crash, (crash, path.read_bytes()[:2000] if path.is_file() else path)
    assert said.count("\n") == 0, said
    assert len(said) < 1000, said[:2000]
    assert peak < 20_000_000 + 100 * size, (peak, size)
    return not said


@pytest.mark.parametrize("kind", ["profile", "plan", "trace", "machines"])
def test_a_changed_artifact_is_read_or_refused(kind: str, tmp_path: Path) -> None:
    sample, path = artifacts(tmp_path)[kind], tmp_path / "changed"
    mutator, read = Mutator(7), 0
    with patiently(PATIENCE_S):
        for _ in range(80):
            path.write_bytes(changed_artifact(sample.content, mutator))
            read += one_sentence(lambda where: sample.hashed(sample.load(where)), path)
    assert 0 < read < 80, "some changes matter and some do not"


@pytest.mark.parametrize("nested", ["[" * 100_000, '{"a":' * 100_000], ids=["list", "mapping"])
def test_an_artifact_with_a_bottomless_header_is_refused(nested: str, tmp_path: Path) -> None:
    path = tmp_path / "deep"
    sample = artifacts(tmp_path)["plan"]
    size = int.from_bytes(sample.content[:8], "little")
    header = json.loads(sample.content[8 : 8 + size])
    header["__metadata__"]["trimmoe"] = nested
    told = json.dumps(header).encode()
    path.write_bytes(len(told).to_bytes(8, "little") + told + sample.content[8 + size :])
    assert not one_sentence(sample.load, path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a tiny checkpoint."""
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), layers=2)
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_changed_checkpoint_is_opened_or_refused(
    checkpoint: dict[str, bytes], tmp_path: Path
) -> None:
    mutator, opened = Mutator(13), 0
    with patiently(PATIENCE_S):
        for _ in range(30):
            changed_checkpoint(tmp_path, checkpoint, mutator)
            opened += one_sentence(lambda where: open_model(where, compiled=False), tmp_path)
    assert 0 < opened < 30


def test_a_changed_gguf_file_is_opened_or_refused(
    checkpoint: dict[str, bytes], tmp_path: Path
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes(checkpoint[name])
    good, bad = tmp_path / "good.gguf", tmp_path / "bad" / "bad.gguf"
    convert(tmp_path, "qwen2_moe", good, GGMLQuantizationType.F32)
    open_model(good, compiled=False)
    bad.parent.mkdir()
    (bad.parent / "config.json").write_bytes(checkpoint["config.json"])
    mutator = Mutator(17)
    with patiently(PATIENCE_S):
        for _ in range(30):
            bad.write_bytes(changed_gguf(good.read_bytes(), mutator))
            one_sentence(lambda where: open_model(where, compiled=False), bad)


@pytest.mark.parametrize(
    "name",
    ["../other.safetensors", "/etc/passwd", "a/b.safetensors", "..", "model.bin", "x.pkl", 3, None],
)
def test_an_index_names_files_beside_it_only(
    name: object, checkpoint: dict[str, bytes], tmp_path: Path
) -> None:
    """Neither other folders' files nor pickles are opened, whatever an index says."""
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "other.safetensors").write_bytes(checkpoint["model.safetensors"])
    for each in ("config.json",):
        (folder / each).write_bytes(checkpoint[each])
    (folder / "model.bin").write_bytes(pickle.dumps(Trap()))
    told = {"weight_map": {"model.embed_tokens.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(told))
    assert not one_sentence(lambda where: open_model(where, compiled=False), folder)


class Trap:
    """What must not be unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return pytest.fail, ("it was unpickled",)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "model.safetensors"])
def test_a_pickle_is_never_loaded(file: str, checkpoint: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(checkpoint["config.json"])
    (tmp_path / file).write_bytes(pickle.dumps(Trap()))
    assert not one_sentence(lambda where: open_model(where, compiled=False), tmp_path)


def test_code_beside_a_tokenizer_is_never_run(checkpoint: dict[str, bytes], tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes(checkpoint[name])
    told = {"auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}, "tokenizer_class": "Own"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    with contextlib.suppress(UserError):
        load_tokenizer(tmp_path)
    assert not ran.exists()


def test_a_changed_cluster_file_is_read_or_refused(tmp_path: Path) -> None:
    path, mutator, read = tmp_path / "cluster.yaml", Mutator(11), 0
    with patiently(PATIENCE_S):
        for _ in range(80):
            path.write_bytes(changed_cluster(mutator))
            read += one_sentence(load_cluster, path)
    assert 0 < read < 80


def bomb(levels: int = 9) -> str:
    """Lists of ten aliases to lists of ten aliases to ...: a billion words."""
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 10)}]" for at in range(1, levels)]
    return "\n".join(lines) + "\n"


SERVER = "  - {name: s, tflops: 1, memory_gb: 1}\n"
HUGE = {
    "an alias bomb in its place": bomb() + CLUSTER.replace("tflops: 80", "tflops: *a8"),
    "an alias bomb as servers": bomb() + "name: x\nservers: *a8\n",
    "an alias bomb as a key": bomb() + "? *a8\n: 1\n",
    "a loop": "name: x\nservers: &a [*a]\n",
    "bottomless": "name: " + "[" * 50_000,
    "a number without end": CLUSTER.replace("80", "9" * 100_000),
    "too many servers": "name: x\nservers:\n" + SERVER * (MOST_SERVERS + 1),
    "a million servers": "name: x\nservers:\n" + SERVER * 1_000_000,
    "more than a file may have": "#" * (LARGEST_BYTES + 1),
    "floats that overflow": CLUSTER.replace("80", "1e308"),
    "next to nothing": CLUSTER.replace("80", "1e-320"),
    "no number": CLUSTER.replace("80", ".nan"),
    "a name without end": CLUSTER.replace("tflops: 80", "tflops: x").replace("desk", "d" * 100_000),
}


@pytest.mark.parametrize("what", HUGE)
def test_a_cluster_file_that_would_never_end_is_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(HUGE[what])
    with patiently(PATIENCE_S):
        assert not one_sentence(load_cluster, path)


@pytest.mark.parametrize("what", ["an alias bomb in its place", "bottomless", "a million servers"])
def test_settings_that_would_never_end_are_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(HUGE[what].replace("tflops", "kv-slots"))
    with patiently(PATIENCE_S):
        assert not one_sentence(lambda where: serve_config(where, {"cluster": "local4"}), path)


def test_as_many_servers_as_there_may_be_are_read(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    servers = "".join(SERVER.replace("s,", f"s{n},") for n in range(64))
    path.write_text(f"name: x\nservers:\n{servers}links: {{default: {{gbps: 1, ms: 1}}}}\n")
    assert load_cluster(path).server_count == 64
