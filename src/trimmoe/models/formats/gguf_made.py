"""Tensors that llama.cpp stores in several, or otherwise, than transformers' models have."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trimmoe.models.formats.gguf_header import GgufHeader, GgufTensor

Make = Callable[[Sequence[Tensor]], Tensor]
"""From the values of stored tensors, or of one row of each, to the model's or one row of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A tensor of the model that is made of others."""

    tensors: tuple[GgufTensor, ...]
    shape: tuple[int, ...]
    make: Make
    by_row: bool
    """Whether each row of it, one expert's, is made of the same row of the others."""

    @property
    def tensor(self) -> GgufTensor:
        """One that stands for all."""
        return self.tensors[0]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def read(self) -> Tensor:
        """All of it."""
        if self.by_row:
            return torch.stack([self.row(index) for index in range(self.shape[0])])
        return self.make([torch.from_numpy(tensor.read()) for tensor in self.tensors])

    def row(self, index: int) -> Tensor:
        """One expert's."""
        assert self.by_row, "read as a whole"
        return self.make([torch.from_numpy(tensor.read(index)) for tensor in self.tensors])


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How tensors of a block are made."""

    name: str
    """transformers' name within a block."""
    parts: tuple[str, ...]
    """What llama.cpp calls the parts within a block."""
    shape: Callable[[Sequence[tuple[int, ...]]], tuple[int, ...]]
    make: Make
    by_row: bool = True


def made_of(header: GgufHeader, recipes: Sequence[Recipe]) -> tuple[dict[str, Made], set[str]]:
    """Tensors that are made, by the model's names, and the names of all that they are made of."""
    found: dict[str, Made] = {}
    used: set[str] = set()
    blocks = {int(match[1]) for name in header.tensors if (match := _BLOCK.match(name))}
    for block in sorted(blocks):
        for recipe in recipes:
            names = [f"blk.{block}.{part}" for part in recipe.parts]
            if not all(name in header.tensors for name in names):
                continue
            tensors = tuple(header.tensors[name] for name in names)
            found[f"model.layers.{block}.{recipe.name}"] = Made(
                tensors=tensors,
                shape=recipe.shape([tensor.shape for tensor in tensors]),
                make=recipe.make,
                by_row=recipe.by_row,
            )
            used.update(names)
    return found, used


_BLOCK = re.compile(r"blk\.(\d+)\.")


def _in_turn(parts: Sequence[Tensor]) -> Tensor:
    """Rows of two matrices [f, d] in turn, transposed: [d, 2 f]; of vectors [f], numbers [2 f]."""
    both = torch.stack(list(parts), 1).flatten(0, 1)
    return both.T.contiguous() if both.dim() == 2 else both


def _expanding(parts: Sequence[Tensor]) -> Tensor:
    """What expands compressed keys [H, l, p] and values [H, v, l]: [H * (p + v), l]."""
    keys, values = parts
    return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)


RECIPES: dict[str, tuple[Recipe, ...]] = {
    "gpt-oss": (
        Recipe(
            name="mlp.experts.gate_up_proj",
            parts=("ffn_gate_exps.weight", "ffn_up_exps.weight"),
            shape=lambda of: (of[0][0], of[0][2], 2 * of[0][1]),
            make=_in_turn,
        ),
        Recipe(
            name="mlp.experts.gate_up_proj_bias",
            parts=("ffn_gate_exps.bias", "ffn_up_exps.bias"),
            shape=lambda of: (of[0][0], 2 * of[0][1]),
            make=_in_turn,
        ),
        Recipe(
            name="mlp.experts.down_proj",
            parts=("ffn_down_exps.weight",),
            shape=lambda of: (of[0][0], of[0][2], of[0][1]),
            make=lambda parts: parts[0].T.contiguous(),
        ),
        Recipe(
            name="mlp.experts.down_proj_bias",
            parts=("ffn_down_exps.bias",),
            shape=lambda of: of[0],
            make=lambda parts: parts[0],
        ),
    ),
    "deepseek2": (
        Recipe(
            name="self_attn.kv_b_proj.weight",
            parts=("attn_k_b.weight", "attn_v_b.weight"),
            shape=lambda of: (of[0][0] * (of[0][2] + of[1][1]), of[0][1]),
            make=_expanding,
            by_row=False,
        ),
    ),
}
"""By llama.cpp's architecture: experts whose projections are fused and transposed, with biases;
what expands compressed keys and values, of which newer files hold two."""
