"""A GGUF model's tensors by transformers' names; of fused experts each one by itself."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from trimmoe.core.errors import UserError
from trimmoe.models.checkpoint import Checkpoint, Entry
from trimmoe.models.family import ExpertNames
from trimmoe.models.formats.gguf_families import extra_blocks, is_extra
from trimmoe.models.formats.gguf_header import GgufHeader, GgufTensor
from trimmoe.models.formats.gguf_made import RECIPES, Made, made_of
from trimmoe.models.formats.gguf_names import EXPERT_NAMES, dense_name, expert_tensor

_ROTATED = re.compile(r"\.(q|k)_proj\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """A tensor of the model in a tensor of a file."""

    tensor: GgufTensor
    shape: tuple[int, ...]
    expert: int | None = None
    """Where in the first dimension it is; None if it is all of it."""
    heads: int | None = None
    """Heads whose rows are in llama.cpp's rotary order; None if they are as transformers has them.
    """

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes // (1 if self.expert is None else self.tensor.shape[0])

    def read(self) -> Tensor:
        values = torch.from_numpy(self.tensor.read(self.expert)).reshape(self.shape)
        return values if self.heads is None else _half_split(values, self.heads)


class GgufCheckpoint(Checkpoint):
    """The tensors of one GGUF model, decoded when they are handed out.

    Experts are listed one by one, by the names of a family that stores them apart.
    """

    def __init__(self, header: GgufHeader, names: ExpertNames) -> None:
        self._pieces = _pieces(header, names)
        entries = {
            name: Entry(
                file=piece.tensor.file,
                dtype="F32" if piece.tensor.kind is Kind.F32 else "BF16",
                shape=piece.shape,
                nbytes=piece.nbytes,
            )
            for name, piece in self._pieces.items()
        }
        super().__init__(header.files[0].parent, entries)

    def tensor(self, name: str) -> Tensor:
        self.bytes_read += self.entry(name).nbytes
        return self._pieces[name].read()

    def row(self, name: str, index: int) -> Tensor:
        entry = self.entry(name)
        self.bytes_read += entry.nbytes // entry.shape[0]
        piece = self._pieces[name]
        if isinstance(piece, Made):
            return piece.row(index)
        assert piece.shape == piece.tensor.shape, f"{name} is read as a whole"
        assert piece.heads is None, f"{name} is read as a whole"
        return torch.from_numpy(piece.tensor.read(index))


def _pieces(header: GgufHeader, names: ExpertNames) -> dict[str, _Piece | Made]:
    architecture = header.architecture
    names = EXPERT_NAMES.get(architecture, names)
    made, used = made_of(header, RECIPES.get(architecture, ()))
    pieces: dict[str, _Piece | Made] = dict(made)
    further = extra_blocks(header) > 0
    for stored, tensor in header.tensors.items():
        if stored in used or (further and is_extra(header, stored)):
            continue
        if (experts := expert_tensor(stored, names)) is not None:
            if experts.expert is not None:
                piece = _Piece(tensor=tensor, shape=tensor.shape)
                pieces[experts.name(experts.expert)] = piece
                continue
            for expert in range(tensor.shape[0]):
                piece = _Piece(tensor=tensor, shape=tensor.shape[1:], expert=expert)
                pieces[experts.name(expert)] = piece
            continue
        name = dense_name(stored, architecture)
        if name is None:
            raise UserError(
                f"{tensor.file} holds a tensor {stored} that a model of the architecture "
                f"{header.architecture} has no place for in TrimMoE; use another conversion of it."
            )
        # llama.cpp keeps a matrix of one row as a vector.
        is_row = name.endswith("shared_expert_gate.weight")
        shape = (1, tensor.shape[-1]) if is_row else tensor.shape
        pieces[name] = _Piece(tensor=tensor, shape=shape, heads=_rotary_heads(header, name))
    return pieces


def _rotary_heads(header: GgufHeader, name: str) -> int | None:
    """Heads of queries or keys whose rows llama.cpp has reordered, as it does for Llama's kind."""
    match = _ROTATED.search(name)
    if match is None or header.architecture != "llama":
        return None
    heads = header.field("attention.head_count")
    return int(heads if match[1] == "q" else header.field("attention.head_count_kv", heads))


def _half_split(rows: Tensor, heads: int) -> Tensor:
    """[heads * size, ...] with rotary pairs side by side to the same, pairs half a head apart."""
    pairs = rows.unflatten(0, (heads, -1, 2))
    return pairs.transpose(1, 2).flatten(0, 2).contiguous()
