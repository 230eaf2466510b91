"""Opening checkpoints: which family, which experts, which dtype, which device."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trimmoe.core.errors import UserError
from trimmoe.core.precision import Precision
from trimmoe.core.specs import IntArray, ModelSpec
from trimmoe.models.base import MoEView
from trimmoe.models.checkpoint import Checkpoint, resolve
from trimmoe.models.family import (
    ExpertChoice,
    Family,
    Wanted,
    aside_experts,
    build_spec,
    chosen_by_layer,
)
from trimmoe.models.formats.choose import (
    folder_of,
    gguf_files,
    model_name,
    open_checkpoint,
    read_settings,
    without_quantisation,
)
from trimmoe.models.hashing import known_hash, model_hash
from trimmoe.models.memory import available_bytes
from trimmoe.models.sane import require_sane, require_sizes
from trimmoe.progress import bytes_bar

__all__ = [
    "FAMILIES",
    "MemoryNeeds",
    "known_device",
    "load_tokenizer",
    "memory_needs",
    "model_hash",
    "model_spec",
    "open_model",
]

FAMILIES = {
    "mixtral": "trimmoe.models.mixtral",
    "olmoe": "trimmoe.models.olmoe",
    "qwen2_moe": "trimmoe.models.qwen2_moe",
    "qwen3_moe": "trimmoe.models.qwen3_moe",
    "switch_transformers": "trimmoe.models.switch",
}
"""Adapter module of each `model_type` that has its own; imported when first needed."""

_DTYPES = (torch.float32, torch.bfloat16)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Opened:
    """A checkpoint of which config.json and the headers have been read."""

    name: str
    path: Path
    """A directory or a GGUF file."""
    family: Family
    config: Any
    checkpoint: Checkpoint

    def spec(
        self, dtype: torch.dtype, *, hashed: bool, quantise: Precision = Precision.NONE
    ) -> ModelSpec:
        digest = model_hash(self.path) if hashed else known_hash(self.path)
        return build_spec(
            self.family.geometry(self.config),
            self.checkpoint,
            name=self.name,
            model_hash=digest or "",
            dtype=dtype,
            precision=quantise,
        )

    def dtype(self, wanted: torch.dtype | None) -> torch.dtype:
        """The dtype to serve in. Raises UserError if it is not one of those supported."""
        dtype = wanted or self.checkpoint.dtype
        if dtype not in _DTYPES:
            raise UserError(
                f"{self.name} would run in {str(dtype).removeprefix('torch.')}; choose float32 or "
                f"bfloat16 as the dtype."
            )
        return dtype

    @property
    def may_be_halved(self) -> bool:
        """Whether what is stored may be such that bfloat16 holds it exactly, as compiled blocks
        then do: it takes as many bits."""
        entries = self.checkpoint.entries.values()
        return sum(each.nbytes for each in entries) >= 2 * sum(each.numel for each in entries)


def open_model(
    path_or_hub_id: str | Path,
    *,
    experts: ExpertChoice = None,
    encoder_experts: ExpertChoice = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    hashed: bool = False,
    streamed: bool = False,
    quantise: Precision = Precision.NONE,
    compiled: bool = True,
    stand_ins: IntArray | None = None,
    input_squares: NDArray[np.float32] | None = None,
    threads: int = 1,
    shown: bool = False,
) -> MoEView:
    """Load the dense part and the chosen experts of a checkpoint.

    `experts` maps an MoE layer to the experts to load (or is a function that does); None loads
    all; `encoder_experts` does the same for an encoder's layers. `dtype` None takes the
    checkpoint's. Only the bytes of what is loaded are read, unless `hashed` asks for
    `spec.model_hash`, which takes the whole files the first time (see `model_spec`). `streamed`
    keeps the chosen experts of one MoE layer in memory at a time, read from the files whenever
    another layer's turn comes. `quantise` holds weights in few bits. In float32 on a processor
    decoders are compiled unless `compiled` forbids it. `stand_ins` [N, E] says in how many bits
    compiled decoders have copies of experts that are not loaded, to guess with; 0 for none; they
    are fitted to what experts read, mean `input_squares` [N, d], where that is known. So many
    `threads` make of weights what is held. `shown`, reading many has a bar. Raises UserError,
    also where that takes more memory than is free.
    """
    opened = _open(path_or_hub_id)
    device = known_device(device)
    dtype = opened.dtype(dtype)
    if not streamed:
        _require_room(opened, experts, dtype, device, quantise)
    # Weights made in inference mode could not be used outside it.
    with torch.inference_mode(False), torch.no_grad(), opened.checkpoint as checkpoint:
        spec = opened.spec(dtype, hashed=hashed, quantise=quantise)
        to_read = sum(entry.nbytes for entry in checkpoint.entries.values()) if shown else 0
        wanted = Wanted(
            experts=experts,
            encoder_experts=encoder_experts,
            streamed=streamed,
            dtype=dtype,
            device=device,
            precision=quantise,
            compiled=compiled,
            stand_ins=stand_ins,
            input_squares=input_squares,
            threads=threads,
        )
        with bytes_bar("Reading the weights", to_read) as checkpoint.told:
            return opened.family.open(opened.config, checkpoint, spec, wanted)


def model_spec(
    path_or_hub_id: str | Path,
    *,
    dtype: torch.dtype | None = None,
    hashed: bool = False,
    quantise: Precision = Precision.NONE,
) -> ModelSpec:
    """Geometry and costs from config.json and the headers of the weight files.

    `model_hash` is the one that `model_hash` has computed for these files before, empty if it has
    not; `hashed` computes it, which reads the weights. Raises UserError.
    """
    opened = _open(path_or_hub_id)
    return opened.spec(opened.dtype(dtype), hashed=hashed, quantise=quantise)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNeeds:
    """What the weights of a model take in memory."""

    whole_bytes: int
    """With all experts, an encoder's too."""
    streamed_bytes: int
    """With the experts of the largest MoE layer, as a streamed view has them at most."""


