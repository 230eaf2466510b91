"""Measure the embedded model, or another candidate: the numbers of the model card, as JSON.

    PYTHONPATH=src:tools python -m embedded.report --held-out wikitext=wiki.valid.tokens \
        --held-out news=news.jsonl.gz --routing src/trimmoe/models/embedded/routing.json

Of a file with many documents only those that training left out are read.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from trimmoe.models.embedded import ensure_embedded_model
from trimmoe.models.embedded.deltas import DELTAS_PATH

from . import measure
from .asked import task_scores
from .distill import dense_states
from .exits import calibrated_exits, exit_table, record_exits
from .network import BF16, dense_layer
from .stages import Bench, open_bench
from .text import evaluation_windows

FIRST_EXIT = 10
PROMPTS = (
    "The capital of France is",
    "The steam engine changed the way people lived because",
    "Question: A farmer has 3 fields with 12 sheep in each. How many sheep are there?\nAnswer:",
)


@torch.inference_mode()
def dense_perplexity(bench: Bench, windows: torch.Tensor) -> float:
    layers = [dense_layer(bench.dense, index) for index in range(bench.geometry.layers)]
    embed, final_norm = bench.dense["embed"].to(BF16), bench.dense["norm"].to(BF16)
    losses = []
    for window in windows:
        states = dense_states(window[None], layers, embed, final_norm, bench.geometry)
        losses.append(measure.token_losses(states[0] @ embed.T, window))
    return math.exp(torch.cat(losses).mean().item())


@torch.inference_mode()
def samples(checkpoint: Path) -> dict[str, str]:
    """Greedy continuations in transformers, from the checkpoint as any user would load it."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    found = {}
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=48, do_sample=False)
        found[prompt] = tokenizer.decode(out[0, ids["input_ids"].shape[1] :])
    return found


@torch.inference_mode()
def perplexity_in_transformers(checkpoint: Path, windows: torch.Tensor) -> float:
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    losses = [model(window[None], labels=window[None]).loss for window in windows]
    return math.exp(torch.stack(losses).mean().item())


def main(
    wheel: Annotated[Path, typer.Option(help="The source package's wheel.")],
    held_out: Annotated[list[str], typer.Option(help="NAME=FILE; the first is measured in depth.")],
    routing: Annotated[Path, typer.Option(help="Where the full routing table goes.")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="Another candidate's; default: the embedded model.")
    ] = None,
    deltas: Annotated[Path, typer.Option(help="The file the checkpoint is made from.")] = (
        DELTAS_PATH
    ),
    work: Path = Path("build/embedded"),
    windows: Annotated[int, typer.Option(help="Windows of 1024 for each text.")] = 24,
    fewer: Annotated[int, typer.Option(help="Windows for the costlier measurements.")] = 6,
    tasks: Annotated[
        list[Path] | None, typer.Option(help="SQuAD's or GSM8K's file; held-out parts are asked.")
    ] = None,
    questions: Annotated[int, typer.Option(help="Questions of each task.")] = 48,
    threads: int = 2,
) -> None:
    """Print every number of the model card."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    random.seed(0)
    bench = open_bench(wheel, work)
    checkpoint = checkpoint or ensure_embedded_model()
    model = measure.load_weights(checkpoint)
    texts = {}
    for argument in held_out:
        name, _, path = argument.partition("=")
        texts[name] = evaluation_windows(Path(path), bench.tokenizer, windows=windows, length=1024)

    def say(what: str, value: object) -> None:
        print(json.dumps({what: value}), flush=True)

    say("geometry", asdict(model.geometry))
    say("sizes", measure.sizes(model, checkpoint, deltas))
    for name, tokens in texts.items():
        say(f"perplexity {name} ({len(tokens)} windows)", measure.perplexity(model, tokens))
        say(f"perplexity {name}, dense", dense_perplexity(bench, tokens))
    deep = next(iter(texts.values()))[:fewer]
    table = measure.routing_report(model, deep)
    routing.write_text(json.dumps({"tokens": deep.numel(), "layers": table}, indent=1) + "\n")
    say("routing", table)
    say("routing, all layers", measure.routing_summary(table))
    record = record_exits(model, next(iter(texts.values())), FIRST_EXIT)
    for row in exit_table(record):
        say(f"exits after layer {row['layer']}", row)
    say("exits, calibrated", calibrated_exits(record))
    del record
    for gating in (
        measure.exact, measure.substitute_one, measure.any_experts,
        measure.drop_one, measure.drop_routed,
    ):  # fmt: skip
        say(f"perplexity, {gating.__name__}", measure.perplexity(model, deep, gating))
    say("skip harm", measure.skip_harm(model, deep, [3, 12, 21, 28]))
    say("the same windows here", measure.perplexity(model, deep[:3]))
    del model  # two copies of an upcycled model need not fit
    say("perplexity in transformers", perplexity_in_transformers(checkpoint, deep[:3]))
    say("samples", samples(checkpoint))
    for path in tasks or []:
        say(f"task {path.name}", task_scores(checkpoint, path, questions))


if __name__ == "__main__":
    typer.run(main)
