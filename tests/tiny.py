"""A tiny random Qwen2-MoE checkpoint with a tokenizer, for tests of what sits above the models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

LAYERS, EXPERTS, TOP_K, HIDDEN, VOCABULARY, CONTEXT = 4, 6, 2, 32, 259, 256

OF_BYTES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
    "initializer_range": 0.2,
}
"""What a model that reads `byte_tokenizer` says of itself."""


def write_tiny_checkpoint(folder: Path, *, seed: int = 0, layers: int = LAYERS) -> Path:
    """Write model and byte-level tokenizer into `folder` and return it."""
    config = Qwen2MoeConfig(
        **OF_BYTES,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=32,
    )
    return write_random(Qwen2MoeForCausalLM, config, folder, seed=seed)


def write_random(
    kind: type[PreTrainedModel], config: PretrainedConfig, folder: Path, *, seed: int
) -> Path:
    """Write a random model that was configured `OF_BYTES`, and its tokenizer, into `folder`."""
    torch.manual_seed(seed)
    kind(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte, and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    vocabulary |= {"<s>": 256, "</s>": 257, "<pad>": 258}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
