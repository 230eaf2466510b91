"""What hostile input does, at length; the suite does the same for seconds.

    python benchmarks/fuzz.py decoders --count 1000000 --seed 1

Frames of real answers of a tiny model, changed (`decoders`; `member`: to a real port by a server of
the cluster; `strangers`: by who has no key; `nodes`: well-formed messages to servers in the midst
of answers), changed files (`artifacts`, `checkpoints`, `ggufs`, `clusters`), and requests to the
HTTP interface (`http`). Ends with the first crash, answer that is no single sentence, or hang of a
minute; else prints what became of everything, and how memory grew. From a checkout: the parts are
those of the tests.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from gguf import GGMLQuantizationType

import hostile_files
import hostile_http
import hostile_wire
from hostile import Mutator, patiently
from serving import open_tiny, served
from test_hostile_nodes import storm
from test_models_gguf import convert
from tiny import write_tiny_checkpoint
from trimmoe.core.cluster_file import load_cluster
from trimmoe.core.errors import UserError
from trimmoe.models.load import open_model

PATIENCE_S = 60.0
_SLICE = 10_000
_EACH = 20
"""Requests of a kind for an operation before the next one's turn."""
_LONGEST = 1000
"""Characters of a sentence."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=sorted(KINDS))
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    began_s, before_mb = time.monotonic(), hostile_wire.resident_mb()
    with tempfile.TemporaryDirectory() as folder:
        found = KINDS[given.what](Path(folder), given.count, given.seed)
    for what, times in found.most_common():
        print(f"{times:>9}  {what}")
    took_s, grown_mb = time.monotonic() - began_s, hostile_wire.resident_mb() - before_mb
    print(f"{given.what}: {took_s:.0f} s, resident memory grew by {grown_mb:.0f} MB")


def decoders(folder: Path, count: int, seed: int) -> Counter[str]:
    tiny = open_tiny(folder)
    sent = asyncio.run(hostile_wire.recorded(tiny))
    found, geometry = Counter[str](), hostile_wire.geometry_of(tiny)
    for start in range(0, count, _SLICE):
        some = min(_SLICE, count - start)
        with patiently(PATIENCE_S):
            found += hostile_wire.decoders(sent, geometry, some, seed + start)
    return found


def member(folder: Path, count: int, seed: int) -> Counter[str]:
    sent = asyncio.run(hostile_wire.recorded(open_tiny(folder)))
    return asyncio.run(hostile_wire.member(sent, count, seed))


def strangers(_folder: Path, count: int, seed: int) -> Counter[str]:
    return asyncio.run(hostile_wire.strangers(count, seed))


def nodes(folder: Path, count: int, seed: int) -> Counter[str]:
    tiny, found = open_tiny(folder), Counter[str]()
    for policy in ("exact", "speculative", "trimmoe"):
        network = asyncio.run(storm(tiny, policy, seed, count // 3))
        found += network.told
        found["not decoded"] += network.malformed
    return found


def artifacts(folder: Path, count: int, seed: int) -> Counter[str]:
    mutator, found, path = Mutator(seed), Counter[str](), folder / "changed"
    for kind, sample in hostile_files.artifacts(folder).items():
        for _ in range(count // 4):
            path.write_bytes(hostile_files.changed_artifact(sample.content, mutator))
            with patiently(PATIENCE_S):
                read = _reads(lambda each=sample: each.hashed(each.load(path)))
            found[f"{kind}: {'read' if read else 'refused'}"] += 1
    return found


def checkpoints(folder: Path, count: int, seed: int) -> Counter[str]:
    good, bad = folder / "good", folder / "bad"
    good.mkdir()
    bad.mkdir()
    write_tiny_checkpoint(good, layers=2)
    files = {path.name: path.read_bytes() for path in good.iterdir() if path.is_file()}
    mutator, found = Mutator(seed), Counter[str]()
    for _ in range(count):
        hostile_files.changed_checkpoint(bad, files, mutator)
        with patiently(PATIENCE_S):
            read = _reads(lambda: open_model(bad, compiled=False))
        found["opened" if read else "refused"] += 1
    return found


def ggufs(folder: Path, count: int, seed: int) -> Counter[str]:
    good, path = folder / "good.gguf", folder / "bad" / "bad.gguf"
    write_tiny_checkpoint(folder, layers=2)
    convert(folder, "qwen2_moe", good, GGMLQuantizationType.F32)
    path.parent.mkdir()
    (path.parent / "config.json").write_bytes((folder / "config.json").read_bytes())
    mutator, found, content = Mutator(seed), Counter[str](), good.read_bytes()
    for _ in range(count):
        path.write_bytes(hostile_files.changed_gguf(content, mutator))
        with patiently(PATIENCE_S):
            read = _reads(lambda: open_model(path, compiled=False))
        found["opened" if read else "refused"] += 1
    return found


def clusters(folder: Path, count: int, seed: int) -> Counter[str]:
    mutator, found, path = Mutator(seed), Counter[str](), folder / "cluster.yaml"
    for _ in range(count):
        path.write_bytes(hostile_files.changed_cluster(mutator))
        with patiently(PATIENCE_S):
            found["read" if _reads(lambda: load_cluster(path)) else "refused"] += 1
    return found


def http(folder: Path, count: int, seed: int) -> Counter[str]:
    """Requests that the document allows, and others, until there were so many."""
    found = Counter[str]()
    with served(open_tiny(folder).exact(slots=8, max_waiting=512)) as url:
        while found.total() < count:
            sent = hostile_http.fuzz(url, min(_EACH, count), seed)
            found += Counter({f"{name}: as the document says": n for name, n in sent.items()})
            print(f"{found.total()} requests", flush=True)
            seed += 1
    return found


def _reads(load) -> bool:
    """Whether something is read; fails unless it is refused in a sentence otherwise."""
    try:
        load()
        return True
    except UserError as error:
        said = str(error)
    assert "\n" not in said, said
    assert len(said) < _LONGEST, said
    return False


KINDS = {
    each.__name__: each
    for each in (
        *(decoders, member, strangers, nodes),
        *(artifacts, checkpoints, ggufs, clusters, http),
    )
}


if __name__ == "__main__":
    main()
