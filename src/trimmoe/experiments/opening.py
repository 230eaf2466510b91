"""Opening what a command line names."""

from __future__ import annotations

from trimmoe.models.base import MoEView


def resolved(model: str) -> str:
    """The folder or hub id of a model; `embedded` is built on first use."""
    if model != "embedded":
        return model
    from trimmoe.models.embedded import ensure_embedded_model

    return str(ensure_embedded_model())


def open_view(path: str, dtype: str, device: str) -> MoEView:
    """A model with all experts and its hash; `dtype` is `auto` or a name torch knows."""
    import torch

    from trimmoe.models.load import open_model

    if dtype == "auto":
        # In bfloat16 the mere shape of a batch flips some per cent of a small model's predictions,
        # which would drown what is to be measured.
        dtype = "float32" if device == "cpu" else "checkpoint"
    wanted = None if dtype == "checkpoint" else getattr(torch, dtype)
    return open_model(path, dtype=wanted, device=device, hashed=True)
