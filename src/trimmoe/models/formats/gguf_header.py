"""What GGUF files say of themselves: settings, and where which tensor lies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from trimmoe.core.errors import UserError
from trimmoe.models.checkpoint import stamp

_KINDS = frozenset(
    {
        *(Kind.F32, Kind.F16, Kind.BF16, Kind.MXFP4),
        *(Kind.Q8_0, Kind.Q5_0, Kind.Q5_1, Kind.Q4_0, Kind.Q4_1),
        *(Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K),
    }
)
"""Encodings that are read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTensor:
    """One tensor of a file. Its last dimension is cut into blocks, encoded one by one."""

    file: Path
    offset: int
    kind: Kind
    shape: tuple[int, ...]
    """Of what is encoded, the last dimension the one that lies together."""

    @property
    def nbytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // block * size

    def read(self, index: int | None = None) -> NDArray[np.float32]:
        """The values, or those of one `index` of the first dimension, whose bytes alone are read.

        Raises UserError if the file is no longer there.
        """
        shape = self.shape if index is None else self.shape[1:]
        size = self.nbytes if index is None else self.nbytes // self.shape[0]
        at = self.offset if index is None else self.offset + index * size
        try:
            stored = np.fromfile(self.file, np.uint8, count=size, offset=at)
            rows = stored.reshape(math.prod(shape[:-1]), -1)
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.file} can no longer be read; leave the checkpoint in place while it is "
                f"used."
            ) from error
        return gguf.dequantize(rows, self.kind).reshape(shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufHeader:
    """Of all parts of one model."""

    files: tuple[Path, ...]
    fields: Mapping[str, Any]
    """Numbers and texts by key; lists, such as the vocabulary, are left out."""
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture"))

    def field(self, key: str, default: Any = None) -> Any:
        """A setting of the architecture; `key` is without its name."""
        return self.fields.get(f"{self.architecture}.{key}", default)


def read_header(files: tuple[Path, ...]) -> GgufHeader:
    """Settings of the first file and tensors of all. Raises UserError for what cannot be read."""
    headers = [_one_header(file, stamp(file)) for file in files]
    tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    return GgufHeader(files=files, fields=headers[0].fields, tensors=tensors)


@lru_cache(maxsize=64)
def _one_header(file: Path, version: tuple[int, int]) -> GgufHeader:
    """Kept, since a vocabulary takes seconds to pass; `version` tells a changed file."""
    try:
        # Offsets that overflow are those of a damaged file, which ends before them.
        with np.errstate(over="ignore"):
            reader = gguf.GGUFReader(file)
    except (OSError, ValueError, KeyError, IndexError, OverflowError) as error:
        raise UserError(
            f"{file} is truncated, damaged or of a newer GGUF than the gguf package knows; fetch "
            f"it again or update gguf."
        ) from error
    if reader.endianess != gguf.GGUFEndian.LITTLE:
        raise UserError(f"{file} is a big-endian GGUF; convert it to little-endian.")
    tensors = {tensor.name: _tensor(file, tensor) for tensor in reader.tensors}
    fields = {
        name: field.contents()
        for name, field in reader.fields.items()
        if field.types and field.types[0] is not gguf.GGUFValueType.ARRAY
    }
    # Nothing of the reader is kept: it maps the whole file.
    return GgufHeader(files=(file,), fields=fields, tensors=tensors)


def _tensor(file: Path, tensor: Any) -> GgufTensor:
    if tensor.tensor_type not in _KINDS:
        raise UserError(
            f"{file} holds {tensor.name} in the GGUF encoding {tensor.tensor_type.name}, which "
            f"TrimMoE cannot read; use the model in one such as Q8_0, Q6_K, Q5_K, Q4_K or Q4_0."
        )
    return GgufTensor(
        file=file,
        offset=int(tensor.data_offset),
        kind=tensor.tensor_type,
        shape=tuple(int(size) for size in reversed(tensor.shape)),
    )
