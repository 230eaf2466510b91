"""Ours beside transformers' `generate` on an accelerator, and a cluster of servers on it.

    python benchmarks/bench_accelerator.py [--layers 8] [--rows 1 8 32] [--only alone|served]
                                            [--output FILE]

A model of random weights with layers as Qwen3-30B-A3B has them, in bfloat16, with a vocabulary of
bytes. All decode the same prompts at full depth in one process, in turns: ours as it is served,
with whole layers recorded and replayed; launch by launch; and with experts one by one, which is
what runs where neither can be had. Then two servers of `trimmoe serve`, each with
half of the memory, answer on the same accelerator, timed by a client. Figures are medians over the
rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from bench_peers import Client, processes, wait_until
from factories import random_profile
from tiny import byte_tokenizer
from trimmoe import __version__
from trimmoe.models.decoder_view import DecoderView
from trimmoe.models.exact import exact_logits, greedy
from trimmoe.models.load import model_spec, open_model

PROMPT, WARM, NEW = 65, 4, 60
"""So that attention reads up to 128 keys all along."""
MOST_ONE_BY_ONE = 8
"""More rows take minutes."""
PORT = 8600
PATTERNS = 256
SERVED = ((1, False), (2, True), (2, False))
"""How many servers, and whether they measure themselves before plans are made."""
Run = Callable[[list[list[int]], int], object]


def main() -> None:
    options = _options()
    logging.disable_progress_bar()
    with TemporaryDirectory() as folder:
        told = {"version": __version__, "torch": torch.__version__, "layers": options.layers}
        told["device"] = options.device
        if options.device == "cuda":
            told["device"] = torch.cuda.get_device_name()
        print(json.dumps(told), flush=True)
        model = _written(Path(folder), options.layers, options.device)
        if options.only != "served":
            told |= _in_process(Path(folder), model, options)
        del model
        if options.device == "cuda":
            torch.cuda.empty_cache()
        if options.only != "alone":
            for servers, probed in SERVED:
                name = f"{servers} servers, {'probed' if probed else 'not probed'}"
                print(name, flush=True)
                told[name] = _served(Path(folder), options, servers=servers, probed=probed)
    if options.output:
        options.output.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def _in_process(folder: Path, model: Any, options: argparse.Namespace) -> dict[str, Any]:
    view = open_model(folder, dtype=torch.bfloat16, device=options.device)
    assert isinstance(view, DecoderView)
    told: dict[str, Any] = {"differs": _differs(view, model)}
    print(json.dumps(told), flush=True)
    return told | {"alone": [_alone(view, model, rows, options) for rows in options.rows]}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["alone", "served"])
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    return parser.parse_args()


def _written(folder: Path, layers: int, device: str) -> Any:
    """The model, and its checkpoint in the folder."""
    more: dict[str, Any] = {"head_dim": 128}
    config = Qwen3MoeConfig(
        vocab_size=264,
        hidden_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
        **more,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model: Any = Qwen3MoeForCausalLM(config).eval()
    torch.set_default_dtype(before)
    model.save_pretrained(folder, save_original_format=False)
    byte_tokenizer().save_pretrained(folder)
    return model


def _prompts(count: int, length: int) -> list[list[int]]:
    drawn = torch.randint(0, 256, (count, length), generator=torch.Generator().manual_seed(1))
    return drawn.tolist()


@torch.inference_mode()
def _differs(view: DecoderView, model: Any) -> float:
    """How far logits are from transformers', as a share of how far those are from zero."""
    prompt = _prompts(1, 64)
    theirs = model(torch.tensor(prompt, device=model.device)).logits[0].float()
    return float((exact_logits(view, prompt)[0].float() - theirs).norm() / theirs.norm())


