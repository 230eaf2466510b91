"""Mixtral: gates renormalised over the activated experts, every block a MoE layer."""

from trimmoe.models.decoder import DecoderFamily
from trimmoe.models.family import ExpertNames

_APART = "model.layers.{block}.block_sparse_moe.experts.{expert}."
_FUSED = "model.layers.{block}.mlp.experts."

FAMILY = DecoderFamily(
    model_type="mixtral",
    classes="Mixtral",
    expert_names=ExpertNames(
        up=(_APART + "w1.weight", _APART + "w3.weight"),
        down=_APART + "w2.weight",
        fused_up=_FUSED + "gate_up_proj",
        fused_down=_FUSED + "down_proj",
    ),
    renormalises=lambda config: True,
    rounds_gates=False,
    stored_prefix=(".mlp.", ".block_sparse_moe."),
)
