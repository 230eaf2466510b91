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
_BLOCK_OWN: dict[str, dict[str, str]] = {
    "deepseek2": {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "exp_probs_b": "mlp.gate.e_score_correction_bias",
    },
    "glm4moe": {
        "post_attention_norm": "post_attention_layernorm",
        "exp_probs_b": "mlp.gate.e_score_correction_bias",
    },
    "gpt-oss": {
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks": "self_attn.sinks",
        "ffn_gate_inp": "mlp.router",
    },
    "minimax-m2": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "exp_probs_b": "block_sparse_moe.e_score_correction_bias",
    },
}
"""What architectures have besides, or call otherwise."""
_SHARED = {
    f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")
}
_SHARES_SEVERAL = ("deepseek2", "glm4moe")
_BARE = ("e_score_correction_bias", "sinks")
"""Ends of names that are those of parameters themselves."""
_MINIMAX = "model.layers.{block}.block_sparse_moe.experts.{expert}."
EXPERT_NAMES: dict[str, ExpertNames] = {
    "minimax-m2": ExpertNames(
        up=(_MINIMAX + "w1.weight", _MINIMAX + "w3.weight"), down=_MINIMAX + "w2.weight"
    )
}
"""Names of experts where they are not those of the family's adapter."""
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


def dense_name(name: str, architecture: str = "") -> str | None:
    """transformers' name of a tensor that is not of experts, None if it has none."""
    stem, _, end = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{end}"
    match = _IN_BLOCK.fullmatch(name)
    if match is None:
        return None
    known = _BLOCK | (_SHARED if architecture in _SHARES_SEVERAL else {})
    inner = (known | _BLOCK_OWN.get(architecture, {})).get(match["kind"])
    if inner is None:
        return None
    ending = "" if inner.endswith(_BARE) else f".{match['end']}"
    return f"model.layers.{match['block']}.{inner}{ending}"
