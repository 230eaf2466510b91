"""What hostile input does where the input is changed towards code that was not reached yet.

    pip install atheris
    python benchmarks/fuzz_guided.py wire --seconds 600 --folder corpus

`wire`: frames between servers, decoded, checked; `artifacts`: profiles, plans, traces, machines;
`clusters`: cluster files. Begins with good input and what `--folder` has of earlier runs; ends with
the first input that is neither read nor refused in a sentence, and keeps it beside the others. From
a checkout: the parts are those of the tests. Atheris is no dependency of anything else.
"""

from __future__ import annotations

import argparse
import asyncio
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import atheris  # pyright: ignore[reportMissingModuleSource]

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

_SOURCE = Path(__file__).parents[1] / "src"
# Numba cannot compile what atheris has changed.
COMPILED = [
    ".".join(path.relative_to(_SOURCE).with_suffix("").parts)
    for path in (_SOURCE / "trimmoe").rglob("*.py")
    if path.parent.name == "compiled" or "njit" in path.read_text() or "numba" in path.read_text()
]

with atheris.instrument_imports(  # pyright: ignore[reportAttributeAccessIssue]
    include=["trimmoe"], exclude=COMPILED
):
    import hostile_files
    import hostile_wire
    from hostile import Mutator
    from serving import open_tiny
    from trimmoe.core.cluster_file import load_cluster
    from trimmoe.core.errors import UserError

Target = Callable[[bytes], None]
_LONGEST = 1000
"""Characters of a sentence."""
_HANG_S = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=sorted(TARGETS))
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True, help="Where inputs are kept.")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        target, samples = TARGETS[given.what](Path(scratch))
        for number, sample in enumerate(samples):
            (given.folder / f"sample-{number}").write_bytes(sample)
        limits = [f"-max_total_time={given.seconds}", f"-timeout={_HANG_S}", "-max_len=65536"]
        kept = f"-artifact_prefix={given.folder}/found-"
        atheris.Setup(
            [sys.argv[0], *limits, f"-seed={given.seed}", kept, str(given.folder)], target
        )
        atheris.Fuzz()


def wire(folder: Path) -> tuple[Target, Iterable[bytes]]:
    """Each frame behind its length in two bytes."""
    tiny = open_tiny(folder)
    geometry, sent = hostile_wire.geometry_of(tiny), asyncio.run(hostile_wire.recorded(tiny))

    def target(content: bytes) -> None:
        frames, at = [], 0
        while at + 2 <= len(content):
            (size,) = struct.unpack_from("<H", content, at)
            frames.append(content[at + 2 : at + 2 + size])
            at += 2 + size
        if frames:
            hostile_wire.take_apart(frames, RECEIVER, geometry)

    short = (frames for to, frames in sent if to == RECEIVER and max(map(len, frames)) < 1 << 16)
    return target, [
        b"".join(struct.pack("<H", len(each)) + each for each in frames) for frames in short
    ][:400]


def artifacts(folder: Path) -> tuple[Target, Iterable[bytes]]:
    """The first byte says which."""
    made, path = list(hostile_files.artifacts(folder).values()), folder / "changed"

    def target(content: bytes) -> None:
        if content:
            sample = made[content[0] % len(made)]
            path.write_bytes(content[1:])
            _read(lambda: sample.hashed(sample.load(path)))

    return target, [bytes([which]) + sample.content for which, sample in enumerate(made)]


def clusters(folder: Path) -> tuple[Target, Iterable[bytes]]:
    """Files that are there, and what the tests make of them."""
    path, mutator = folder / "cluster.yaml", Mutator(1)

    def target(content: bytes) -> None:
        path.write_bytes(content)
        _read(lambda: load_cluster(path))

    return target, [hostile_files.changed_cluster(mutator) for _ in range(200)]


def _read(load: Callable[[], object]) -> None:
    try:
        load()
    except UserError as error:
        said = str(error)
        assert "\n" not in said, said
        assert len(said) < _LONGEST, said


RECEIVER = "s1"
TARGETS = {each.__name__: each for each in (wire, artifacts, clusters)}

if __name__ == "__main__":
    main()
