"""Dense weights of transformers' own modules in few bits, multiplied as compiled blocks do it.

Routers stay as they are, since what they say is what everything is decided by; so do matrices of
fewer rows than a panel has, and weights that a module reads without calling their layer.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trimmoe.core.precision import Precision
from trimmoe.models.compiled.calls import multiply
from trimmoe.models.compiled.lanes import LANES
from trimmoe.models.compiled.quantise import pack, placed
from trimmoe.models.compiled.rows import widened
from trimmoe.models.compiled.tables import record
from trimmoe.models.general.ports import ReaderPort, RouterPort


class Held:
    """A matrix [J, K] that rows are multiplied with."""

    def __init__(self, weight: Tensor, precision: Precision) -> None:
        (self.packed,) = placed([pack(weight.detach().float().numpy(), precision)])
        self._record = record(self.packed)

    def times(self, rows: Tensor) -> Tensor:
        """Rows [n, K] times the matrix, float32 [n, J]; a row is the same in any company."""
        count, high = rows.shape[0], self.packed.shape[0]
        out = np.empty((count, high + -high % LANES), dtype=np.float32)
        multiply(self._record, widened(rows.detach()), count, out, torch.get_num_threads())
        return torch.from_numpy(out)[:, :high].contiguous()


class PackedLinear(nn.Module):
    """In place of a linear layer."""

    def __init__(self, linear: nn.Linear, precision: Precision) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.held = Held(linear.weight, precision)

    @property
    def weight(self) -> Tensor:
        """What the matrix stands for, [J, K]."""
        return torch.from_numpy(self.held.packed.restored)

    def forward(self, input: Tensor) -> Tensor:
        given = self.held.times(input.reshape(-1, self.in_features))
        if self.bias is not None:
            given += self.bias
        return given.view(*input.shape[:-1], self.out_features)


class PackedEmbedding(nn.Module):
    """In place of a table of embeddings, which may scale what it gives."""

    def __init__(self, held: Held, scale: Any, padding_idx: int | None) -> None:
        super().__init__()
        self.held, self._scale, self.padding_idx = held, scale, padding_idx

    @property
    def weight(self) -> Tensor:
        """What the table stands for, [V, d]. A decoder that is handed states instead of tokens
        would look their tokens up in it; ours never is."""
        return torch.from_numpy(self.held.packed.restored)

    def forward(self, input: Tensor) -> Tensor:
        rows = self.held.packed.rows(input.reshape(-1).numpy())
        given = torch.from_numpy(rows).view(*input.shape, -1)
        return given if self._scale is None else given * self._scale


def pack_layers(layers: Sequence[nn.Module], precision: Precision) -> None:
    """Hold the linear layers of a model that was taken apart in few bits."""
    for layer in layers:
        routers = [port for port in layer.modules() if isinstance(port, RouterPort)]
        kept = {id(module) for router in routers for module in router.modules()}
        for parent in list(layer.modules()):
            if id(parent) not in kept and not isinstance(parent, ReaderPort):
                _pack_children(parent, kept, precision)


def _pack_children(parent: nn.Module, kept: set[int], precision: Precision) -> None:
    for name, child in list(parent._modules.items()):
        if type(child) is not nn.Linear or child.out_features < LANES or id(child) in kept:
            continue
        if name not in _read_weights(type(parent)):
            parent._modules[name] = PackedLinear(child, precision)


def pack_embeddings(
    model: Any, decoder: nn.Module, held: Held | None, precision: Precision
) -> None:
    """Hold the table of embeddings in few bits; `held` is it where the head shares it."""
    table = model.get_input_embeddings()
    scale = getattr(table, "embed_scale", None)
    if scale is None and type(table) is not nn.Embedding:
        return
    for parent in decoder.modules():
        for name, child in list(parent._modules.items()):
            if child is table:
                held = held or Held(table.weight, precision)
                parent._modules[name] = PackedEmbedding(held, scale, table.padding_idx)


@cache
def _read_weights(kind: type) -> frozenset[str]:
    """Children whose weights a module's own source reads, but to hand them to a kernel that runs
    on accelerators."""
    sources = (
        inspect.getsource(one) for one in kind.__mro__ if one.__module__.startswith("transformers.")
    )
    return frozenset(
        name
        for source in sources
        for name in re.findall(r"(?<!_weight=)self\.(\w+)\.weight", source)
    )
