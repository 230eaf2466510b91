"""Llama 4 alone calls its experts with inputs that are weighted already, all of them for every
token. Here it calls them as all others do, and the weights say what they are multiplied with."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor, nn

MOE, EXPERTS = "Llama4TextMoe", "Llama4TextExperts"


def adapt(model: nn.Module) -> None:
    """Have the MoE layers of a model, if they are of this kind, follow the common interface."""
    for module in model.modules():
        if type(module).__name__ == MOE:
            module.forward = MethodType(_forward, module)
        elif type(module).__name__ == EXPERTS:
            _mark(module)


def _mark(experts: Any) -> None:
    experts.is_transposed, experts.has_gate, experts.has_bias = True, True, False
    experts.weighs_input = True
    experts._apply_gate = MethodType(_apply_gate, experts)


def _forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    flat = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(flat)
    index = logits.topk(self.top_k, dim=-1).indices
    routed = self.experts(flat, index, scores.gather(1, index))
    return self.shared_expert(flat) + routed, logits


def _apply_gate(self: Any, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return up * self.act_fn(gate)
