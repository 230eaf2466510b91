"""A skeleton's dense part filled from a checkpoint, its experts read when they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trimmoe.core.precision import Precision
from trimmoe.models.checkpoint import Checkpoint
from trimmoe.models.experts import ExpertStack, ExpertStacks
from trimmoe.models.family import expert_stacks
from trimmoe.models.general.halves import take_parameters
from trimmoe.models.general.skeleton import Skeleton
from trimmoe.models.general.stored import Stored
from trimmoe.models.passed import BytesRead


def fill(skeleton: Skeleton, stored: Stored, device: torch.device, *, blocks: bool = True) -> None:
    """Give decoder and head their weights, where `blocks` those of layers too, and compute the
    buffers that no file has."""
    model, layers = skeleton.model, f"{skeleton.name}.layers."
    names = [name for name in skeleton.names() if blocks or not name.startswith(layers)]
    _load(model, stored, names, device)
    model.tie_weights()
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    _compute_buffers(skeleton.decoder, device)
    model.requires_grad_(False).eval()


@contextmanager
def filled(skeleton: Skeleton, stored: Stored, device: torch.device, block: int) -> Generator[None]:
    """Within it the modules of a block have their weights."""
    prefix = f"{skeleton.name}.layers.{block}."
    names = [name for name in skeleton.names() if name.startswith(prefix)]
    _load(skeleton.model, stored, names, device)
    yield
    skeleton.layers[block].to("meta")


def _load(model: Any, stored: Stored, names: Collection[str], device: torch.device) -> None:
    meta = model.state_dict()
    exact = tuple(_kept_in_float32(model))
    held: dict[str, Tensor] = {}
    for name, value in stored.dense(names):
        dtype = torch.float32 if any(part in name for part in exact) else meta[name].dtype
        held[name] = value.to(device, dtype, copy=True)
    model.load_state_dict(held, strict=False, assign=True)
    model.requires_grad_(False)


def _kept_in_float32(model: Any) -> set[str]:
    """Parts of names of parameters that are float32 whatever the model is."""
    kept: set[str] = set()
    for module in model.modules():
        for field in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
            kept.update(getattr(module, field, None) or ())
    return kept


@torch.no_grad()
def _compute_buffers(decoder: Any, device: torch.device) -> None:
    """Buffers that are no part of the state: the model's own initialisation makes them."""
    from transformers import initialization

    with initialization.guard_torch_init_functions():
        for module in decoder.modules():
            absent = [
                name
                for name, buffer in module.named_buffers(recurse=False)
                if buffer is not None and buffer.is_meta
            ]
            if not absent:
                continue
            for name in absent:
                module._buffers[name] = torch.empty_like(module._buffers[name], device=device)
            decoder._init_weights(module)


class ExpertReader:
    """Reads experts of MoE layers; `read` counts their bytes."""

    def __init__(
        self,
        skeleton: Skeleton,
        checkpoint: Checkpoint,
        stored: Stored,
        *,
        read: BytesRead,
        dtype: torch.dtype,
        device: torch.device,
        precision: Precision,
    ) -> None:
        self._blocks, self._checkpoint, self._stored = skeleton.moe_blocks, checkpoint, stored
        self._read, self._dtype, self._device = read, dtype, device
        self._precision = precision
        self._holders: list[Any] = [
            skeleton.layers[b].get_submodule(skeleton.experts[b].path) for b in self._blocks
        ]
        for holder in self._holders:
            take_parameters(holder)

    def __call__(self, layer: int, ids: Collection[int]) -> ExpertStack:
        """The experts `ids` of a layer."""
        order = sorted(ids)
        if self._precision is Precision.NONE:
            return ExpertStack(**self._made_of(layer, order))
        # The compiled blocks take long to import.
        from trimmoe.models.general.packed_experts import packed_stack

        each = (self._made_of(layer, [expert]) for expert in order)
        return packed_stack(order, each, self._precision)

    def _made_of(self, layer: int, ids: Sequence[int]) -> dict[str, Any]:
        """What an `ExpertStack` is made of."""
        before = self._checkpoint.bytes_read
        parts = self._stored.experts(self._blocks[layer], ids)
        self._read.experts += self._checkpoint.bytes_read - before
        parts = {name: part.to(self._device, self._dtype) for name, part in parts.items()}
        return _made_of(layer, ids, parts, self._holders[layer])

    def stacks(self, chosen: Sequence[frozenset[int]], *, streamed: bool) -> ExpertStacks:
        """The chosen experts of every MoE layer."""
        if streamed:
            for block in self._blocks:
                self._stored.require_experts(block)
        return expert_stacks(self._checkpoint, self, chosen, streamed=streamed)


def _made_of(
    layer: int, ids: Sequence[int], parts: dict[str, Tensor], holder: Any
) -> dict[str, Any]:
    """Parameters as transformers stacks them, as an `ExpertStack` has them."""
    first = "gate_up_proj" if holder.has_gate else "up_proj"
    up, down = parts[first], parts["down_proj"]
    if holder.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    return {
        "layer": layer,
        "ids": ids,
        "up": up.contiguous(),
        "down": down.contiguous(),
        "activation": _activation(holder),
        "up_bias": parts.get(f"{first}_bias"),
        "down_bias": parts.get("down_proj_bias"),
        "whole": True,
        "weighs_input": getattr(holder, "weighs_input", False),
    }


def _activation(holder: nn.Module) -> Callable[[Tensor], Tensor]:
    """From what the first projection gives to what the second one reads, gate included."""
    act: Any = holder._apply_gate if holder.has_gate else holder.act_fn
    return act
