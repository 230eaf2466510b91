"""Opening what a command line names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimmoe.core.cores import available_cores
from trimmoe.core.errors import UserError
from trimmoe.core.precision import Precision

if TYPE_CHECKING:
    import torch

    from trimmoe.calibrate.settings import CalibrationSettings
    from trimmoe.models.base import MoEView
    from trimmoe.models.draft import DraftModel
    from trimmoe.policy.settings import PolicySettings

BESIDE_WEIGHTS_BYTES = 2_000_000_000
"""What calibrating takes besides the weights, for the widths of published models."""


def resolved(model: str) -> str:
    """The folder or hub id of a model; `embedded` is built on first use."""
    if model != "embedded":
        return model
    from trimmoe.models.embedded import ensure_embedded_model

    return str(ensure_embedded_model())


def profile_path(given: Path | None, model: str, dtype: str = "auto") -> Path:
    """The profile given, or that which comes with the embedded model. Raises `UserError`."""
    if given is not None:
        return given
    if model != "embedded":
        raise UserError(
            "Give --profile, made by `trimmoe calibrate`: only the embedded model brings one."
        )
    from trimmoe.models.embedded.shipped import SHIPPED_DTYPE, shipped_profile

    return shipped_profile(dtype=SHIPPED_DTYPE if dtype == "auto" else dtype)


def open_view(
    path: str,
    dtype: str,
    device: str,
    *,
    streamed: bool = False,
    quantise: Precision = Precision.NONE,
) -> MoEView:
    """A model with all experts and its hash; `dtype` is `auto` or a name torch knows. Raises
    `UserError`, also where it takes more memory than is free."""
    from trimmoe.models.load import open_model

    wanted = torch_dtype(dtype, device)
    return open_model(
        path,
        dtype=wanted,
        device=device,
        hashed=True,
        streamed=streamed,
        quantise=quantise,
        threads=available_cores(),
        shown=not streamed,
    )


def open_drafts(
    named: str | None, view: MoEView, tokenizer: Any, policy: PolicySettings, *, slots: int
) -> DraftModel | None:
    """The draft model of a command line if it names one. Raises `UserError`."""
    from trimmoe.models.draft import Served, open_draft

    if named is None:
        return None
    require_guesses(policy)
    served = Served(
        tokenizer=tokenizer,
        vocab_size=view.spec.vocab_size,
        dtype=view.dtype,
        device=view.device,
    )
    return open_draft(named, served, slots=slots)


def require_guesses(policy: PolicySettings) -> None:
    """Raise `UserError` unless a policy has any use for a draft model."""
    if not policy.guesses:
        raise UserError(
            f"A draft model guesses what answers go on with, and {policy.name} follows no guesses; "
            "leave out --draft-model or choose a method that does, such as speculative."
        )


def torch_dtype(dtype: str, device: str) -> torch.dtype | None:
    """What `--dtype` means on a device; None is the checkpoint's own."""
    import torch

    if dtype == "auto":
        # In bfloat16 the mere shape of a batch flips some per cent of a small model's predictions,
        # which would drown what is to be measured.
        dtype = "float32" if device == "cpu" else "checkpoint"
    return None if dtype == "checkpoint" else getattr(torch, dtype)


def open_to_calibrate(
    path: str,
    dtype: str,
    device: str,
    settings: CalibrationSettings,
    say: Callable[[str], None],
    *,
    streamed: bool | None = None,
) -> tuple[MoEView, CalibrationSettings]:
    """A model and the settings it is calibrated with, as far as there is memory for both; says what
    there is none for. `streamed` None leaves it to that. Raises `UserError`."""
    if streamed is None and (why := _must_stream(path, dtype, device)):
        say(why)
        streamed = True
    view = open_view(path, dtype, device, streamed=bool(streamed))
    return view, with_room_for_copies(view, settings, say)


def _must_stream(path: str, dtype: str, device: str) -> str | None:
    """Why a model's experts have to be read layer by layer, in a sentence; None if it fits.

    Raises `UserError` if it does not fit even so.
    """
    from trimmoe.models.load import known_device, memory_needs
    from trimmoe.models.memory import available_bytes

    needs = memory_needs(path, dtype=torch_dtype(dtype, device))
    free = available_bytes(known_device(device))
    if free is None or needs.whole_bytes + BESIDE_WEIGHTS_BYTES <= free:
        return None
    least, free_gb = needs.streamed_bytes + BESIDE_WEIGHTS_BYTES, free / 1e9
    if least > free:
        raise UserError(
            f"Even with one layer's experts at a time this takes about {least / 1e9:.1f} GB of "
            f"memory, and {free_gb:.1f} GB are free; choose --dtype bfloat16 if it is not chosen "
            f"yet, or a larger machine (--streamed tries it here all the same)."
        )
    return (
        f"The weights take {needs.whole_bytes / 1e9:.1f} GB and {free_gb:.1f} GB of memory are "
        f"free: reading each layer's experts from disk when they are needed, "
        f"{needs.streamed_bytes / 1e9:.1f} GB at a time (--streamed)."
    )


def with_room_for_copies(
    view: MoEView, settings: CalibrationSettings, say: Callable[[str], None]
) -> CalibrationSettings:
    """The settings, without what copies of experts lose where there is no memory for copies of all
    of them beside the model; says so."""
    from trimmoe.calibrate.rungs import measures_rungs
    from trimmoe.models.memory import available_bytes

    if not measures_rungs(view, settings):
        return settings
    parameters = view.spec.total_expert_bytes // view.spec.activation_bytes
    wanted = Precision.INT8.size_bytes(parameters, view.spec.activation_bytes)
    free = available_bytes(view.device)
    if free is None or wanted <= free:
        return settings
    say(
        f"Copies of all experts take {wanted / 1e9:.1f} GB beside the model, and {free / 1e9:.1f} "
        "GB of memory are free: what they lose is not measured, so that none will run in an "
        "expert's place."
    )
    return replace(settings, rung_tokens=0)
