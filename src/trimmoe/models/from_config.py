"""The sizes of a model from its config.json alone, before any weights are fetched.

transformers builds the model on the meta device, where a parameter has a shape and no memory. A
decoder-only model of any family is taken apart by `anatomy`; an encoder-decoder's list of
parameters is read the way the headers of weight files are. Of a multimodal model only the decoder
and the head count, which are what is served.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForSeq2SeqLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from trimmoe.core.errors import UserError
from trimmoe.core.precision import Precision
from trimmoe.core.specs import ModelSpec
from trimmoe.models.anatomy import Anatomy, Kept, anatomy
from trimmoe.models.checkpoint import Entry, Listing
from trimmoe.models.family import Family, aside_experts, build_spec
from trimmoe.models.formats.choose import quantisation, without_quantisation
from trimmoe.models.general.adapter import GeneralFamily
from trimmoe.models.general.catalogue import ALIASES, any_class_of
from trimmoe.models.general.skeleton import decoder_of
from trimmoe.models.load import FAMILIES, family_of
from trimmoe.models.stored import is_known, quantisation_name, stored_bytes

_STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


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
    """Routed experts of an encoder, within the dense part: a plan does not place them."""
    kept: Kept
    """What is kept of a sequence, in elements."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one position in all blocks, before any window is full."""
        return (self.kept.per_position + self.kept.windowed) * self._itemsize

    @property
    def state_bytes(self) -> int:
        """Recurrent states of one sequence, all that are kept."""
        return self.kept.state_bytes(self._itemsize)

    def cache_bytes(self, positions: int) -> int:
        """All that is kept of a sequence of so many positions."""
        return self.kept.bytes(positions, self._itemsize)

    @property
    def _itemsize(self) -> int:
        return self.spec.activation_bytes


def sizes_from_config(path: Path, precision: Precision = Precision.NONE) -> ModelSizes:
    """Sizes of the model that a config.json describes, in the dtype it names (bfloat16 for one
    that is stored quantised and names none, else float32) or in `precision`.

    Raises `UserError` if there is no such file, it is not JSON, transformers does not know what it
    describes or that has no routed experts.
    """
    raw = _read(path)
    dtype = _dtype(raw)
    name = raw.get("_name_or_path") or path.resolve().parent.name
    config, model = _on_meta(path, raw)
    if config.is_encoder_decoder:
        return _encoder_decoder(path, raw, config, model, name, dtype, precision)
    parts = anatomy(model, config)
    settings = _quantisation(raw)
    return ModelSizes(
        spec=_spec(parts, config, raw["model_type"], name, dtype, precision),
        dtype=_name(dtype),
        precision=precision,
        stored_bytes=stored_bytes(model, settings, dtype.itemsize),
        stored_as=quantisation_name(settings) or _name(dtype),
        stored_is_known=is_known(settings),
        parameters=parts.parameters,
        active_parameters=parts.active_parameters,
        embedding_parameters=parts.embedding_parameters,
        encoder_expert_bytes=0,
        kept=parts.kept,
    )


def require_served(path: Path) -> None:
    """Raise `UserError` unless the model that a config.json describes can be served."""
    raw = _read(path)
    family = family_of(raw["model_type"])
    try:
        family.geometry(family.config(without_quantisation(raw)))
    except UserError:
        raise
    except Exception as error:  # Config and model classes validate in many ways.
        raise _invalid(path, raw, error) from error


def _on_meta(path: Path, raw: dict[str, Any]) -> tuple[Any, Any]:
    """The text part's configuration and the model without weights."""
    try:
        config = GeneralFamily(raw["model_type"]).config(without_quantisation(raw))
        with torch.device("meta"):
            if config.is_encoder_decoder:
                return config, AutoModelForSeq2SeqLM.from_config(config)
            name: str = raw["model_type"]
            kind = any_class_of(ALIASES.get(name, name))
            model = kind(config)
    except UserError:
        raise
    except Exception as error:  # Config and model classes validate in many ways.
        raise _invalid(path, raw, error) from error
    if (decoder := decoder_of(model)) is None:
        return config.get_text_config(decoder=True), model
    _keep_only(model, (decoder, model.get_output_embeddings()))
    return decoder.config, model


