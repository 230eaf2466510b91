"""Files that are almost what they should be: artifacts, checkpoints and cluster files."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hostile import Mutator
from timed import timed_machines
from trimmoe.core.machines import load_machines
from trimmoe.core.plan import load_plan
from trimmoe.core.profile import load_profile
from trimmoe.core.trace import load_trace
from worlds import small_world


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A good file and what reads it."""

    content: bytes
    load: Callable[[Path], Any]
    hashed: Callable[[Any], object]
    """Looks at all that was read."""


def artifacts(folder: Path) -> dict[str, Sample]:
    """One of each kind, of a small world."""
    made = small_world(3, layers=3, experts=4, servers=2, sequences=2, length=3)
    machines = timed_machines(made.plan.cluster, made.model)
    found: dict[str, Sample] = {}
    for name, artifact, load in (
        ("profile", made.profile, load_profile),
        ("plan", made.plan, load_plan),
        ("trace", made.trace, load_trace),
        ("machines", machines, load_machines),
    ):
        artifact.save(folder / name)
        content = (folder / name).read_bytes()
        found[name] = Sample(content=content, load=load, hashed=lambda each: each.hash)
    return found


def changed_artifact(content: bytes, mutator: Mutator) -> bytes:
    """Its bytes, its own header, the tensors' header or some numbers are others."""
    size = struct.unpack("<Q", content[:8])[0]
    header, body = json.loads(content[8 : 8 + size]), bytearray(content[8 + size :])
    kind = mutator.upto(6)
    if kind == 0:
        return mutator.bytes(content)
    names = [name for name in header if name != "__metadata__"]
    name = mutator.one_of(names)
    if kind == 1:
        own = json.loads(header["__metadata__"]["trimmoe"])
        header["__metadata__"]["trimmoe"] = _json(mutator.value(own))
    elif kind == 2:
        header[name] = mutator.value(header[name])
    elif kind == 3:
        taken = header.pop(name)
        if mutator.upto(2):
            header[mutator.one_of([*names, "another"])] = taken
    elif kind == 4:
        _reshape(header[name], mutator)
    else:
        _renumber(header[name], body, mutator)
    told = _json(header).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(told)) + told + bytes(body)


def _reshape(entry: dict[str, Any], mutator: Mutator) -> None:
    """The same bytes as another array."""
    shape, kinds = entry["shape"], ("F64", "I64", "U64")
    if entry["dtype"] in kinds and mutator.upto(2):
        entry["dtype"] = mutator.one_of(kinds)
    elif mutator.upto(2) and len(shape) > 1:
        entry["shape"] = mutator.rng.permutation(shape).tolist()
    else:
        entry["shape"] = [int(np.prod(shape))]