def memory_needs(path_or_hub_id: str | Path, *, dtype: torch.dtype | None = None) -> MemoryNeeds:
    """From the headers of the weight files; `dtype` None is the checkpoint's. Raises UserError."""
    opened = _open(path_or_hub_id)
    spec = opened.spec(opened.dtype(dtype), hashed=False)
    geometry, entries = opened.family.geometry(opened.config), opened.checkpoint.entries
    aside = aside_experts(geometry, opened.checkpoint) * spec.activation_bytes
    if geometry.expert_parameters is None:
        held = (entry.numel for name, entry in entries.items() if name not in geometry.unread)
        whole = sum(held) * spec.activation_bytes
    else:
        # Files may hold more: parts that see or hear.
        whole = spec.dense_bytes + spec.total_expert_bytes
    return MemoryNeeds(
        whole_bytes=whole,
        streamed_bytes=spec.dense_bytes - aside + int(spec.expert_bytes.sum(axis=1).max()),
    )


def _require_room(
    opened: _Opened,
    experts: ExpertChoice,
    dtype: torch.dtype,
    device: torch.device,
    quantise: Precision,
) -> None:
    """Raise UserError if a model, of which these experts are to be loaded, takes more memory than
    is free; all as of `open_model`. Before it is read, since a machine that runs out of memory
    hangs for minutes."""
    spec = opened.spec(dtype, hashed=False, quantise=quantise)
    chosen = chosen_by_layer(experts, opened.family.geometry(opened.config))
    held = spec.dense_bytes + sum(
        int(spec.expert_bytes[layer, sorted(ids)].sum()) for layer, ids in enumerate(chosen)
    )
    bits = quantise.bits(spec.activation_bytes)
    least = held // 2 if quantise is Precision.NONE and opened.may_be_halved else held
    free = available_bytes(device)
    if free is None or least <= free:
        return
    fewer = [each for each in (Precision.INT8, Precision.INT4) if each.bits(0) < bits]
    sizes = " or ".join(f"{held * each.bits(0) / bits / 1e9:.1f} GB in {each}" for each in fewer)
    hint = f"hold it in fewer bits with --quantise ({sizes}), or " if fewer else ""
    raise UserError(
        f"What is to be held of {opened.name} here takes {least / 1e9:.1f} GB of memory, "
        f"and {free / 1e9:.1f} GB are free; {hint}spread it over more machines."
    )


def load_tokenizer(path_or_hub_id: str | Path) -> Any:
    """The tokenizer beside the weights, else a GGUF file's own. Raises UserError if neither is."""
    from transformers import AutoTokenizer

    path = resolve(path_or_hub_id)
    folder = folder_of(path)
    inside: dict[str, Any] = {}
    if (files := gguf_files(path)) and not any((folder / n).is_file() for n in _TOKENIZER_FILES):
        inside = {"gguf_file": files[0].name}
    try:
        # Nothing of a checkpoint is run, and nobody is asked in a terminal whether it may be.
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **inside)
    except Exception as error:  # Tokenizer classes raise many kinds, none of them ours.
        raise UserError(
            f"{path} has no tokenizer that transformers can load; copy the model's tokenizer "
            f"files there."
        ) from error


def _open(path_or_hub_id: str | Path) -> _Opened:
    path = resolve(path_or_hub_id)
    raw = read_settings(path)
    family = _family(path, raw)
    settings = without_quantisation(raw)
    try:
        require_sizes(raw)
        config = family.config(settings)
        geometry = family.geometry(config)
        require_sane(geometry)
    except UserError:
        raise
    except Exception as error:  # Config classes validate in many ways.
        why = str(error).splitlines() or [type(error).__name__]
        raise UserError(
            f"{folder_of(path) / 'config.json'} is not a valid {raw['model_type']} configuration "
            f"({why[0][:300]}); fetch the checkpoint again."
        ) from error
    return _Opened(
        name=model_name(path_or_hub_id),
        path=path,
        family=family,
        config=config,
        checkpoint=open_checkpoint(path, raw, geometry.expert_names),
    )


def _family(path: Path, raw: dict[str, Any]) -> Family:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise UserError(f"{path} does not say what type of model it holds; fetch it again.")
    return family_of(model_type[:60])


def family_of(model_type: str) -> Family:
    """The adapter of a model type: its own, or the general one."""
    if model_type in FAMILIES:
        return importlib.import_module(FAMILIES[model_type]).FAMILY
    from trimmoe.models.general.adapter import GeneralFamily

    return GeneralFamily(model_type)


def known_device(device: str | torch.device) -> torch.device:
    """The device of this name; `auto` is the best one here. Raises UserError if it is none, or not
    here."""
    if device == "auto":
        return _best_device()
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"{device} is not a device; use auto, cpu, cuda or mps.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("PyTorch sees no CUDA device here; use the device cpu.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"PyTorch sees {torch.cuda.device_count()} CUDA devices here and no {device}; use one "
            f"of cuda:0 to cuda:{torch.cuda.device_count() - 1}."
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("PyTorch sees no Apple GPU here; use the device cpu.")
    return device


def _best_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