def _alone(
    view: DecoderView, model: Any, rows: int, options: argparse.Namespace
) -> dict[str, object]:
    """Milliseconds a step of so many rows, and until the first token of prompts of 1,024."""

    def generate(prompts: list[list[int]], new: int) -> object:
        ids = torch.tensor(prompts, device=model.device)
        more = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
        return model.generate(ids, attention_mask=torch.ones_like(ids), **more).tolist()

    runs: dict[str, Run] = {
        "recorded": lambda prompts, new: greedy(view, prompts, new),
        "launches": lambda prompts, new: _launched(view, prompts, new),
        "one by one": lambda prompts, new: _one_by_one(view, prompts, new),
        "transformers": generate,
    }
    if rows > MOST_ONE_BY_ONE:
        del runs["one by one"]
    short, long = _prompts(rows, PROMPT), _prompts(min(rows, 4), 1024)
    for run in runs.values():
        run(short, WARM)
        run(long, 1)
    step: dict[str, list[float]] = {name: [] for name in runs}
    few: dict[str, list[float]] = {name: [] for name in runs}
    first: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, run in runs.items():
            begun = _took_s(lambda run=run: run(short, WARM))
            few[name].append(begun * 1e3)
            whole = _took_s(lambda run=run: run(short, NEW))
            step[name].append((whole - begun) / (NEW - WARM) * 1e3)
            first[name].append(_took_s(lambda run=run: run(long, 1)) * 1e3)
    told = {
        "rows": rows,
        "step_ms": {name: round(statistics.median(took), 2) for name, took in step.items()},
        "four_tokens_ms": {name: round(statistics.median(took), 1) for name, took in few.items()},
        "first_ms": {name: round(statistics.median(took), 1) for name, took in first.items()},
    }
    print(json.dumps(told), flush=True)
    return told


def _launched(view: DecoderView, prompts: list[list[int]], new: int) -> object:
    replays, view._replays = view._replays, None
    try:
        return greedy(view, prompts, new)
    finally:
        view._replays = replays


def _one_by_one(view: DecoderView, prompts: list[list[int]], new: int) -> object:
    stacks = [view._stacks[layer] for layer in range(view.spec.layer_count)]
    groups = [stack._groups for stack in stacks]
    for stack in stacks:
        stack._groups = False
    try:
        return _launched(view, prompts, new)
    finally:
        for stack, before in zip(stacks, groups, strict=True):
            stack._groups = before


def _took_s(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def _served(
    folder: Path, options: argparse.Namespace, *, servers: int, probed: bool
) -> dict[str, object]:
    """Milliseconds a token of one stream, and tokens a second of several."""
    told: dict[str, object] = {}
    with _serving(folder, options.device, servers=servers, probed=probed) as client:
        for streams in options.rows:
            asyncio.run(_streams(client, streams, 16))
            rounds = [asyncio.run(_streams(client, streams, NEW)) for _ in range(options.rounds)]
            told[f"{streams} streams"] = {
                "token_ms": round(statistics.median(ms for ms, _ in rounds), 2),
                "per_s": round(statistics.median(per_s for _, per_s in rounds), 1),
            }
            print(json.dumps({streams: told[f"{streams} streams"]}), flush=True)
    return told


@contextlib.contextmanager
def _serving(folder: Path, device: str, *, servers: int, probed: bool) -> Iterator[Client]:
    spec = model_spec(folder, dtype=torch.bfloat16, hashed=True)
    # Random weights choose among all experts alike, which a few patterns of them would not say.
    random_profile(np.random.default_rng(3), spec, patterns=PATTERNS).save(folder / "profile.trim")
    size_gb = (1.1 / servers * spec.total_expert_bytes + spec.dense_bytes) / 1e9
    listed = "".join(
        f"  - {{name: {name}, tflops: 400, memory_gb: {size_gb:.3f}, device: {device}}}\n"
        for name in ("left", "right")[:servers]
    )
    cluster = folder / "cluster.yaml"
    links = "links: {default: {gbps: 10, ms: 0.1}}\n"
    cluster.write_text(f"name: one-accelerator\nmemory_ratio: 1.5\nservers:\n{listed}{links}")
    command = [
        *(sys.executable, "-m", "trimmoe.cli", "serve", "--cluster", str(cluster)),
        *("--model", str(folder), "--profile", str(folder / "profile.trim")),
        *("--policy", "exact", "--dtype", "bfloat16", "--no-emulate", "--kv-slots", "40"),
        *(() if probed else ("--no-probe",)),
        *("--port-base", str(PORT)),
    ]
    log = folder / "serve.log"
    with processes([command], log):
        try:
            wait_until(lambda: b"Ready" in log.read_bytes(), log, 150)
        except SystemExit:
            print(log.read_text()[-4000:], flush=True)
            raise
        print(log.read_text()[-2500:], flush=True)
        yield Client(f"http://127.0.0.1:{PORT}/v1", folder.name, endless=True)


async def _streams(client: Client, streams: int, new: int) -> tuple[float, float]:
    """Milliseconds a token and tokens a second of so many answers at once."""
    begun = time.perf_counter()
    prompts = [f"{i} what is asked" for i in range(streams)]
    answers = await asyncio.gather(*(client.stream(one, new) for one in prompts))
    took_s = time.perf_counter() - begun
    each = [(came[-1] - came[0]) / (len(came) - 1) * 1e3 for came in answers]
    return statistics.median(each), sum(map(len, answers)) / took_s


if __name__ == "__main__":
    main()
