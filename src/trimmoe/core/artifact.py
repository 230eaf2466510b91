"""Artifacts: one safetensors file whose header carries JSON, versioned, hashed, written whole.

An artifact is arrays plus a header. The header says what it is (`kind`), the format version, the
version of TrimMoE that wrote it, the settings and seed that made it and the hashes of its inputs,
so that a number can be traced back to what produced it.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

import trimmoe
from trimmoe.core.errors import UserError

_HEADER_KEY = "trimmoe"


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What an artifact file says about itself."""

    kind: str
    format_version: int
    settings: dict[str, Any] = field(default_factory=dict)
    input_hashes: dict[str, str] = field(default_factory=dict)
    """Hashes of what the artifact was made from, e.g. `model`, `text`, `profile`, `cluster`."""
    seed: int = 0
    trimmoe_version: str = trimmoe.__version__
    extra: dict[str, Any] = field(default_factory=dict)
    """Small non-array content of the artifact itself."""


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path` and rename it into place only on success.

    Raises `UserError` if the folder does not exist or cannot be written.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    except OSError as error:
        raise UserError(
            f"Cannot write {path}: {error.strerror}; choose a folder that exists."
        ) from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def save_artifact(path: Path, header: Header, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays and header to `path`, atomically."""
    packed = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    metadata = {_HEADER_KEY: json.dumps(header_as_json(header), sort_keys=True)}
    with written_whole(path) as temporary:
        save_file(packed, temporary, metadata=metadata)


def header_as_json(header: Header) -> dict[str, Any]:
    """The header as plain JSON types."""
    return {name: getattr(header, name) for name in Header.__slots__}


def load_artifact(
    path: Path, *, kind: str, format_version: int
) -> tuple[Header, dict[str, np.ndarray]]:
    """Read an artifact of one kind and version.

    Raises `UserError` if the file is missing, truncated, of another kind or another version. What
    is in it may still be anything: take it apart within `undamaged`.
    """
    header = _load_header(path, kind)
    if header.format_version != format_version:
        raise UserError(
            f"{path} is a {kind} of format {header.format_version}, this TrimMoE reads format "
            f"{format_version}; make it again with `{_MAKER[kind]}`."
        )
    with undamaged(path, kind):
        return header, load_file(path)


@contextmanager
def undamaged(path: Path, kind: str) -> Iterator[None]:
    """Whatever goes wrong with the content of an artifact in the block is one `UserError`."""
    try:
        yield
    except UserError:
        raise
    except (SafetensorError, OSError, *_AMISS) as error:
        why = str(error).splitlines() or [type(error).__name__]
        raise UserError(
            f"{path} is damaged ({why[0][:200]}); make it again with `{_MAKER[kind]}`."
        ) from error


_AMISS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What Python makes of content that is not what it should be."""


_MAKER = {
    "profile": "trimmoe calibrate",
    "plan": "trimmoe plan",
    "trace": "trimmoe record",
    "machines": "trimmoe probe",
}


def _load_header(path: Path, kind: str) -> Header:
    if not path.is_file():
        raise UserError(f"There is no {kind} at {path}; make one with `{_MAKER[kind]}`.")
    try:
        with safe_open(path, framework="numpy") as opened:
            metadata = opened.metadata() or {}
        header = Header(**json.loads(metadata[_HEADER_KEY]))
        _require_types(header)
    except (SafetensorError, OSError, *_AMISS) as error:
        raise UserError(
            f"{path} is not a TrimMoE {kind} or is damaged; make it again with `{_MAKER[kind]}`."
        ) from error
    if header.kind != kind:
        raise UserError(f"{path} is a {header.kind}, a {kind} is needed; give the right file.")
    return header


def read_names(header: Header, key: str) -> tuple[str, ...]:
    """Distinct names that the header holds under `key`; raises `ValueError` or `KeyError`."""
    names = header.extra[key]
    good = isinstance(names, list) and all(isinstance(name, str) and name for name in names)
    if not good or not names or len(set(names)) < len(names):
        raise ValueError(f"the header's {key}")
    return tuple(names)


def _require_types(header: Header) -> None:
    """Raise `TypeError` unless a header read from JSON is one."""
    plain = {"kind": str, "format_version": int, "settings": dict, "input_hashes": dict}
    plain |= {"seed": int, "trimmoe_version": str, "extra": dict}
    for name, kind in plain.items():
        if not isinstance(getattr(header, name), kind):
            raise TypeError(f"the header's {name}")
    if not all(isinstance(value, str) for value in header.input_hashes.values()):
        raise TypeError("the header's input_hashes")


def file_hash(*paths: Path) -> str:
    """SHA-256 over the contents of files, in order, read in blocks."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as opened:
            while block := opened.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def arrays_hash(header: Header, arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 that identifies an artifact in memory by everything it holds."""
    digest = hashlib.sha256(json.dumps(header_as_json(header), sort_keys=True).encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name}{array.dtype}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
