"""Routed experts of transformers' own models held in few bits.

What an expert gives for a row is the same whatever other rows and experts there are, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
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

Made = dict[str, Any]
"""What an `ExpertStack` is made of, by the names of its arguments."""


class PackedStack(ExpertStack):
    """Experts with any activation and biases."""

    def __init__(self, ids: Sequence[int], each: Iterable[Made], precision: Precision) -> None:
        """`each` is what a stack of one expert after another is made of."""
        self._held_ups: list[Held] = []
        self._held_downs: list[Held] = []

        def hold(expert: int, made: Made) -> None:
            self._held_ups.append(Held(made["up"][0], precision))
            self._held_downs.append(Held(made["down"][0], precision))

        super().__init__(**_held_by(hold, ids, each))

    def _up(self, rows: Tensor, index: int) -> Tensor:
        return _biased(self._held_ups[index].times(rows), self.up_biases[index])

    def _down(self, inner: Tensor, index: int) -> Tensor:
        return _biased(self._held_downs[index].times(inner), self.down_biases[index])

    def _act(self, inner: Tensor) -> Tensor:
        # One by one: torch computes numbers with other bits at other places of a tensor.
        return torch.cat([super(PackedStack, self)._act(row) for row in inner.split(1)])


class GatedStack(ExpertStack):
    """Experts that give down(silu(gate) * up), all of a layer in one compiled call."""

    def __init__(self, ids: Sequence[int], each: Iterable[Made], precision: Precision) -> None:
        """As of `PackedStack`."""
        self._kept: list[Any] = []
        self._weights = np.zeros((max(ids) + 1, columns.EXPERT), dtype=np.int64)

        def hold(expert: int, made: Made) -> None:
            halves = [half.detach().float().numpy() for half in made["up"][0].chunk(2)]
            last = pack(made["down"][0].detach().float().numpy(), precision)
            first, last = placed([pack_joined(halves, precision), last])
            self._kept.append((first, last))
            self._weights[expert] = expert_record(first, last)

        super().__init__(**_held_by(hold, ids, each))
        hidden, routed = self.down.shape[1:]
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


def packed_stack(ids: Sequence[int], each: Iterator[Made], precision: Precision) -> ExpertStack:
    """Experts as they are held in few bits; `each` is what a stack of one after another is made
    of."""
    first = next(each)
    up, down = first["up"], first["down"]
    plain = not first["weighs_input"] and first["up_bias"] is None and first["down_bias"] is None
    is_gated = plain and up.shape[1] == 2 * down.shape[2]
    is_gated = is_gated and _is_silu(first["activation"], up.shape[1])
    kind = GatedStack if is_gated else PackedStack
    return kind(ids, chain([first], each), precision)


def _held_by(hold: Callable[[int, Made], None], ids: Sequence[int], each: Iterable[Made]) -> Made:
    """What a stack of experts is made of that are held elsewhere: `hold` is called with each of
    them, and lets go of it."""
    made: Made = {}
    biases: dict[str, list[Tensor | None]] = {"up_bias": [], "down_bias": []}
    for expert, made in zip(ids, each, strict=True):
        hold(expert, made)
        for name, of_all in biases.items():
            of_all.append(made.get(name))
    count = len(ids)
    shapes = {
        name: torch.empty((count, *made[name].shape[1:]), device="meta") for name in ("up", "down")
    }
    together: Made = {
        name: None if of_all[0] is None else torch.cat([one for one in of_all if one is not None])
        for name, of_all in biases.items()
    }
    return made | shapes | together | {"ids": ids}


def _is_silu(activation: Activation, width: int) -> bool:
    """Whether that is what lies between the projections, with no limit that large numbers meet."""
    inner = 30.0 * torch.randn(16, width, generator=torch.Generator().manual_seed(0))
    gate, up = inner.chunk(2, dim=-1)
    given = activation(inner)
    return given.shape == up.shape and torch.allclose(given, F.silu(gate) * up, 1e-4, 1e-4)


def _biased(rows: Tensor, bias: Tensor | None) -> Tensor:
    return rows if bias is None else rows + bias
