"""The hash that identifies a model by its contents, kept so that weights are read once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trimmoe.core.artifact import written_whole
from trimmoe.core.errors import UserError
from trimmoe.models.checkpoint import resolve, stamp
from trimmoe.models.formats.choose import weight_files
from trimmoe.progress import bytes_bar

_CHUNK = 16 << 20


def model_hash(path_or_hub_id: str | Path) -> str:
    """SHA-256 over config.json and the contents of the weight files as stored, in hexadecimal.

    File digests are kept in the user's cache by size and modification time. Raises UserError.
    """
    folder = resolve(path_or_hub_id)
    files = weight_files(folder)
    known = _read_sidecar(folder)
    stale = [file for file in files if [*stamp(file)] != known.get(file.name, {}).get("stamp")]
    if stale:
        to_read = sum(file.stat().st_size for file in stale)
        with bytes_bar("Hashing the weights", to_read) as advance:
            for file in stale:
                known[file.name] = {"stamp": [*stamp(file)], "sha256": _digest(file, advance)}
        _write_sidecar(folder, {file.name: known[file.name] for file in files})
    return _combined(files, known)


def known_hash(folder: Path) -> str | None:
    """`model_hash` if it can be told without reading the weights."""
    files = weight_files(folder)
    known = _read_sidecar(folder)
    if any([*stamp(file)] != known.get(file.name, {}).get("stamp") for file in files):
        return None
    return _combined(files, known)


def _combined(files: list[Path], known: dict[str, Any]) -> str:
    text = "".join(f"{file.name} {known[file.name]['sha256']}\n" for file in files)
    return hashlib.sha256(text.encode()).hexdigest()


def _digest(file: Path, advance: Callable[[int], object]) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()


def _sidecar(folder: Path) -> Path:
    from trimmoe.models.embedded.materialise import default_cache_dir

    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:24]
    return default_cache_dir() / "hashes" / f"{name}.json"


def _read_sidecar(folder: Path) -> dict[str, Any]:
    try:
        known = json.loads(_sidecar(folder).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write_sidecar(folder: Path, known: dict[str, Any]) -> None:
    path = _sidecar(folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as temporary:
            temporary.write_text(json.dumps(known, indent=1), encoding="utf-8")
    except (OSError, UserError):
        return  # A cache that cannot be written costs time, nothing else.
