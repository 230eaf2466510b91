"""The sizes of a model from its config.json alone, before any weights are fetched.

transformers builds the model on the meta device, where a parameter has a shape and no memory. What
it lists is read the way the headers of weight files are, so that a dry run and a real checkpoint
agree to the byte.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from trimmoe.core.errors import UserError
from trimmoe.core.specs import ModelSpec
from trimmoe.models.checkpoint import Entry, Listing
from trimmoe.models.family import Family, build_spec
from trimmoe.models.load import FAMILIES

_STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """What a model takes."""

    spec: ModelSpec
    """Without a hash: no weights were seen."""
    dtype: str
    stored_bytes: int
    """All weights once, in that dtype; a quantised checkpoint takes less on disk."""
    encoder_expert_bytes: int
    """Routed experts of an encoder, which a plan does not place; 0 without one."""
    kv_bytes_per_token: int
    """Keys and values of one position in all blocks."""


def _described(path: Path, model: Any, dtype: torch.dtype) -> Listing:
    """What the headers would say if there were files."""
    entries = {
        name: Entry(
            file=path,
            dtype=_STORED[dtype],
            shape=tuple(parameter.shape),
            nbytes=parameter.numel() * dtype.itemsize,
        )
        for name, parameter in model.named_parameters()
    }
    return Listing(path.parent, entries)


def sizes_from_config(path: Path) -> ModelSizes:
    """Sizes of the model that a config.json describes, in the dtype it names (else float32).

    Raises `UserError` if there is no such file, it is not JSON or not of a known family.
    """
    raw = _read(path)
    family: Family = importlib.import_module(FAMILIES[raw["model_type"]]).FAMILY
    dtype = _dtype(raw)
    try:
        config = family.config(raw)
        kind: Any = AutoModelForCausalLM
        if config.is_encoder_decoder:
            kind = AutoModelForSeq2SeqLM
        with torch.device("meta"):
            model = kind.from_config(config)
    except Exception as error:  # Config and model classes validate in many ways.
        raise UserError(
            f"{path} is not a valid {raw['model_type']} configuration "
            f"({str(error).splitlines()[0]}); fetch it again."
        ) from error
    described = _described(path, model, dtype)
    name = raw.get("_name_or_path") or path.resolve().parent.name
    spec = build_spec(family.geometry(config), described, name=name, model_hash="", dtype=dtype)
    experts = sum(
        entry.nbytes for stored, entry in described.entries.items() if ".experts." in stored
    )
    return ModelSizes(
        spec=spec,
        dtype=str(dtype).removeprefix("torch."),
        stored_bytes=sum(entry.nbytes for entry in described.entries.values()),
        encoder_expert_bytes=experts - spec.total_expert_bytes,
        kv_bytes_per_token=_kv_elements(config) * dtype.itemsize,
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"Cannot read {path}; give a model's config.json.") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON; fetch it again.") from error
    known = isinstance(raw, dict) and raw.get("model_type") in FAMILIES
    if not known:
        raise UserError(
            f"{path} does not describe a model that TrimMoE knows; its model_type must be one of "
            f"{', '.join(FAMILIES)}."
        )
    return raw


def _dtype(raw: dict[str, Any]) -> torch.dtype:
    named = getattr(torch, str(raw.get("dtype") or raw.get("torch_dtype")), None)
    return named if named in _STORED else torch.float32


def _kv_elements(config: Any) -> int:
    """Elements of the keys and values of one position, self attention only."""
    if config.is_encoder_decoder:
        return 2 * config.num_decoder_layers * config.num_heads * config.d_kv
    heads = config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * size
