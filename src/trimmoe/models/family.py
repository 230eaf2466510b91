"""What the loader has to know of a family: where its tensors are and what they cost."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trimmoe.core.errors import UserError
from trimmoe.core.precision import Precision
from trimmoe.core.specs import IntArray, ModelSpec
from trimmoe.models.base import MoEView
from trimmoe.models.checkpoint import Checkpoint, Listing, missing_tensors, unfitting
from trimmoe.models.experts import Activation, ExpertStack, ExpertStacks, ReadExperts
from trimmoe.models.passed import BytesRead

ExpertChoice = Mapping[int, Collection[int]] | Callable[[int], Collection[int]] | None
"""Experts to load by MoE layer; layers that a mapping lacks get none; None loads all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertNames:
    """Names of the expert tensors, with `{block}` and `{expert}` to fill in.

    A checkpoint stores its experts either apart, or fused with the expert as first dimension.
    """

    up: tuple[str, ...]
    """Stored apart: the gate projection if there is one, then the up projection."""
    down: str
    fused_up: str | None = None
    fused_down: str | None = None

    def is_fused(self, checkpoint: Listing, block: int) -> bool:
        return self.fused_up is not None and (
            self.fused_up.format(block=block) in checkpoint.entries
        )


_EXPERTS = "model.layers.{block}.mlp.experts."

