"""The sizes of a model from its config.json alone, before any weights are fetched.

transformers builds the model on the meta device, where a parameter has a shape and no memory. A
decoder-only model of any family is taken apart by `anatomy`; an encoder-decoder's list of
parameters is read the way the headers of weight files are. Multimodal models count with their text
part, which is what is served.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from trimmoe.core.errors import UserError
from trimmoe.core.precision import Precision
from trimmoe.core.specs import ModelSpec
from trimmoe.models.anatomy import Anatomy, Kept, anatomy
from trimmoe.models.checkpoint import Entry, Listing
from trimmoe.models.family import Family, build_spec
from trimmoe.models.general.adapter import GeneralFamily
from trimmoe.models.load import family_of

_STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_SAME_AS = {"kimi_k2": "deepseek_v3"}
"""Published under a name of its own, and built by transformers as another."""
_QUANTISATION = ("quantization_config", "compression_config")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """What a model takes."""

    spec: ModelSpec
    """Without a hash: no weights were seen. Sizes are those held while serving."""
    dtype: str
    precision: Precision
    stored_bytes: int
    """All weights once as the checkpoint has them."""
    stored_as: str
    """Its quantisation, or the dtype."""
    stored_is_known: bool
    """False where the quantisation is not: then `stored_bytes` is that of the dtype."""
    parameters: int
    active_parameters: int
    """All but the routed experts that a token does not activate."""
    embedding_parameters: int
    """Of `active_parameters`, the table of which a token reads one row; 0 if the head shares it."""
    encoder_expert_bytes: int
    """Routed experts of an encoder, which a plan does not place; 0 without one."""
    kv_bytes_per_token: int
    """Keys and values of one position in all blocks."""
    state_bytes: int = 0
    """Recurrent states of one sequence after one token, in all blocks."""


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
    family = family_of(raw["model_type"])
    if isinstance(family, GeneralFamily):
        return _general_sizes(path, raw, family)
    return _sizes(path, raw, family)


def _general_sizes(path: Path, raw: dict[str, Any], family: GeneralFamily) -> ModelSizes:
    settings = {key: value for key, value in raw.items() if key != "quantization_config"}
    try:
        config = family.config(settings)
        geometry = family.geometry(config)
    except UserError:
        raise
    except Exception as error:  # Config and model classes validate in many ways.
        raise _invalid(path, raw, error) from error
    dtype = _dtype(raw)
    spec = build_spec(
        geometry, Listing(path.parent, {}), name=_name(path, raw), model_hash="", dtype=dtype
    )
    kept = family.kept_bytes(config, dtype)
    return ModelSizes(
        spec=spec,
        dtype=str(dtype).removeprefix("torch."),
        stored_bytes=family.parameters(config) * dtype.itemsize,
        encoder_expert_bytes=0,
        kv_bytes_per_token=kept.per_token,
        state_bytes=kept.per_sequence,
    )


def _name(path: Path, raw: dict[str, Any]) -> str:
    return raw.get("_name_or_path") or path.resolve().parent.name


def _invalid(path: Path, raw: dict[str, Any], error: Exception) -> UserError:
    return UserError(
        f"{path} is not a valid {raw['model_type']} configuration "
        f"({str(error).splitlines()[0]}); fetch it again."
    )


def _sizes(path: Path, raw: dict[str, Any], family: Family) -> ModelSizes:
    dtype = _dtype(raw)
    try:
        config = family.config(raw)
        kind: Any = AutoModelForCausalLM
        if config.is_encoder_decoder:
            kind = AutoModelForSeq2SeqLM
        with torch.device("meta"):
            model = kind.from_config(config)
    except Exception as error:  # Config and model classes validate in many ways.
        raise _invalid(path, raw, error) from error
    described = _described(path, model, dtype)
    name, geometry = _name(path, raw), family.geometry(config)
    spec = build_spec(geometry, described, name=name, model_hash="", dtype=dtype)
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
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise UserError(f"{path} does not say what model it describes; give a model's config.json.")
    return raw


def _quantisation(raw: dict[str, Any]) -> dict[str, Any] | None:
    """Of the whole model or of its text part."""
    for place in (raw, raw.get("text_config") or {}):
        for name in _QUANTISATION:
            if place.get(name):
                return dict(place[name])
    return None


def _dtype(raw: dict[str, Any]) -> torch.dtype:
    text = raw.get("text_config") or {}
    said = (part.get(key) for part in (raw, text) for key in ("dtype", "torch_dtype"))
    named = getattr(torch, str(next((one for one in said if one), None)), None)
    return named if named in _STORED else torch.float32


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
