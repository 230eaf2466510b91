"""Which checkpoint a server opens, and what users call it."""

from __future__ import annotations

EMBEDDED = "embedded"


def model_folder(model: str) -> str:
    """Where the checkpoint is on this machine, built if it is the embedded one; or its hub id."""
    if model != EMBEDDED:
        return model
    from trimmoe.models.embedded import ensure_embedded_model

    return str(ensure_embedded_model())


def served_name(model: str) -> str:
    """As `model_name`; `embedded` as it is."""
    from trimmoe.models.formats.choose import model_name

    return model_name(model)
