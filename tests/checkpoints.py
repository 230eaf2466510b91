"""Tiny random checkpoints of every family, written as transformers writes them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.utils import logging

DECODERS = ["mixtral", "mixtral_window", "qwen2_moe", "olmoe", "qwen3_moe"]
"""Decoder-only checkpoints; together with "switch" all that `write` knows."""

LAYOUTS = [(False, False), (False, True), (True, False), (True, True)]
"""All that `write` knows of `fused` and `sharded`."""

Folder = Callable[..., Path]
"""Where `write` has put what it is asked for."""

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _mixtral(**more: Any) -> Any:
    config = transformers.MixtralConfig(
        **_COMMON, num_hidden_layers=3, intermediate_size=24, num_local_experts=4, **more
    )
    return transformers.MixtralForCausalLM(config)


def _qwen2_moe() -> Any:
    # Dense blocks before a MoE layer and after the last one; tied embeddings.
    config = transformers.Qwen2MoeConfig(
        **_COMMON,
        num_hidden_layers=5,
        intermediate_size=40,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
        num_experts=6,
        num_experts_per_tok=3,
        mlp_only_layers=[1, 4],
        tie_word_embeddings=True,
    )
    return transformers.Qwen2MoeForCausalLM(config)


def _olmoe() -> Any:
    config = transformers.OlmoeConfig(
        **_COMMON,
        num_hidden_layers=2,
        intermediate_size=16,
        num_experts=6,
        num_experts_per_tok=2,
        clip_qkv=1.0,
    )
    return transformers.OlmoeForCausalLM(config)


def _qwen3_moe() -> Any:
    more: dict[str, Any] = {"head_dim": 16}
    config = transformers.Qwen3MoeConfig(
        **_COMMON,
        num_hidden_layers=4,
        intermediate_size=40,
        moe_intermediate_size=16,
        num_experts=6,
        num_experts_per_tok=2,
        decoder_sparse_step=2,
        norm_topk_prob=True,
        **more,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def _switch(**more: Any) -> Any:
    # An odd number of blocks leaves a dense one after the last MoE layer; a capacity of 3
    # makes experts drop tokens.
    config = transformers.SwitchTransformersConfig(
        vocab_size=96,
        d_model=32,
        d_kv=8,
        d_ff=24,
        num_layers=5,
        num_sparse_encoder_layers=2,
        num_decoder_layers=5,
        num_sparse_decoder_layers=2,
        num_heads=4,
        num_experts=4,
        expert_capacity=3,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        **more,
    )
    return transformers.SwitchTransformersForConditionalGeneration(config)


_MODELS: dict[str, Callable[[], Any]] = {
    "mixtral": _mixtral,
    "mixtral_window": lambda: _mixtral(sliding_window=6),
    "qwen2_moe": _qwen2_moe,
    "olmoe": _olmoe,
    "qwen3_moe": _qwen3_moe,
    "switch": _switch,
    # What it generates depends on what it read: the other one says the same token all the time.
    "switch_untied": lambda: _switch(tie_word_embeddings=False),
}


def write(name: str, folder: Path, *, fused: bool = False, sharded: bool = False) -> Path:
    """Write a checkpoint with fixed weights into `folder` and return it."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.manual_seed(0)
    model = _MODELS[name]().eval()
    if name == "qwen2_moe":
        # Or a token would say itself again, whatever was read before it: the table is the head too.
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(0.1)
    model.save_pretrained(folder, save_original_format=not fused)
    if sharded:
        _shard(folder)
    return folder


def written_once(new_folder: Callable[[str], Path]) -> Folder:
    """`write`, each name and layout into a `new_folder` of its own and only once."""
    made: dict[tuple[str, bool, bool], Path] = {}

    def find(name: str, fused: bool = False, sharded: bool = False) -> Path:
        key = (name, fused, sharded)
        if key not in made:
            made[key] = write(name, new_folder(name), fused=fused, sharded=sharded)
        return made[key]

    return find


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The checkpoint as transformers runs it."""
    config = transformers.AutoConfig.from_pretrained(folder)
    kind: Any = transformers.AutoModelForCausalLM
    if config.is_encoder_decoder:
        kind = transformers.AutoModelForSeq2SeqLM
    return kind.from_pretrained(folder, dtype=dtype).eval()


opened = functools.cache(reference)
"""The same, opened once for all who only read it."""


@torch.inference_mode()
def logits_before(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Before each token of an answer to a prompt by transformers, in one pass, [n, V]."""
    return model(torch.tensor([prompt + answer[:-1]])).logits[0, -len(answer) :]


def judged(model: Any, prompt: list[int], answer: list[int]) -> list[int]:
    """What greedy decoding chooses after a prompt and after every part of an answer but the whole:
    the same if it is what `generate` would give, and another one from the first token that is
    not."""
    return logits_before(model, prompt, answer).argmax(-1).tolist()


def _shard(folder: Path) -> None:
    """Deal the single file's tensors out to three files with an index."""
    single = folder / "model.safetensors"
    tensors = load_file(single)
    weight_map: dict[str, str] = {}
    for part in range(3):
        file = f"model-{part + 1:05d}-of-00003.safetensors"
        chosen = {name: tensors[name] for name in sorted(tensors)[part::3]}
        save_file(chosen, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(chosen, file)
    single.unlink()
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
