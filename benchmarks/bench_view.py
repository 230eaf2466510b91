"""Tokens per second of greedy decoding through the view against transformers' `generate`.

    python benchmarks/bench_view.py CHECKPOINT [--dtype bfloat16] [--new 64] [--output FILE]

Both decode the same prompt at full depth, in turns, in one process. The figure of each is the
median over the rounds; time includes the prompt. Decoder-only families only.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trimmoe.models.exact import greedy
from trimmoe.models.load import open_model


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    view = open_model(options.checkpoint, dtype=dtype, device=options.device)
    model = _transformers_model(options.checkpoint, view.dtype, options.device)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(5, view.spec.vocab_size, (options.prompt,), generator=generator).tolist()

    runs: dict[str, Callable[[], list[int]]] = {
        "view": lambda: greedy(view, [prompt], options.new)[0],
        "transformers": lambda: _generate(model, prompt, options.new),
    }
    same = runs["view"]() == runs["transformers"]()
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            rates[name].append(options.new / (time.perf_counter() - start))
    _report(options, rates, same, str(view.dtype))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--prompt", type=int, default=32, help="prompt tokens")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    return parser.parse_args()


def _transformers_model(checkpoint: Path, dtype: torch.dtype, device: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
    return model.to(device).eval()


def _generate(model: Any, prompt: list[int], new: int) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def _report(
    options: argparse.Namespace, rates: dict[str, list[float]], same: bool, dtype: str
) -> None:
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratio = medians["view"] / medians["transformers"]
    for name, median in medians.items():
        print(f"{name:>12}: {median:7.1f} tokens/s")
    print(f"{'ratio':>12}: {ratio:7.2f}   same tokens: {same}   {dtype}")
    if options.output:
        result = {
            "checkpoint": options.checkpoint.name,
            "dtype": dtype,
            "device": options.device,
            "threads": options.threads,
            "prompt_tokens": options.prompt,
            "new_tokens": options.new,
            "tokens_per_s": medians,
            "all_tokens_per_s": rates,
            "ratio": ratio,
            "same_tokens": same,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