def _renumber(entry: dict[str, Any], body: bytearray, mutator: Mutator) -> None:
    """Some of its numbers are extremes."""
    begin, end = entry["data_offsets"]
    width = {"F64": 8, "I64": 8, "F32": 4, "F16": 2}.get(entry["dtype"], 1)
    if end <= begin:
        return
    for _ in range(1 + mutator.upto(3)):
        at = begin + mutator.upto((end - begin) // width) * width
        if entry["dtype"] == "F64":
            value = struct.pack("<d", mutator.one_of((np.nan, np.inf, -np.inf, -1.0, 1e308, 2.0)))
        else:
            value = (mutator.one_of((-1, -(2**31), 2**31 - 1, 2**62, 255)) & (2**64 - 1)).to_bytes(
                8, "little"
            )
        body[at : at + width] = value[:width]


def _json(value: Any) -> str:
    return json.dumps(value, default=repr)


SIZES = (0, 1, -1, 2, 3, 7, 64, 10**6, 2**31, 2**63, 10**30, 1.5, float("inf"), None, "x", [], {})


def changed_checkpoint(folder: Path, good: Mapping[str, bytes], mutator: Mutator) -> None:
    """Write a checkpoint, given as its files' contents, of which something is another."""
    files = dict(good)
    kind = mutator.upto(6)
    weights = mutator.one_of([name for name in files if name.endswith(".safetensors")])
    content = files[weights]
    size = struct.unpack("<Q", content[:8])[0]
    if kind == 0:
        files[mutator.one_of(list(files))] = mutator.bytes(content[: mutator.upto(len(content))])
    elif kind <= 2:
        config = json.loads(files["config.json"])
        key = mutator.one_of(sorted(config))
        config[key] = mutator.one_of(SIZES) if mutator.upto(3) else mutator.value(config[key])
        files["config.json"] = _json(config).encode("utf-8", "surrogatepass")
    else:
        header = json.loads(content[8 : 8 + size])
        name = mutator.one_of([each for each in header if each != "__metadata__"])
        if kind == 3:
            header[name] = mutator.value(header[name])
        elif kind == 4:
            _reshape(header[name], mutator)
        else:
            header[mutator.one_of([*header, "another"])] = header.pop(name)
        told = _json(header).encode("utf-8", "surrogatepass")
        files[weights] = struct.pack("<Q", len(told)) + told + content[8 + size :]
    for name, each in files.items():
        (folder / name).write_bytes(each)


def changed_gguf(content: bytes, mutator: Mutator) -> bytes:
    """A GGUF file whose head is another, in some words of it, or that ends early."""
    if mutator.upto(8) == 0:
        return content[: mutator.upto(len(content))]
    head = bytearray(content[:_GGUF_HEAD])
    for _ in range(1 + mutator.upto(2)):
        at = mutator.upto(len(head) - 8)
        if mutator.upto(2):
            head[at] = mutator.one_of((0, 1, 2, 3, 4, 6, 8, 9, 10, 12, 0x7F, 0x80, 0xFF))
        else:
            word = mutator.one_of((0, 1, 2, 31, 2**31, 2**32, 2**62, 2**63, 2**64 - 1))
            head[at : at + 8] = word.to_bytes(8, "little")
    return bytes(head) + content[_GGUF_HEAD:]


_GGUF_HEAD = 2700
"""Bytes of settings and names of tensors."""
CLUSTER = """
name: home
memory_ratio: 2.0
servers:
  - {name: desk, tflops: 80, memory_gb: 24, users: 3}
  - {name: attic, tflops: 18, memory_gb: 12, users: 1, device: "cuda:1"}
links:
  default: {gbps: 1, ms: 0.5}
  pairs:
    - {between: [desk, attic], gbps: 0.8, ms: 3}
"""
WORDS = (
    "1e308", "-1e308", ".nan", ".inf", "-.inf", "1e-320", "0", "-1", "9" * 5000, "null", "~", "yes",
    "0x7fffffffffffffff", "2001-99-99", "1:2:3", "!!binary x", "!!python/object:os.system ls",
    "!!set {a}", "*a", "&a [1]", "[]", "{}", "[" * 30, "? x", "<<: *a", '"\\ud800"', "é", "\t",
    "!!float x", "!!timestamp x", "!!int 1e5", "- -", "|", ">", "%", "@", "`", "'", '"',
)  # fmt: skip


def changed_cluster(mutator: Mutator) -> bytes:
    """A cluster file with another word, line or byte somewhere."""
    text = CLUSTER
    for _ in range(1 + mutator.upto(2)):
        words = text.split(" ")
        lines = text.split("\n")
        match mutator.upto(5):
            case 0:
                return mutator.bytes(text.encode())
            case 1:
                del lines[mutator.upto(len(lines))]
                text = "\n".join(lines)
            case 2:
                lines.insert(mutator.upto(len(lines)), mutator.one_of(lines))
                text = "\n".join(lines)
            case _:
                at = mutator.upto(len(words))
                tail = "}" * words[at].count("}") if mutator.upto(2) else ""
                words[at] = mutator.one_of(WORDS) + mutator.one_of((",", "", "\n")) + tail
                text = " ".join(words)
    return text.encode("utf-8", "surrogatepass")