def _keep_only(model: nn.Module, kept: tuple[nn.Module | None, ...]) -> None:
    """Take everything out of a model that is neither in these modules nor around them."""
    for name, child in list(model.named_children()):
        if any(child is one for one in kept):
            continue
        if any(inner is one for inner in child.modules() for one in kept):
            _keep_only(child, kept)
        else:
            delattr(model, name)
    for name in (*model._parameters, *model._buffers):
        delattr(model, name)


def _invalid(path: Path, raw: dict[str, Any], error: Exception) -> UserError:
    said = str(error).splitlines()
    return UserError(
        f"{path} is not a valid {raw['model_type']} configuration "
        f"({said[0] if said else type(error).__name__}); fetch it again."
    )


def _spec(
    parts: Anatomy, config: Any, family: str, name: str, dtype: torch.dtype, precision: Precision
) -> ModelSpec:
    layers, experts = len(parts.moe_blocks), parts.expert_count
    size = precision.size_bytes
    flops, head = np.zeros(layers), 2.0 * parts.head_matrix
    for block, matrix in enumerate(parts.block_matrix):
        layer = int(np.searchsorted(parts.moe_blocks, block))
        if layer < layers:
            flops[layer] += 2.0 * matrix
        else:
            head += 2.0 * matrix
    each = np.array([size(count, dtype.itemsize) for count in parts.expert_parameters])
    counts = np.array(parts.expert_parameters, dtype=np.float64)
    return ModelSpec(
        name=name,
        family=family,
        model_hash="",
        layer_count=layers,
        expert_count=experts,
        top_k=parts.top_k,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        context_length=int(getattr(config, "max_position_embeddings", 0) or 0),
        activation_bytes=dtype.itemsize,
        gates_renormalised=bool(getattr(config, "norm_topk_prob", True)),
        expert_bytes=np.repeat(each.astype(np.int64)[:, None], experts, axis=1),
        expert_flops=np.repeat(2.0 * counts[:, None], experts, axis=1),
        layer_dense_flops=flops,
        head_flops=head,
        dense_bytes=size(parts.dense_parameters, dtype.itemsize),
    )


def _encoder_decoder(
    path: Path,
    raw: dict[str, Any],
    config: Any,
    model: Any,
    name: str,
    dtype: torch.dtype,
    precision: Precision,
) -> ModelSizes:
    if raw["model_type"] not in FAMILIES:
        raise UserError(
            f"{path} describes a {raw['model_type']}, which has an encoder; of such models only "
            "switch_transformers is known."
        )
    family: Family = importlib.import_module(FAMILIES[raw["model_type"]]).FAMILY
    described = _described(path, model, dtype)
    geometry = family.geometry(config)
    spec = build_spec(
        geometry,
        described,
        name=name,
        model_hash="",
        dtype=dtype,
        precision=precision,
    )
    experts = sum(
        entry.numel for stored, entry in described.entries.items() if ".experts." in stored
    )
    total = sum(entry.numel for entry in described.entries.values())
    in_encoder = precision.size_bytes(aside_experts(geometry, described), dtype.itemsize)
    heads = config.num_decoder_layers * config.num_heads * config.d_kv
    return ModelSizes(
        spec=spec,
        dtype=_name(dtype),
        precision=precision,
        stored_bytes=total * dtype.itemsize,
        stored_as=_name(dtype),
        stored_is_known=True,
        parameters=total,
        active_parameters=total - round(experts * (1.0 - spec.top_k / spec.expert_count)),
        embedding_parameters=0,
        encoder_expert_bytes=in_encoder,
        kept=Kept(per_position=2 * heads, windowed=0, window=0, convolved=0, recurrent=0),
    )


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


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"Cannot read {path}; give a model's config.json.") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON; fetch it again.") from error
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    if not isinstance(kind, str) or ALIASES.get(kind, kind) not in CONFIG_MAPPING:
        raise UserError(
            f"{path} does not describe a model that the installed transformers knows; its "
            f"model_type is {kind!r}."
        )
    return raw


def _quantisation(raw: dict[str, Any]) -> dict[str, Any] | None:
    """Of the whole model or of its text part."""
    found = quantisation(raw) or quantisation(raw.get("text_config") or {})
    return dict(found) if found else None


def _dtype(raw: dict[str, Any]) -> torch.dtype:
    text = raw.get("text_config") or {}
    said = (place.get(key) for place in (raw, text) for key in ("dtype", "torch_dtype"))
    named = getattr(torch, str(next((value for value in said if value), None)), None)
    if named in _STORED:
        return named
    return torch.float32 if _quantisation(raw) is None else torch.bfloat16


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