GATE_UP_DOWN = ExpertNames(
    up=(_EXPERTS + "{expert}.gate_proj.weight", _EXPERTS + "{expert}.up_proj.weight"),
    down=_EXPERTS + "{expert}.down_proj.weight",
    fused_up=_EXPERTS + "gate_up_proj",
    fused_down=_EXPERTS + "down_proj",
)
"""What most decoder-only families call their experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """The shape of one stack of blocks, from config.json alone."""

    family: str
    moe_blocks: tuple[int, ...]
    """Transformer block of each MoE layer."""
    block_count: int
    expert_count: int
    top_k: int
    hidden_size: int
    vocab_size: int
    context_length: int
    gates_renormalised: bool
    expert_names: ExpertNames
    block_prefix: str
    """Start of the names of a block's tensors, with `{block}`."""
    head_names: tuple[str, ...]
    """Tensors that the head multiplies with."""
    unread: tuple[str, ...] = ()
    """Second names of tied tensors, which files may hold and nobody reads."""
    once_per_sequence: tuple[str, ...] = ()
    """Parts of names of matrices that a token does not pass, such as cross attention's keys."""
    aside: str | None = None
    """Start of the names of another stack's tensors: every server holds its experts too."""
    expert_parameters: tuple[int, ...] | None = None
    """Of one expert of each MoE layer, where the names of stored tensors do not say it."""
    dense_flops: tuple[float, ...] | None = None
    """By MoE layer, in the same case, as are the next two."""
    head_flops: float = 0.0
    dense_parameters: int = 0

    def is_aside(self, stored: str) -> bool:
        """Whether a tensor is one of the other stack's."""
        return self.aside is not None and stored.startswith(self.aside)

    def layer_of(self, block: int) -> int | None:
        """MoE layer that a block belongs to, None if it comes after the last one."""
        later = (layer for layer, moe in enumerate(self.moe_blocks) if block <= moe)
        return next(later, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What is wanted of a model, and how it is to be held."""

    experts: ExpertChoice = None
    encoder_experts: ExpertChoice = None
    """Of an encoder's layers."""
    streamed: bool = False
    """Whether the experts of one MoE layer at a time are in memory."""
    dtype: torch.dtype
    device: torch.device
    precision: Precision = Precision.NONE
    compiled: bool = True
    """Whether decoders may be compiled."""
    stand_ins: IntArray | None = None
    """In how many bits copies of other experts are held, [N, E]."""
    input_squares: NDArray[np.float32] | None = None
    """What experts read, to which copies are fitted, means [N, d]."""
    threads: int = 1
    """That turn weights into what is held."""


class Family(Protocol):
    """An adapter file's `FAMILY`."""

    def geometry(self, config: Any) -> Geometry: ...

    def config(self, raw: dict[str, Any]) -> Any: ...

    def open(
        self,
        config: Any,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        wanted: Wanted,
    ) -> MoEView: ...


def refuse_quantised(name: str, precision: Precision) -> None:
    """Raise UserError if weights are to be quantised of what cannot be held in few bits."""
    if precision is not Precision.NONE:
        raise UserError(
            f"{name} cannot be quantised here: only a decoder in float32 on a processor, held "
            f"whole, can; leave out --quantise, or choose that dtype and device."
        )


def build_spec(
    geometry: Geometry,
    checkpoint: Listing,
    *,
    name: str,
    model_hash: str,
    dtype: torch.dtype,
    precision: Precision = Precision.NONE,
) -> ModelSpec:
    """Costs of one stack, from the headers of the weight files; sizes are those of what is held."""
    layers, experts = len(geometry.moe_blocks), geometry.expert_count
    if geometry.expert_parameters is None or geometry.dense_flops is None:
        parameters = np.array(
            [_expert_parameters(geometry, checkpoint, b) for b in geometry.moe_blocks]
        )
        dense = {
            stored: entry
            for stored, entry in checkpoint.entries.items()
            if stored not in geometry.unread
            and (".experts." not in stored or geometry.is_aside(stored))
        }
        flops, head_flops = _dense_flops(geometry, dense)
        dense_count = sum(entry.numel for entry in dense.values())
    else:
        parameters = np.array(geometry.expert_parameters)
        flops, head_flops = np.array(geometry.dense_flops), geometry.head_flops
        dense_count = geometry.dense_parameters
    expert_parameters = np.repeat(parameters[:, None], experts, axis=1)
    return ModelSpec(
        name=name,
        family=geometry.family,
        model_hash=model_hash,
        layer_count=layers,
        expert_count=experts,
        top_k=geometry.top_k,
        hidden_size=geometry.hidden_size,
        vocab_size=geometry.vocab_size,
        context_length=geometry.context_length,
        activation_bytes=dtype.itemsize,
        gates_renormalised=geometry.gates_renormalised,
        expert_bytes=_sizes(expert_parameters, precision, dtype),
        expert_flops=2.0 * expert_parameters,
        layer_dense_flops=flops,
        head_flops=head_flops,
        dense_bytes=precision.size_bytes(dense_count, dtype.itemsize),
    )


def aside_experts(geometry: Geometry, checkpoint: Listing) -> int:
    """Parameters of the routed experts of the stack aside."""
    return sum(
        entry.numel
        for stored, entry in checkpoint.entries.items()
        if geometry.is_aside(stored) and ".experts." in stored
    )


def _sizes(parameters: np.ndarray, precision: Precision, dtype: torch.dtype) -> np.ndarray:
    """Bytes that experts of so many parameters take, of the same shape."""
    sizes = [precision.size_bytes(int(count), dtype.itemsize) for count in parameters.flat]
    return np.array(sizes, dtype=np.int64).reshape(parameters.shape)


def _expert_parameters(geometry: Geometry, checkpoint: Listing, block: int) -> int:
    names = geometry.expert_names
    if names.is_fused(checkpoint, block):
        fused = (names.fused_up or "", names.fused_down or "")
        sizes = [checkpoint.entry(name.format(block=block)).numel for name in fused]
        return sum(sizes) // geometry.expert_count
    apart = [name.format(block=block, expert=0) for name in (*names.up, names.down)]
    return sum(checkpoint.entry(name).numel for name in apart)


def _dense_flops(geometry: Geometry, dense: Mapping[str, Any]) -> tuple[np.ndarray, float]:
    """Twice the matrix elements that a token meets, by MoE layer, and in the head."""
    prefix = re.escape(geometry.block_prefix).replace(r"\{block\}", r"(\d+)")
    in_block = re.compile(prefix)
    flops = np.zeros(len(geometry.moe_blocks))
    head = 2.0 * sum(dense[name].numel for name in geometry.head_names if name in dense)
    for name, entry in dense.items():
        match = in_block.match(name)
        skipped = any(part in name for part in geometry.once_per_sequence)
        if match is None or len(entry.shape) != 2 or skipped:
            continue
        layer = geometry.layer_of(int(match.group(1)))
        if layer is None:
            head += 2.0 * entry.numel
        else:
            flops[layer] += 2.0 * entry.numel
    return flops, head


def expert_reader(
    geometry: Geometry,
    checkpoint: Checkpoint,
    read: BytesRead,
    activation: Activation,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> ReadExperts:
    """What reads experts of a MoE layer and nothing else, and counts their bytes in `read`."""

    def read_experts(layer: int, ids: Collection[int]) -> ExpertStack:
        block, order, before = geometry.moe_blocks[layer], sorted(ids), checkpoint.bytes_read
        up, down = _stack(geometry.expert_names, checkpoint, block, order, dtype, device)
        read.experts += checkpoint.bytes_read - before
        return ExpertStack(layer=layer, ids=order, up=up, down=down, activation=activation)

    return read_experts


def load_experts(
    geometry: Geometry,
    checkpoint: Checkpoint,
    read: ReadExperts,
    choice: ExpertChoice,
    *,
    streamed: bool,
) -> ExpertStacks:
    """The chosen experts of every MoE layer.

    Streamed, nothing is read now but each layer when it is needed.
    """
    chosen = chosen_by_layer(choice, geometry)
    if streamed:
        _require_stored(geometry, checkpoint, chosen)
    return expert_stacks(checkpoint, read, chosen, streamed=streamed)


def expert_stacks(
    checkpoint: Checkpoint,
    read: ReadExperts,
    chosen: Sequence[frozenset[int]],
    *,
    streamed: bool,
) -> ExpertStacks:
    """The chosen experts of every MoE layer, all of which the checkpoint has."""

    def stream_layer(layer: int) -> ExpertStack:
        # The files are closed in between: what they map would count as memory. Weights made in
        # inference mode could not be used outside it.
        with torch.inference_mode(False), torch.no_grad(), checkpoint:
            return read(layer, chosen[layer])

    def read_layer(layer: int) -> ExpertStack:
        return read(layer, chosen[layer])

    return ExpertStacks(chosen, stream_layer if streamed else read_layer, streamed=streamed)


def chosen_by_layer(choice: ExpertChoice, geometry: Geometry) -> tuple[frozenset[int], ...]:
    """Experts of every MoE layer that are to be loaded."""
    return tuple(
        frozenset(chosen_experts(choice, layer, geometry.expert_count))
        for layer in range(len(geometry.moe_blocks))
    )


def chosen_experts(choice: ExpertChoice, layer: int, count: int) -> list[int]:
    """Experts of a layer that are to be loaded, of `count`, in order."""
    if choice is None:
        return list(range(count))
    ids = choice(layer) if callable(choice) else choice.get(layer, ())
    chosen = sorted({int(expert) for expert in ids})
    assert all(0 <= expert < count for expert in chosen), f"layer {layer} has {count} experts"
    return chosen


def _require_stored(
    geometry: Geometry, checkpoint: Checkpoint, chosen: Sequence[Collection[int]]
) -> None:
    """Raise UserError now if a tensor is missing that would be read an hour later."""
    names = geometry.expert_names
    for block, ids in zip(geometry.moe_blocks, chosen, strict=True):
        fused = names.is_fused(checkpoint, block)
        stored = (
            (names.fused_up or "", names.fused_down or "") if fused else (*names.up, names.down)
        )
        for name in {name.format(block=block, expert=expert) for name in stored for expert in ids}:
            checkpoint.entry(name)


def _stack(
    names: ExpertNames,
    checkpoint: Checkpoint,
    block: int,
    ids: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Stacked `up` [E, g, d] and `down` [E, d, f] of the experts `ids`."""
    ups, downs = zip(*(_read_expert(names, checkpoint, block, i) for i in ids[:1]), strict=True)
    shapes = _shapes(ups[0], downs[0])
    if any(len(shape) != 2 for shape in shapes) or len({shape[1] for shape in shapes[:-1]}) > 1:
        raise unfitting(checkpoint, names.down.format(block=block, expert=ids[0]))
    rows = sum(part.shape[0] for part in ups[0])
    up = torch.empty((len(ids), rows, ups[0][0].shape[1]), dtype=dtype, device=device)
    down = torch.empty((len(ids), *downs[0].shape), dtype=dtype, device=device)
    for index, expert in enumerate(ids):
        parts, last = (
            (ups[0], downs[0]) if index == 0 else _read_expert(names, checkpoint, block, expert)
        )
        if _shapes(parts, last) != shapes:
            raise unfitting(checkpoint, names.down.format(block=block, expert=expert))
        start = 0
        for part in parts:
            up[index, start : start + part.shape[0]] = part.to(device, dtype)
            start += part.shape[0]
        down[index] = last.to(device, dtype)
    return up, down


def _shapes(up: Sequence[Tensor], down: Tensor) -> list[torch.Size]:
    return [part.shape for part in (*up, down)]


def _read_expert(
    names: ExpertNames, checkpoint: Checkpoint, block: int, expert: int
) -> tuple[list[Tensor], Tensor]:
    if names.is_fused(checkpoint, block):
        fused_up, fused_down = names.fused_up or "", names.fused_down or ""
        up = checkpoint.row(fused_up.format(block=block), expert)
        return [up], checkpoint.row(fused_down.format(block=block), expert)
    ups = [checkpoint.tensor(name.format(block=block, expert=expert)) for name in names.up]
    return ups, checkpoint.tensor(names.down.format(block=block, expert=expert))


def require_dense(
    module: nn.Module, checkpoint: Checkpoint, stored_name: Callable[[str], str]
) -> None:
    """Raise UserError unless the checkpoint has all parameters of a module, in their shapes."""
    wanted = {name: stored_name(name) for name, _ in module.named_parameters()}
    absent = [stored for stored in wanted.values() if stored not in checkpoint.entries]
    if absent:
        raise missing_tensors(checkpoint.folder, absent)
    for name, parameter in module.named_parameters():
        if checkpoint.entries[wanted[name]].shape != tuple(parameter.shape):
            raise unfitting(checkpoint, wanted[name])


def load_dense(
    module: nn.Module,
    checkpoint: Checkpoint,
    *,
    stored_name: Callable[[str], str],
    dtype: torch.dtype | None,
    device: torch.device,
    skips: str | None = None,
) -> None:
    """Fill a module made on the meta device from the checkpoint, tied parameters once, but for
    those whose names begin with `skips`. Without a `dtype` weights stay as they are stored, where
    they are."""

    def held(weights: Tensor) -> Tensor:
        return weights if dtype is None else weights.to(device, dtype, copy=True)

    # One after the other: what is decoded from files is there twice meanwhile.
    state = {
        name: held(checkpoint.tensor(stored_name(name)))
        for name, _ in module.named_parameters()
        if skips is None or not name.startswith(skips)
    }
    module.load_state_dict(state, strict=False, assign=True)
    module.requires_grad_(False).eval()
