"""Whatever is in a file, reading it is quick, or refused in one sentence."""

from __future__ import annotations

import json
import traceback
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hostile import Mutator, patiently
from hostile_files import CLUSTER, artifacts, changed_artifact, changed_cluster
from trimmoe.core.cluster_file import MOST_SERVERS, load_cluster
from trimmoe.core.errors import UserError
from trimmoe.core.yaml_file import LARGEST_BYTES
from trimmoe.runtime.launch.config import serve_config

PATIENCE_S = 60.0
"""For all of a test's files; each takes milliseconds."""


def one_sentence(load: Callable[[Path], Any], path: Path) -> bool:
    """Whether a file is read; if not, the error is one line of bounded length."""
    size, said, crash = path.stat().st_size, "", ""
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
    assert not crash, (crash, path.read_bytes()[:2000])
    assert said.count("\n") == 0, said
    assert len(said) < 1000, said[:2000]
    assert peak < 2_000_000 + 100 * size, (peak, size)
    return not said


@pytest.mark.parametrize("kind", ["profile", "plan", "trace", "machines"])
def test_a_changed_artifact_is_read_or_refused(kind: str, tmp_path: Path) -> None:
    sample, path = artifacts(tmp_path)[kind], tmp_path / "changed"
    mutator, read = Mutator(7), 0
    with patiently(PATIENCE_S):
        for _ in range(150):
            path.write_bytes(changed_artifact(sample.content, mutator))
            read += one_sentence(lambda where: sample.hashed(sample.load(where)), path)
    assert 0 < read < 150, "some changes matter and some do not"


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


def test_a_changed_cluster_file_is_read_or_refused(tmp_path: Path) -> None:
    path, mutator, read = tmp_path / "cluster.yaml", Mutator(11), 0
    with patiently(PATIENCE_S):
        for _ in range(250):
            path.write_bytes(changed_cluster(mutator))
            read += one_sentence(load_cluster, path)
    assert 0 < read < 250


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
