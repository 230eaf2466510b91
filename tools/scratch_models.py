"""Train small Mixture-of-Experts models from scratch, alike but for size or number of experts.

    python tools/scratch_models.py --text wikipedia.txt -o build/scratch

What stand-ins keep of a model's predictions can be measured on checkpoints like these
(`benchmarks/bench_agreement.py`). They have Qwen3-MoE's form and a tokenizer of their own, see the
same text in the same order and as often. An accelerator takes a minute or less for each.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCABULARY = 8192
LENGTH = 512
END = "<|endoftext|>"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What tells a model from the others."""

    hidden: int
    layers: int
    experts: int
    top_k: int
    neurons: int
    """Of one expert."""

    def config(self) -> Qwen3MoeConfig:
        more: dict[str, Any] = {"head_dim": 64}
        return Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 64,
            num_key_value_heads=self.hidden // 128,
            num_experts=self.experts,
            num_experts_per_tok=self.top_k,
            moe_intermediate_size=self.neurons,
            intermediate_size=self.neurons,
            norm_topk_prob=True,
            router_aux_loss_coef=0.01,
            max_position_embeddings=4 * LENGTH,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
            **more,
        )


SHAPES = {
    "small": Shape(hidden=256, layers=6, experts=16, top_k=4, neurons=256),
    "medium": Shape(hidden=512, layers=8, experts=16, top_k=4, neurons=512),
    "large": Shape(hidden=1024, layers=10, experts=16, top_k=4, neurons=768),
    "medium-coarse": Shape(hidden=512, layers=8, experts=8, top_k=2, neurons=1024),
    "medium-fine": Shape(hidden=512, layers=8, experts=32, top_k=8, neurons=256),
    "medium-finest": Shape(hidden=512, layers=8, experts=64, top_k=16, neurons=128),
    "medium-many": Shape(hidden=512, layers=8, experts=64, top_k=4, neurons=512),
}
"""Sizes; then the medium one's experts in halves and quarters; then four times as many of them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True, help="Plain text, one file.")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=128, help=f"Windows of {LENGTH} tokens.")
    parser.add_argument("--seconds", type=float, default=math.inf, help="At most, for each model.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8")
    tokenizer = make_tokenizer(text)
    windows = tokens_of(tokenizer, text)
    print(f"{windows.numel() / 1e6:.1f} million tokens", flush=True)
    for name in options.only:
        torch.manual_seed(options.seed)
        model = Qwen3MoeForCausalLM(SHAPES[name].config()).to(options.device, torch.bfloat16)
        set_grouped(model)
        begun = time.monotonic()
        steps, loss = train(
            model,
            windows,
            steps=options.steps,
            batch=options.batch,
            seconds=options.seconds,
            seed=options.seed,
        )
        folder = options.output / name
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        count = sum(parameter.numel() for parameter in model.parameters())
        took = time.monotonic() - begun
        print(
            f"{name}: {count / 1e6:.1f} M, {steps} steps, loss {loss:.3f}, {took:.0f} s", flush=True
        )


def make_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """Byte pairs of the text's first million characters and some from its middle."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    half = len(text) // 2
    tokenizer.train_from_iterator([text[:1_000_000], text[half : half + 1_000_000]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END)


def tokens_of(tokenizer: PreTrainedTokenizerFast, text: str) -> torch.Tensor:
    """int64 (windows, LENGTH) of the whole text."""
    parts = [text[at : at + 100_000] for at in range(0, len(text), 100_000)]
    ids = [i for part in tokenizer(parts, add_special_tokens=False)["input_ids"] for i in part]
    full = len(ids) // LENGTH
    return torch.tensor(ids[: full * LENGTH]).reshape(full, LENGTH)


def set_grouped(model: Qwen3MoeForCausalLM) -> None:
    """All experts of a layer in one product, where the library can."""
    model.set_experts_implementation("grouped_mm")


def train(
    model: Qwen3MoeForCausalLM,
    windows: torch.Tensor,
    *,
    steps: int,
    batch: int,
    seconds: float,
    seed: int,
) -> tuple[int, float]:
    """How many steps there was time for, and the mean loss of the last twenty.

    The model is in bfloat16; what the optimiser adds to is in float32 beside it.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat(
        [
            torch.randperm(len(windows), generator=generator)
            for _ in range(-(-steps * batch // len(windows)))
        ]
    )
    held = list(model.parameters())
    masters = [nn.Parameter(parameter.detach().float()) for parameter in held]
    optimiser = torch.optim.AdamW(
        masters, lr=1.0, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda"
    )
    peak = 3e-3 / (model.config.hidden_size / 256) ** 0.5
    losses, begun, done = [], time.monotonic(), 0
    for step in range(steps):
        # The rate falls with time where that ends training first.
        share = max(step / steps, (time.monotonic() - begun) / seconds)
        if share >= 1:
            break
        rate = peak * min((step + 1) / 30, 0.05 + 0.95 * (1 + math.cos(math.pi * share)) / 2)
        for group in optimiser.param_groups:
            group["lr"] = rate
        ids = windows[order[step * batch : (step + 1) * batch]].to(device)
        loss = model(ids, labels=ids, output_router_logits=True).loss
        loss.backward()
        for master, parameter in zip(masters, held, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimiser.step()
        with torch.no_grad():
            for master, parameter in zip(masters, held, strict=True):
                parameter.copy_(master)
        losses.append(loss.detach())
        done = step + 1
    return done, torch.stack(losses[-20:]).mean().item()


if __name__ == "__main__":
    main()
