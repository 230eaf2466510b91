"""What attention of a model keeps of a sequence, found by passing a few tokens on the meta device,
where tensors have shapes and no contents."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from trimmoe.core.errors import UserError
from trimmoe.models.general import attention
from trimmoe.models.general.catalogue import refusal
from trimmoe.models.general.passing import Passing
from trimmoe.models.general.ports import Control, ExpertsPort, put
from trimmoe.models.general.running import Running, quietly
from trimmoe.models.general.skeleton import Skeleton

_ROWS = 2


class Kept(NamedTuple):
    """Bytes in all layers."""

    per_token: int
    per_sequence: int


class _Counting(Passing):
    """Takes all that layers keep and keeps its size alone."""

    def __init__(self) -> None:
        self.keys: dict[tuple[int, str], int] = {}
        self.states: dict[tuple[int, str, int], int] = {}

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, ...]:
        self.keys[layer_idx, "keys"] = (keys.nbytes + values.nbytes) // _ROWS
        return keys, values

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        self.keys[layer_idx, "indexer"] = keys.nbytes // _ROWS
        return keys

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    get_recurrent_state = get_conv_state

    def update_conv_state(
        self,
        states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        width = conv_kernel_size or states.shape[-1]
        self.states[layer_idx, "conv", state_idx] = states[..., 0].nbytes * width
        return states

    def update_recurrent_state(
        self, states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        self.states[layer_idx, "recurrent", state_idx] = states.nbytes
        return states

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return _ROWS, 0

    def commit(self) -> None:
        """Nothing is kept."""


@quietly()
@torch.no_grad()
def kept_of(skeleton: Skeleton) -> Kept:
    """Of a model on the meta device, which cannot be used any further. Raises UserError."""
    for block, shapes in skeleton.experts.items():
        put(skeleton.layers[block], shapes.path, ExpertsPort(Control()))
    attention.use(skeleton.model)
    running, counting = Running(skeleton.decoder, skeleton.layers), _Counting()
    with torch.device("meta"):
        queries = torch.zeros(1, _ROWS, dtype=torch.int64)
    try:
        calls = running.learn(counting, attention.Positions(queries=queries, length=_ROWS))
        weight = skeleton.model.get_input_embeddings().weight
        states = weight.new_zeros(1, _ROWS, weight.shape[1])
        for layer, (args, kwargs) in zip(skeleton.layers, calls, strict=True):
            layer(states, *args, **kwargs | {running.layer_argument: counting})
    except UserError:
        raise
    except Exception as error:  # What a family's own code raises where it cannot be run like this.
        reason = f"cannot be passed layer by layer ({str(error).splitlines()[0]})"
        raise refusal(skeleton.model.config.model_type, reason) from error
    return Kept(sum(counting.keys.values()), sum(counting.states.values()))
