"""What llama.cpp calls the tensors that transformers' models have."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trimmoe.models.family import ExpertNames

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_EXPERTS = re.compile(r"blk\.(?P<block>\d+)\.ffn_(?P<part>gate|up|down)_exps\.weight")
_EXPERT = re.compile(r"blk\.(?P<block>\d+)\.ffn_(?P<part>gate|up|down)\.(?P<expert>\d+)\.weight")
_IN_BLOCK = re.compile(r"blk\.(?P<block>\d+)\.(?P<kind>\w+)\.(?P<end>weight|bias)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertTensor:
    """What a name says of a tensor of experts."""

    block: int
    template: str
    """transformers' name, with `{block}` and `{expert}` to fill in."""
    expert: int | None
    """None for all experts of the block, in the first dimension."""

    def name(self, expert: int) -> str:
        return self.template.format(block=self.block, expert=expert)


def expert_tensor(name: str, names: ExpertNames) -> ExpertTensor | None:
    """What a llama.cpp name says if it is one of experts; old files hold each by itself."""
    match = _EXPERTS.fullmatch(name) or _EXPERT.fullmatch(name)
    if match is None:
        return None
    gate, up = names.up
    template = {"gate": gate, "up": up, "down": names.down}[match["part"]]
    expert = match.groupdict().get("expert")
    return ExpertTensor(
        block=int(match["block"]),
        template=template,
        expert=None if expert is None else int(expert),
    )


def dense_name(name: str) -> str | None:
    """transformers' name of a tensor that is not of experts, None if it has none."""
    stem, _, end = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{end}"
    match = _IN_BLOCK.fullmatch(name)
    if match is None or match["kind"] not in _BLOCK:
        return None
    return f"model.layers.{match['block']}.{_BLOCK[match['kind']]}.{match['end']}"
