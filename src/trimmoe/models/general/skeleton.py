"""The modules of a model on the meta device: its decoder, its layers, and where experts are."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from trimmoe.models.general.catalogue import class_of, objection, refusal

_LLAMA4_MOE, _LLAMA4_EXPERTS = "Llama4TextMoe", "Llama4TextExperts"
_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertShapes:
    """The routed experts of one layer."""

    path: str
    """Of the module that holds them, within the layer."""
    count: int
    parameters: dict[str, tuple[int, ...]]
    """Shape of each stacked parameter, the expert first."""
    transposed: bool
    """Whether its matrices are [in, out]."""
    interleaved: bool
    """Whether outputs of gate and up take turns."""

    @property
    def per_expert(self) -> int:
        """Parameters of one expert."""
        sizes = (torch.Size(shape).numel() for shape in self.parameters.values())
        return sum(sizes) // self.count


@dataclass(frozen=True, kw_only=True, slots=True)
class Skeleton:
    """A model without weights."""

    model: Any
    """With a head."""
    decoder: Any
    """What runs the layers."""
    name: str
    """Of the decoder within the model."""
    layers: tuple[Any, ...]
    experts: dict[int, ExpertShapes]
    """By block, those of MoE layers."""

    @property
    def moe_blocks(self) -> tuple[int, ...]:
        return tuple(sorted(self.experts))

    @property
    def text_config(self) -> Any:
        return self.decoder.config

    def names(self) -> list[str]:
        """Dense parameters and buffers that files hold, of the decoder and the head."""
        wanted = (self.name + ".", *(f"{name}." for name in _head_names(self.model)))
        held = tuple(f"{self.name}.layers.{b}.{e.path}." for b, e in self.experts.items())
        return [
            name
            for name in self.model.state_dict()
            if name.startswith(wanted) and not name.startswith(held)
        ]


def build(config: Any, model_type: str, dtype: torch.dtype = torch.float32) -> Skeleton:
    """The model that a configuration describes, its parameters of the dtypes that they have where
    the model is of `dtype`. Raises UserError if it is none that can be served."""
    kind = class_of(model_type)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.device("meta"):
            model: Any = kind(copy.deepcopy(config))
    finally:
        torch.set_default_dtype(before)
    model.eval()
    _adapt(model)
    decoder = decoder_of(model)
    if decoder is None:
        raise refusal(model_type, "has no list of layers that text passes")
    if (reason := objection(decoder.config)) is not None:
        raise refusal(model_type, reason)
    layers = decoder.layers
    found = {block: _experts(layer) for block, layer in enumerate(layers)}
    experts = {block: one for block, one in found.items() if one is not None}
    if not experts:
        reason = "has no routed experts that are given each token's choice and its weights"
        raise refusal(model_type, reason)
    name = next(name for name, module in model.named_modules() if module is decoder)
    return Skeleton(model=model, decoder=decoder, name=name, layers=tuple(layers), experts=experts)


def decoder_of(model: Any) -> Any | None:
    """What runs the layers that text passes."""
    embedding = model.get_input_embeddings()
    for module in (model.get_decoder(), *model.modules()):
        has_list = isinstance(getattr(module, "layers", None), nn.ModuleList)
        if has_list and any(one is embedding for one in module.modules()):
            return module
    return None


def _experts(layer: Any) -> ExpertShapes | None:
    """What transformers' `use_experts_implementation` marks in a layer, or what looks like it."""
    for path, module in layer.named_modules():
        stacked = {name: tuple(p.shape) for name, p in module.named_parameters()}
        if not hasattr(module, "has_gate") and not _is_marked(module, stacked):
            continue
        return ExpertShapes(
            path=path,
            count=stacked["down_proj"][0],
            parameters=stacked,
            transposed=bool(getattr(module, "is_transposed", False)),
            interleaved=not getattr(module, "is_concatenated", True),
        )
    return None


def _is_marked(module: Any, stacked: dict[str, tuple[int, ...]]) -> bool:
    """Whether a module holds gated experts without a mark, which it gets then."""
    if set(stacked) != {"gate_up_proj", "down_proj"} or not hasattr(module, "_apply_gate"):
        return False
    up, down = stacked["gate_up_proj"], stacked["down_proj"]
    if len(up) != 3 or up[1] != 2 * down[2] or up[2] != down[1]:
        return False
    module.is_transposed, module.has_gate, module.has_bias = False, True, False
    return True


def _head_names(model: Any) -> list[str]:
    head = model.get_output_embeddings()
    return [name for name, module in model.named_modules() if module is head]


def _adapt(model: nn.Module) -> None:
    """Have the MoE layers of a Llama 4 follow the common interface: it alone calls its experts with
    inputs that are weighted already, all of them for every token. Here it calls them as all others
    do, and the weights say what they are multiplied with."""
    for module in model.modules():
        if type(module).__name__ == _LLAMA4_MOE:
            module.forward = MethodType(_forward_llama4, module)
        elif type(module).__name__ == _LLAMA4_EXPERTS:
            _mark_llama4(module)


def _mark_llama4(experts: Any) -> None:
    experts.is_transposed, experts.has_gate, experts.has_bias = True, True, False
    experts.weighs_input = True
    experts._apply_gate = MethodType(_apply_llama4_gate, experts)


def _forward_llama4(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    flat = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(flat)
    index = logits.topk(self.top_k, dim=-1).indices
    routed = self.experts(flat, index, scores.gather(1, index))
    return self.shared_expert(flat) + routed, logits


def _apply_llama4_gate(self: Any, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return up * self.act_fn(gate)
