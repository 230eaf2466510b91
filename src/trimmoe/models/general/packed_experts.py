"""Routed experts of transformers' own models held in few bits.

What an expert gives for a row is the same whatever other rows and experts there are, bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trimmoe.core.precision import Precision
from trimmoe.models.base import DROPPED
from trimmoe.models.compiled import calls, columns
from trimmoe.models.compiled.kinds import NORM_NONE
from trimmoe.models.compiled.quantise import pack, pack_joined, placed
from trimmoe.models.compiled.rows import widened
from trimmoe.models.compiled.tables import expert_record
from trimmoe.models.experts import Activation, ExpertStack
from trimmoe.models.general.packed import Held


class PackedStack(ExpertStack):
    """Experts with any activation and biases."""

    def __init__(self, *, precision: Precision, up: Tensor, down: Tensor, **rest: Any) -> None:
        """`rest` as of `ExpertStack`."""
        super().__init__(up=up.to("meta"), down=down.to("meta"), **rest)
        self._held_ups = [Held(one, precision) for one in up]
        self._held_downs = [Held(one, precision) for one in down]

    def _up(self, rows: Tensor, index: int) -> Tensor:
        return _biased(self._held_ups[index].times(rows), self.up_biases[index])

    def _down(self, inner: Tensor, index: int) -> Tensor:
        return _biased(self._held_downs[index].times(inner), self.down_biases[index])

    def _act(self, inner: Tensor) -> Tensor:
        # One by one: torch computes numbers with other bits at other places of a tensor.
        return torch.cat([super(PackedStack, self)._act(row) for row in inner.split(1)])


class GatedStack(ExpertStack):
    """Experts that give down(silu(gate) * up), all of a layer in one compiled call."""

    def __init__(self, *, precision: Precision, up: Tensor, down: Tensor, **rest: Any) -> None:
        """`rest` as of `ExpertStack`."""
        super().__init__(up=up.to("meta"), down=down.to("meta"), **rest)
        hidden, routed = down.shape[1:]
        self._kept: list[Any] = []
        self._weights = np.zeros((max(self.order) + 1, columns.EXPERT), dtype=np.int64)
        for at, expert in enumerate(self.order):
            halves = [half.detach().float().numpy() for half in up[at].chunk(2)]
            last = pack(down[at].detach().float().numpy(), precision)
            first, last = placed([pack_joined(halves, precision), last])
            self._kept.append((first, last))
            self._weights[expert] = expert_record(first, last)
        calls.prepare_routed()
        self._shape = calls.Shape(
            hidden=hidden,
            heads=1,
            kv_heads=1,
            head=1,
            head_wide=1,
            experts=len(self._weights),
            top_k=1,
            epsilon=0.0,
            renormalise=False,
            qk_norm=NORM_NONE,
            clip=float("inf"),
            routed=routed,
            scale=1.0,
            rotary=0,
        )

    def __call__(self, normed: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
        for expert in set(experts.flatten().tolist()) - {DROPPED}:
            self._at(expert)
        rows = widened(normed.detach())
        given = np.zeros(rows.shape, dtype=np.float64)
        calls.routed(
            self._shape._replace(threads=torch.get_num_threads()),
            self._weights,
            rows,
            np.ascontiguousarray(experts.numpy(), dtype=np.int64),
            np.ascontiguousarray(gates.detach().numpy(), dtype=np.float32),
            given,
        )
        return torch.from_numpy(given)[:, : normed.shape[1]]


def packed_stack(
    *, up: Tensor, down: Tensor, activation: Activation, precision: Precision, **rest: Any
) -> ExpertStack:
    """Experts as they are held in few bits; all else as of `ExpertStack`."""
    plain = not rest["weighs_input"] and rest["up_bias"] is None and rest["down_bias"] is None
    is_gated = plain and up.shape[1] == 2 * down.shape[2] and _is_silu(activation, up.shape[1])
    kind = GatedStack if is_gated else PackedStack
    return kind(precision=precision, up=up, down=down, activation=activation, **rest)


def _is_silu(activation: Activation, width: int) -> bool:
    """Whether that is what lies between the projections, with no limit that large numbers meet."""
    inner = 30.0 * torch.randn(16, width, generator=torch.Generator().manual_seed(0))
    gate, up = inner.chunk(2, dim=-1)
    given = activation(inner)
    return given.shape == up.shape and torch.allclose(given, F.silu(gate) * up, 1e-4, 1e-4)


def _biased(rows: Tensor, bias: Tensor | None) -> Tensor:
    return rows if bias is None else rows + bias
