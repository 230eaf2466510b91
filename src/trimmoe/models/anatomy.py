"""What a decoder-only model of transformers consists of, read off the model on the meta device.

There a parameter has a shape and no memory, so the largest model takes a tenth of a second. Nothing
here knows a family: routed experts are what lies in a module called `experts`, blocks are the list
that this module is in, and what a block keeps of a sequence follows from its projections.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from trimmoe.core.errors import UserError
from trimmoe.models.cache import SNAPSHOTS

EXPERTS = "experts"
_COMPRESSED = ("kv_a_proj_with_mqa", "kv_a_proj")
_FUSED = ("qkv_proj", "Wqkv", "query_key_value")
_RECURRENT = "update_recurrent_state("
_TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_k", "num_experts_per_token", "moe_topk")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Elements that a model keeps of one sequence, in all blocks."""

    per_position: int
    """Keys and values of a position where all are attended to, compressed ones as they are."""
    windowed: int
    """Keys and values of a position that leaves again."""
    window: int
    """Positions after which it does; 0 without sliding windows."""
    convolved: int
    """States of convolutions, as many as are kept to take tokens back, however long the sequence
    is."""
    recurrent: int
    """Recurrent states, as many; in float32 whatever the rest is."""

    def bytes(self, positions: int, itemsize: int) -> int:
        """Of so many positions, in numbers of this size."""
        windowed = self.windowed * min(positions, self.window)
        return (self.per_position * positions + windowed) * itemsize + self.state_bytes(itemsize)

    def state_bytes(self, itemsize: int) -> int:
        """Of all states, where other numbers have this size."""
        return self.convolved * itemsize + self.recurrent * 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Anatomy:
    """Numbers of parameters of B blocks, of which some have E routed experts."""

    moe_blocks: tuple[int, ...]
    block_count: int
    expert_count: int
    top_k: int
    expert_parameters: tuple[int, ...]
    """Of one expert, by MoE layer."""
    block_matrix: tuple[int, ...]
    """Matrix elements of each block that a token meets, routed experts left out."""
    head_matrix: int
    """The same of what follows the last block."""
    embedding_parameters: int
    """Of the table that a token reads one row of, 0 where the head multiplies with it."""
    parameters: int
    """All of them, once."""
    kept: Kept

    @property
    def routed_parameters(self) -> int:
        return self.expert_count * sum(self.expert_parameters)

    @property
    def dense_parameters(self) -> int:
        return self.parameters - self.routed_parameters

    @property
    def active_parameters(self) -> int:
        """All but the routed experts that a token does not activate."""
        return self.dense_parameters + self.top_k * sum(self.expert_parameters)


