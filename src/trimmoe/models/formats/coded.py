"""A safetensors checkpoint of which several stored tensors make up one of the model's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from trimmoe.core.errors import UserError
from trimmoe.models.checkpoint import PLAIN_DTYPES, Checkpoint, Entry, SafetensorsCheckpoint

Parts = Mapping[str, Tensor]
"""Stored tensors of one matrix, by the role that they play in it."""

_OF_ACTIVATIONS = re.compile(
    r".*\.(?:(?:\w+_)?(?:input|output|activation)|[qkv])_(?:scale|zero_point|global_scale)"
)
"""Names of what quantises activations and caches; here they stay as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Coded:
    """A tensor of the model that the files hold in others."""

    shape: tuple[int, ...]
    """[J, K], or of experts fused [E, J, K]."""
    parts: Mapping[str, str]
    """Names of the stored tensors by role; fused, those whose first dimension is E are cut."""
    decode: Callable[[Parts], Tensor]
    """From the parts of one matrix to its values [J, K] in float32."""


class Scheme(Protocol):
    """What a format's file gives."""

    def __call__(
        self, stored: SafetensorsCheckpoint, settings: Mapping[str, Any]
    ) -> dict[str, Coded]:
        """The coded tensors by the model's names; `settings` is the `quantization_config`.

        Raises UserError for settings and shapes that cannot be read.
        """
        ...


class CodedCheckpoint(Checkpoint):
    """The model's tensors, decoded when they are handed out."""

    def __init__(
        self, stored: SafetensorsCheckpoint, coded: Mapping[str, Coded], method: str
    ) -> None:
        self._stored, self._coded = stored, coded
        entries = _plain(stored, coded, method)
        super().__init__(stored.folder, entries | {n: _entry(stored, c) for n, c in coded.items()})

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    def is_coded(self, name: str) -> bool:
        return name in self._coded

    def tensor(self, name: str) -> Tensor:
        shape, coded = self.entry(name).shape, self._coded.get(name)
        if coded is not None and len(shape) > 2:
            return torch.stack([self.row(name, index) for index in range(shape[0])])
        if coded is None:
            value = self._stored.tensor(name)
        else:
            value = coded.decode(
                {role: self._stored.tensor(part) for role, part in coded.parts.items()}
            )
        self.bytes_read = self._stored.bytes_read
        return value

    def row(self, name: str, index: int) -> Tensor:
        """Of a coded tensor, one of fused experts."""
        coded = self._coded.get(name)
        if coded is None:
            self.entry(name)
            value = self._stored.row(name, index)
        else:
            assert len(coded.shape) == 3, f"{name} is one matrix"
            value = coded.decode(
                {role: self._part(part, coded, index) for role, part in coded.parts.items()}
            )
        self.bytes_read = self._stored.bytes_read
        return value

    def close(self) -> None:
        self._stored.close()

    def _part(self, name: str, coded: Coded, index: int) -> Tensor:
        if self._stored.entry(name).shape[:1] == coded.shape[:1]:
            return self._stored.row(name, index)
        return self._stored.tensor(name)


def misfit(folder: Path, name: str, reason: str) -> UserError:
    """The error for a tensor that is not what its format says."""
    return UserError(
        f"The checkpoint in {folder} cannot be read at {name}: {reason}; fetch it again or use "
        f"another quantisation of the model."
    )


def _plain(
    stored: SafetensorsCheckpoint, coded: Mapping[str, Coded], method: str
) -> dict[str, Entry]:
    """What is stored as it is. Raises UserError for tensors that nothing explains."""
    used = {part for tensor in coded.values() for part in tensor.parts.values()}
    plain: dict[str, Entry] = {}
    for name, entry in stored.entries.items():
        if name in used or _OF_ACTIVATIONS.fullmatch(name):
            continue
        if entry.dtype not in PLAIN_DTYPES:
            raise misfit(
                stored.folder, name, f"a tensor of {entry.dtype} of this name is not {method}"
            )
        plain[name] = entry
    return plain


def _entry(stored: SafetensorsCheckpoint, coded: Coded) -> Entry:
    parts = [stored.entry(part) for part in coded.parts.values()]
    return Entry(
        file=parts[0].file,
        dtype="BF16",
        shape=coded.shape,
        nbytes=sum(part.nbytes for part in parts),
    )
