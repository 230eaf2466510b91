"""How often a model whose experts are replaced by copies in few bits predicts what it predicts.

    python benchmarks/bench_agreement.py --model embedded --model DIR --text FILE

Experts that a server does not hold run as copies in all layers at once: guesses rest on that. The
share of experts that it holds is drawn at random in each layer. Nothing here is timed: the same
inputs give the same figures. Runs transformers' modules.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from trimmoe.calibrate.text import read_texts, token_windows
from trimmoe.core.stand_ins import ASCENDING
from trimmoe.experiments.opening import resolved
from trimmoe.models.compiled.quantise import pack_bits
from trimmoe.models.load import load_tokenizer

Block = tuple[nn.Parameter, nn.Parameter]
"""Weights of a layer's experts, [E, 2I, H] and [E, H, I]."""
_FROM = 32
"""Tokens of each window that are context alone."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", required=True)
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--held", type=float, nargs="*", default=[0.0, 0.25, 0.5])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    names = ["nothing", *(f"{bits} bits" for bits in ASCENDING)]
    heads = [f"{name}, {share:.0%} held" for name in names for share in options.held]
    print(f"| model | experts, MB | text | perplexity | {' | '.join(heads)} |")
    print("|---" * (4 + len(heads)) + "|")
    for name in options.model:
        path = resolved(name)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        model = model.to(options.device).eval()
        blocks = experts_of(model)
        size = 4e-6 * sum(part.numel() for block in blocks for part in block)
        texts = {}
        for file in options.text:
            ids = token_windows(
                read_texts([file]),
                tokenizer=load_tokenizer(path),
                tokens=options.tokens,
                window=options.window,
                seed=0,
            )
            texts[file] = torch.from_numpy(ids).to(options.device)
        whole = {file: predictions(model, ids) for file, ids in texts.items()}
        shares: dict[Path, list[float]] = {file: [] for file in texts}
        for copies in [None, *ASCENDING]:
            for _ in replaced(blocks, copies, options.held):
                for file, ids in texts.items():
                    same = predictions(model, ids)[0] == whole[file][0]
                    shares[file].append(same.float().mean().item())
        for file, found in shares.items():
            cells = " | ".join(f"{share:.1%}" for share in found)
            loss = whole[file][1]
            print(f"| {name} | {size:.0f} | {file.name} | {loss:.1f} | {cells} |", flush=True)


def experts_of(model: nn.Module) -> list[Block]:
    """Of every layer: what goes into its experts and what comes out."""
    found = []
    for module in model.modules():
        into, out = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
        if isinstance(into, nn.Parameter) and isinstance(out, nn.Parameter) and into.ndim == 3:
            found.append((into, out))
    return found


def predictions(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Next tokens [windows, length - 1 - _FROM], and the perplexity of the text's own."""
    guesses, losses = [], []
    with torch.inference_mode():
        for part in ids.split(8):
            logits = model(part).logits[:, _FROM:-1]
            guesses.append(logits.argmax(-1))
            told = part[:, _FROM + 1 :]
            losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), told.flatten()))
    return torch.cat(guesses), torch.stack(losses).mean().exp().item()


def replaced(blocks: list[Block], bits: int | None, held: list[float]) -> Iterator[None]:
    """For each share in turn, the model with all other experts as copies; then as it was.

    `bits` None leaves them out.
    """
    before = [(into.data, out.data) for into, out in blocks]
    with ThreadPoolExecutor() as pool:
        after = list(pool.map(lambda pair: [copied(each, bits) for each in pair], before))
    for share in held:
        generator = torch.Generator().manual_seed(0)
        for block, whole, few in zip(blocks, before, after, strict=True):
            count = len(whole[0])
            here = torch.zeros(count, dtype=torch.bool)
            here[torch.randperm(count, generator=generator)[: round(share * count)]] = True
            here = here.to(whole[0].device)[:, None, None]
            for part, kept, copy in zip(block, whole, few, strict=True):
                part.data = torch.where(here, kept, copy)
        yield
    for block, whole in zip(blocks, before, strict=True):
        for part, kept in zip(block, whole, strict=True):
            part.data = kept


def copied(weights: torch.Tensor, bits: int | None) -> torch.Tensor:
    """Weights [E, J, K] as copies in so many bits have them."""
    if bits is None:
        return torch.zeros_like(weights)
    experts = weights.float().cpu().numpy()
    few = [pack_bits([each], bits).restored[: each.shape[0]] for each in experts]
    return torch.from_numpy(np.stack(few)).to(weights)


if __name__ == "__main__":
    main()