def anatomy(model: Any, config: Any) -> Anatomy:
    """Of a model on the meta device and its text configuration.

    Raises `UserError` that names what was not found.
    """
    found = {name: module for name, module in model.named_modules() if _is_experts(name, module)}
    places = {_place(name): module for name, module in found.items()}
    if not places or None in places:
        raise UserError(
            f"{type(model).__name__} has no block with a module `experts`; only models with routed "
            "experts can be planned."
        )
    prefixes = {place[0] for place in places if place is not None}
    if len(prefixes) != 1:
        raise UserError(
            f"{type(model).__name__} has experts in {len(prefixes)} stacks, not in one."
        )
    prefix = prefixes.pop()
    of_block = {place[1]: module for place, module in places.items() if place is not None}
    moe_blocks = tuple(sorted(of_block))
    counts = {_expert_count(of_block[block]) for block in moe_blocks}
    if len(counts) != 1:
        raise UserError(f"{type(model).__name__} has layers of {sorted(counts)} experts.")
    experts = counts.pop()
    blocks = model.get_submodule(prefix)
    sizes = tuple(_parameters(of_block[block]) // experts for block in moe_blocks)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is None or head.weight is embedding.weight
    return Anatomy(
        moe_blocks=moe_blocks,
        block_count=len(blocks),
        expert_count=experts,
        top_k=_top_k(config),
        expert_parameters=sizes,
        block_matrix=tuple(_matrix_elements(block) for block in blocks),
        head_matrix=(embedding if head is None else head).weight.numel(),
        embedding_parameters=0 if tied else embedding.weight.numel(),
        parameters=_parameters(model) + _stored_buffers(model),
        kept=_kept(blocks, config),
    )


def _is_experts(name: str, module: nn.Module) -> bool:
    return name.rpartition(".")[2] == EXPERTS and next(module.parameters(), None) is not None


def _place(name: str) -> tuple[str, int] | None:
    """The list of blocks that a module is in, and which of them."""
    steps = name.split(".")
    at = next((index for index, step in enumerate(steps) if step.isdigit()), None)
    return None if at is None else (".".join(steps[:at]), int(steps[at]))


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _stored_buffers(model: nn.Module) -> int:
    """Elements that checkpoints have beside parameters, such as routers' corrections."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    state = model.state_dict()
    return sum(
        found.numel()
        for name, found in state.items()
        if name not in parameters and found.is_floating_point()
    )


def _expert_count(experts: nn.Module) -> int:
    if isinstance(experts, (nn.ModuleList, nn.ModuleDict)):
        return len(experts)
    return next(experts.parameters()).shape[0]


def _top_k(config: Any) -> int:
    named = (getattr(config, name, None) for name in _TOP_K)
    found = next((value for value in named if value is not None), None)
    if found is None:
        raise UserError(
            f"The configuration of {config.model_type} does not say how many experts a token "
            f"activates; it has none of {', '.join(_TOP_K)}."
        )
    return int(found)


def _matrix_elements(block: nn.Module) -> int:
    return sum(
        parameter.numel()
        for name, parameter in block.named_parameters()
        if parameter.dim() == 2 and f".{EXPERTS}." not in f".{name}"
    )


def _kept(blocks: Any, config: Any) -> Kept:
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(blocks)
    whole = windowed = convolved = recurrent = 0
    window = int(getattr(config, "sliding_window", None) or 0)
    everywhere = window and "layer_types" not in config.to_dict()
    for block, kind in zip(blocks, kinds, strict=False):
        positions, *state = _block_kept(block, config)
        if kind == "sliding_attention" or everywhere:
            windowed += positions
        else:
            whole += positions
        convolved, recurrent = convolved + state[0], recurrent + state[1]
    return Kept(
        per_position=whole,
        windowed=windowed,
        window=window,
        convolved=SNAPSHOTS * convolved,
        recurrent=SNAPSHOTS * recurrent,
    )


def _indexed(attention: Any) -> int:
    """What an indexer keeps of a position to choose those that are attended to."""
    key = getattr(getattr(attention, "indexer", None), "wk", None)
    return 0 if key is None else _outputs(key)


def _outputs(projection: Any) -> int:
    """How many numbers a projection makes of a state."""
    weight = getattr(projection, "weight", None)
    if weight is None:
        raise UserError(
            f"How much {type(projection).__name__} makes of a state cannot be read off it, nor "
            f"what this model keeps of a sequence; TrimMoE cannot plan it."
        )
    return weight.shape[0]


def _block_kept(block: Any, config: Any) -> tuple[int, int, int]:
    """Elements of a position, of a convolution's state and of a recurrent one."""
    modules: list[Any] = list(block.modules())
    for module in modules:
        if (state := _state(module)) is not None:
            return 0, *state
        for name in _COMPRESSED:
            if hasattr(module, name):
                return _outputs(getattr(module, name)) + _indexed(module), 0, 0
        if hasattr(module, "k_proj"):
            value = getattr(module, "v_proj", None)
            keys = _outputs(module.k_proj)
            return keys + (keys if value is None else _outputs(value)), 0, 0
        if any(hasattr(module, name) for name in _FUSED):
            heads = config.num_attention_heads
            size = getattr(config, "head_dim", None) or config.hidden_size // heads
            return 2 * size * (getattr(config, "num_key_value_heads", None) or heads), 0, 0
    return 0, 0, 0


def _state(module: Any) -> tuple[int, int] | None:
    """Elements of a recurrent module's convolution and of its state; None if it is none."""
    convolution = getattr(module, "conv1d", None) or getattr(module, "conv", None)
    if not isinstance(convolution, nn.Conv1d):
        return None
    before = convolution.weight.shape[0] * convolution.weight.shape[-1]
    for factors in (
        ("num_v_heads", "head_k_dim", "head_v_dim"),
        ("num_heads", "head_dim", "ssm_state_size"),
        ("num_heads", "head_dim", "head_dim"),
        ("intermediate_size", "ssm_state_size"),
    ):
        sizes = [getattr(module, name, None) for name in factors]
        if all(isinstance(size, int) for size in sizes):
            return before, math.prod(size or 0 for size in sizes)
    if _RECURRENT in inspect.getsource(type(module)):
        raise UserError(
            f"How large a state {type(module).__name__} keeps of a sequence cannot be read off it; "
            f"TrimMoE cannot plan this model."
        )
    return before, 0
