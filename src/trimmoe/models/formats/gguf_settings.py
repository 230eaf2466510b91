"""What is asked of the settings and shapes in a GGUF file, or refused."""

from __future__ import annotations

import re
from typing import Any

from trimmoe.core.errors import UserError
from trimmoe.models.formats.gguf_header import GgufHeader


def required(header: GgufHeader, key: str) -> Any:
    """A setting of the architecture. Raises UserError if the file lacks it."""
    value = header.field(key)
    if value is None:
        raise UserError(
            f"{header.files[0]} lacks the setting {header.architecture}.{key}; fetch it again or "
            f"put the model's config.json beside it."
        )
    return value


def rows(header: GgufHeader, name: str) -> int:
    """Rows of a tensor. Raises UserError if the file lacks it."""
    if name not in header.tensors:
        raise UserError(f"{header.files[0]} lacks the tensor {name}; fetch it again.")
    return header.tensors[name].shape[0]


def width(header: GgufHeader, kind: str, default: int | None = None) -> int:
    """Inputs of the first block's tensor of a kind, a regular expression. Raises
    UserError if there is none and no default."""
    pattern = re.compile(rf"blk\.\d+\.{kind}\.weight")
    found = (tensor for name, tensor in header.tensors.items() if pattern.fullmatch(name))
    tensor = next(found, None)
    if tensor is not None:
        return tensor.shape[-1]
    if default is not None:
        return default
    raise UserError(f"{header.files[0]} lacks tensors such as blk.0.{kind}.weight; fetch it again.")
