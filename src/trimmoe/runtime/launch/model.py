"""Which checkpoint a server opens, and what users call it."""

from __future__ import annotations

from pathlib import Path

EMBEDDED = "embedded"


def model_folder(model: str) -> str:
    """Where the checkpoint is on this machine, built if it is the embedded one; or its hub id."""
    if model != EMBEDDED:
        return model
    from trimmoe.models.embedded import ensure_embedded_model

    return str(ensure_embedded_model())


def served_name(model: str) -> str:
    """The last part of a folder's path, a file's without its ending; a hub id or `embedded` as it
    is."""
    folder = Path(model).expanduser()
    if folder.is_file():
        from trimmoe.models.formats.choose import model_name

        return model_name(folder)
    return folder.resolve().name if folder.is_dir() else model
