"""A GGUF file of random weights with layers as large as a published model's, and a profile for it.

    python benchmarks/large_model.py FILE --tokenizer GGUF [--layers 8] [--kind Q8_0]

Layers are those of Qwen3-30B-A3B, of which there are fewer; the vocabulary is that of the GGUF
file that the tokenizer is taken from. Random weights choose among all experts alike, so the profile
is a random one of many patterns. Both lie side by side: FILE and FILE with the end `.trim`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from factories import random_profile
from trimmoe.models.load import model_spec

HIDDEN, HEADS, KV_HEADS, HEAD = 2048, 32, 4, 128
EXPERTS, TOP_K, ROUTED = 128, 8, 768
DEVIATION = 0.02
PATTERNS = 256
_KINDS = {"Q8_0": (Kind.Q8_0, 32, 73.6), "Q4_0": (Kind.Q4_0, 16, 4.61)}
"""Bytes of a block's numbers, and how far these are from their mean when all are as likely."""
_ENDS = "Q8_0"
"""What embeddings and head are kept in."""

Bytes = NDArray[np.uint8]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="GGUF file to take it from.")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--kind", choices=list(_KINDS), default="Q8_0")
    options = parser.parse_args()
    write(options.file, options.tokenizer, options.layers, options.kind)
    spec = model_spec(options.file, dtype=torch.float32, hashed=True)
    profile = random_profile(np.random.default_rng(3), spec, patterns=PATTERNS)
    profile.save(options.file.with_suffix(".trim"))


def write(file: Path, tokenizer: Path, layers: int, kind: str) -> None:
    """The model's file."""
    rng, writer = np.random.default_rng(0), gguf.GGUFWriter(file, "qwen3moe")
    vocabulary = _tokenizer(writer, gguf.GGUFReader(tokenizer))
    _settings(writer, layers)
    for name in ("token_embd.weight", "output.weight"):
        _add(writer, rng, name, (vocabulary, HIDDEN), _ENDS)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in tqdm(range(layers), desc="Layers", unit="layer"):
        for name, shape in _matrices(layer):
            _add(writer, rng, name, shape, kind)
        block = f"blk.{layer}."
        router = rng.normal(0.0, DEVIATION, (EXPERTS, HIDDEN)).astype(np.float32)
        writer.add_tensor(f"{block}ffn_gate_inp.weight", router)
        for name, size in (("attn_norm", HIDDEN), ("ffn_norm", HIDDEN), ("attn_q_norm", HEAD),
                           ("attn_k_norm", HEAD)):  # fmt: skip
            writer.add_tensor(f"{block}{name}.weight", np.ones(size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=True)
    writer.close()


def _tokenizer(writer: gguf.GGUFWriter, reader: gguf.GGUFReader) -> int:
    """Copy what another file says of its tokenizer; gives the size of its vocabulary."""
    for name, field in reader.fields.items():
        if name.startswith("tokenizer.") and not name.endswith("chat_template"):
            of = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=of)
    return len(reader.fields["tokenizer.ggml.tokens"].contents())


def _settings(writer: gguf.GGUFWriter, layers: int) -> None:
    writer.add_context_length(32768)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(6144)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(TOP_K)
    writer.add_expert_feed_forward_length(ROUTED)


def _matrices(layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    shapes = {
        "attn_q": (HEADS * HEAD, HIDDEN),
        "attn_k": (KV_HEADS * HEAD, HIDDEN),
        "attn_v": (KV_HEADS * HEAD, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD),
        "ffn_gate_exps": (EXPERTS, ROUTED, HIDDEN),
        "ffn_up_exps": (EXPERTS, ROUTED, HIDDEN),
        "ffn_down_exps": (EXPERTS, HIDDEN, ROUTED),
    }
    for name, shape in shapes.items():
        yield f"blk.{layer}.{name}.weight", shape


def _add(
    writer: gguf.GGUFWriter, rng: np.random.Generator, name: str, shape: tuple[int, ...], kind: str
) -> None:
    """A matrix whose numbers are all as likely, of scales that differ a little."""
    form, size, spread = _KINDS[kind]
    count = int(np.prod(shape)) // 32
    scales = (rng.uniform(0.8, 1.2, count) * DEVIATION / spread).astype(np.float16)
    numbers: Bytes = rng.integers(0, 256, (count, size), dtype=np.uint8)
    blocks = np.concatenate([scales.view(np.uint8).reshape(count, 2), numbers], axis=1)
    writer.add_tensor(name, blocks.reshape(*shape[:-1], -1), raw_dtype=form)


if __name__ == "__main__":
    main()
