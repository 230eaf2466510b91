"""Cluster files: the machines, links and users of a `ClusterSpec`, as people write them in YAML.

    name: home
    memory_ratio: 2.0            # optional; then only the proportions of memory_gb matter
    servers:
      - {name: desk, tflops: 80, memory_gb: 24, users: 3}
      - {name: attic, tflops: 18, memory_gb: 12, users: 1, device: "cuda:1"}
    links:
      default: {gbps: 1, ms: 0.5}                         # for every pair not listed
      pairs:
        - {between: [desk, attic], gbps: 0.8, ms: 3}      # both ways, unless [attic, desk] is given

Units are decimal: 1 GB is 10^9 bytes, 1 Gbps 10^9 bits per second, 1 TFLOPS 10^12 operations per
second. `users` are weights of where requests enter, 1 if left out. `device` is what a server
computes on: `auto` (the best that its machine has; if left out), `cpu`, `cuda`, `cuda:0` and so on,
or `mps`; two accelerators of a machine are two servers. `gb_per_s` is how fast it reads its memory;
only dry runs ask for it, and only if all servers have it. Whatever is wrong is reported as one
`UserError` that names the file, the place and what to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trimmoe.core.errors import UserError
from trimmoe.core.sample_clusters import cluster_path, sample_names
from trimmoe.core.specs import DEVICE, ClusterSpec, FloatArray
from trimmoe.core.yaml_file import read_yaml, shown

_BYTES_PER_GB = 1e9
_BYTES_PER_S_PER_GBPS = 1e9 / 8
_FLOPS_PER_TFLOPS = 1e12
_S_PER_MS = 1e-3

MOST_SERVERS = 1024
"""Of each pair of them there is something to keep."""
_LEAST, _MOST = 1e-9, 1e9
"""Of what is measured: beyond, times and sizes overflow."""

# Strict, so that `yes` is not taken for 1 nor a quoted text for a number.
Positive = Annotated[float, Field(gt=0, le=_MOST, allow_inf_nan=False, strict=True)]
Delay = Annotated[float, Field(ge=0, le=_MOST, allow_inf_nan=False, strict=True)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Name = Annotated[str, Field(min_length=1, strict=True, pattern=r"\S")]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Server(_Section):
    name: Name
    tflops: Positive
    memory_gb: Positive
    users: NotNegative = 1.0
    gb_per_s: Positive | None = None
    device: Annotated[str, Field(pattern=f"^({DEVICE})$", strict=True)] = "auto"


class _Link(_Section):
    gbps: Positive
    ms: Delay


class _Pair(_Link):
    between: tuple[Name, Name]


class _Links(_Section):
    default: _Link | None = None
    pairs: tuple[_Pair, ...] = ()


class _ClusterFile(_Section):
    name: Name
    memory_ratio: Positive | None = None
    servers: Annotated[tuple[_Server, ...], Field(min_length=1, max_length=MOST_SERVERS)]
    links: _Links = _Links()


def load_cluster(path: Path) -> ClusterSpec:
    """Read a cluster file, or the sample cluster of that name (`core.sample_clusters`); raises
    `UserError` naming file, place and what to do."""
    path = cluster_path(path)
    content = _read_yaml(path)
    try:
        parsed = _ClusterFile.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{path}: {_sentence(error, content)}") from error
    _require_distinct_names(path, parsed)
    _require_sizes(path, parsed)
    bandwidth, delay = _links(path, parsed)
    return ClusterSpec(
        name=parsed.name,
        server_names=tuple(server.name for server in parsed.servers),
        memory_bytes=np.array(
            [round(server.memory_gb * _BYTES_PER_GB) for server in parsed.servers], dtype=np.int64
        ),
        memory_ratio=parsed.memory_ratio,
        flops_per_s=np.array([server.tflops for server in parsed.servers]) * _FLOPS_PER_TFLOPS,
        access_share=_access_share(path, parsed),
        bandwidth_bytes_per_s=bandwidth,
        delay_s=delay,
        devices=tuple(server.device for server in parsed.servers),
        read_bytes_per_s=_read_speeds(parsed),
    )


def _read_speeds(parsed: _ClusterFile) -> FloatArray | None:
    """Bytes/s at which each server reads its memory, [M]; None unless all of them say it."""
    given = [server.gb_per_s for server in parsed.servers]
    known = [speed for speed in given if speed is not None]
    return np.array(known) * _BYTES_PER_GB if len(known) == len(given) else None


def _read_yaml(path: Path) -> Any:
    try:
        return read_yaml(path, "cluster file")
    except FileNotFoundError as error:
        raise UserError(
            f"There is no cluster file at {path}; write one (`trimmoe clusters` shows how) or name "
            f"a sample: {', '.join(sample_names())}."
        ) from error


def _sentence(error: ValidationError, content: Any) -> str:
    """The first problem that pydantic found, as place, trouble and remedy."""
    first = error.errors()[0]
    if not first["loc"]:
        return "the file must be a mapping with `name`, `servers` and `links`; write these keys."
    place = _place(first["loc"], content)
    given = shown(first["input"])
    match first["type"]:
        case "extra_forbidden":
            return f"`{place}` is not a known key; remove it or correct its spelling."
        case "missing":
            return f"`{place}` is missing; add it."
        case "greater_than":
            return f"`{place}` is {given} but must be above zero; correct it."
        case "greater_than_equal":
            return f"`{place}` is {given} but must not be negative; correct it."
        case "less_than_equal":
            return f"`{place}` is {given}, more than there is anywhere; correct it."
        case "finite_number":
            return f"`{place}` is {given}; give a finite number."
        case "float_type" | "float_parsing":
            return f"`{place}` is {given}; give a plain number such as 10 or 0.8."
        case "string_pattern_mismatch" if place.partition(" ")[0].endswith(".device"):
            return f"`{place}` is {given}; write auto, cpu, cuda, cuda:0 and so on, or mps."
        case "string_too_short" | "string_pattern_mismatch":
            return f"`{place}` is empty; give a name."
        case "too_short" if place == "servers":
            return "`servers` is empty; list at least one server."
        case "too_long" if place == "servers":
            return f"`servers` lists more than {MOST_SERVERS} servers; leave some out."
        case _:
            return f"`{place}` is wrong ({first['msg'].lower()}); correct it."


_LONGEST_NAME = 60
"""Of a server, in sentences."""


def _place(location: tuple[int | str, ...], content: Any) -> str:
    """`servers[2].tflops (server attic)`: the path in the file, with the name where it helps."""
    path, name = "", ""
    inside: Any = content
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step[:_LONGEST_NAME]}"
        try:
            inside = inside[step]
        except (KeyError, IndexError, TypeError):
            inside = None
        if isinstance(step, int) and isinstance(inside, dict) and inside.get("name"):
            name = f" (server {str(inside['name'])[:_LONGEST_NAME]})"
    return path.lstrip(".") + name


def _require_distinct_names(path: Path, parsed: _ClusterFile) -> None:
    seen: set[str] = set()
    for index, server in enumerate(parsed.servers):
        if server.name in seen:
            raise UserError(
                f"{path}: `servers[{index}].name`: two servers are called {server.name}; rename "
                "one."
            )
        seen.add(server.name)


def _require_sizes(path: Path, parsed: _ClusterFile) -> None:
    """Raise `UserError` for what is above zero and yet nothing."""
    links = [("links.default", parsed.links.default)]
    links += [(f"links.pairs[{index}]", pair) for index, pair in enumerate(parsed.links.pairs)]
    sizes = [(f"{place}.gbps", link.gbps) for place, link in links if link is not None]
    for index, server in enumerate(parsed.servers):
        place = f"servers[{index}]"
        sizes += [(f"{place}.tflops", server.tflops), (f"{place}.memory_gb", server.memory_gb)]
    if parsed.memory_ratio is not None:
        sizes.append(("memory_ratio", parsed.memory_ratio))
    for place, size in sizes:
        if size < _LEAST:
            raise UserError(f"{path}: `{place}` is {size:g}, next to nothing; correct it.")


def _access_share(path: Path, parsed: _ClusterFile) -> FloatArray:
    users = np.array([server.users for server in parsed.servers])
    # Scaled first, so that weights near the largest float do not overflow in the sum.
    largest = users.max()
    if largest <= 0:
        raise UserError(
            f"{path}: `servers`: the `users` of all servers are zero; give at least one a "
            "positive share."
        )
    return users / largest / (users / largest).sum()


def _links(path: Path, parsed: _ClusterFile) -> tuple[FloatArray, FloatArray]:
    """Bandwidth in bytes/s and delay in s, each [M, M]; a pair holds both ways unless reversed."""
    given = _given_links(path, parsed)
    names = [server.name for server in parsed.servers]
    bandwidth = np.full((len(names), len(names)), np.inf)
    delay = np.zeros_like(bandwidth)
    for i, a in enumerate(names):
        for j, b in enumerate(names):
            if i == j:
                continue
            link = given.get((a, b)) or given.get((b, a)) or parsed.links.default
            if link is None:
                raise UserError(
                    f"{path}: `links` says nothing about {a} and {b}; add `between: [{a}, {b}]` "
                    "to `links.pairs` or a `links.default`."
                )
            bandwidth[i, j] = link.gbps * _BYTES_PER_S_PER_GBPS
            delay[i, j] = link.ms * _S_PER_MS
    return bandwidth, delay


def _given_links(path: Path, parsed: _ClusterFile) -> dict[tuple[str, str], _Link]:
    names = {server.name for server in parsed.servers}
    given: dict[tuple[str, str], _Link] = {}
    for index, pair in enumerate(parsed.links.pairs):
        place = f"{path}: `links.pairs[{index}].between`"
        a, b = pair.between
        for name in (a, b):
            if name not in names:
                raise UserError(
                    f"{place} names {name}, which is no server of this file; use one of "
                    f"{', '.join(sorted(names))}."
                )
        if a == b:
            raise UserError(f"{place} joins {a} with itself; remove it.")
        if (a, b) in given:
            raise UserError(f"{place} gives the link from {a} to {b} again; keep one of them.")
        given[a, b] = pair
    return given
