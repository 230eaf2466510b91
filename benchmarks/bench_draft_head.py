"""How sure a draft head is of what it names, how often that is right, and how many tokens a batch
brings where it names only what is likely enough.

    python benchmarks/bench_draft_head.py --text FILE [--model MODEL] [--quantise int8]

Of tokens that the model itself generates greedily after windows of a text, as servers do: after
each the head drafts a chain, and what the model says next is what that had to be. Nothing here is
timed: the same inputs give the same figures.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from trimmoe.calibrate.drafted import head_drafts
from trimmoe.calibrate.text import read_texts, token_windows
from trimmoe.calibrate.windows import Windows
from trimmoe.core.precision import Precision
from trimmoe.core.specs import MOST_DRAFTED, BoolArray, FloatArray
from trimmoe.experiments.opening import resolved
from trimmoe.models.base import MoEView
from trimmoe.models.draft_head_file import open_draft_head
from trimmoe.models.exact import full_depth, greedy
from trimmoe.models.load import load_tokenizer, open_model
from trimmoe.progress import track

_PROMPT, _ANSWER = 32, 45
"""Tokens of a prompt and of its answer."""
_LIKELY = (0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--answers", type=int, default=50)
    parser.add_argument("--quantise", type=Precision, default=Precision.NONE)
    parser.add_argument("--draft-head", default="auto")
    options = parser.parse_args()
    path = resolved(options.model)
    view = open_model(path, dtype=torch.float32, quantise=options.quantise)
    open_draft_head(view, Path(path), options.draft_head)
    if view.draft_head is None:
        parser.error(f"{options.model} has no draft head; make one with `trimmoe draft-head`.")
    windows = token_windows(
        read_texts(options.text),
        tokenizer=load_tokenizer(path),
        tokens=options.answers * _PROMPT,
        window=_PROMPT,
        seed=0,
    )
    made = [_drafted(view, prompt) for prompt in track(windows.tolist(), "Drafting")]
    chances, right = (np.concatenate(parts) for parts in zip(*made, strict=True))
    _tell(chances, right)


def _drafted(view: MoEView, prompt: list[int]) -> tuple[FloatArray, BoolArray]:
    """By the tokens of an answer, chances that a head gives all that it drafts to be right, up to
    each of a chain, and whether they are, [n, `MOST_DRAFTED`] each."""
    tokens = prompt + greedy(view, [prompt], _ANSWER)[0]
    cache = view.new_cache(slots=1)
    batch = view.batch(cache, [cache.alloc()], [range(len(tokens))])
    whole = full_depth(view, view.embed(batch.pad([tokens]), batch), batch, cache)
    windows, follows = Windows(ids=np.array([tokens])), view.logits(whole).argmax(-1).numpy()
    chances, wrong = head_drafts(view, windows, whole, follows)
    whole_chains = slice(len(prompt), len(tokens) - MOST_DRAFTED)
    return chances[whole_chains], ~wrong[whole_chains]


def _tell(chances: FloatArray, right: BoolArray) -> None:
    print(
        f"{len(chances)} tokens. The head gives its first draft a chance of "
        f"{chances[:, 0].mean():.2f} on average, and it is right {right[:, 0].mean():.2f} of the "
        "time."
    )
    print("| all drafts together as likely as | rows | tokens | drafts that are right |")
    print("|---|---|---|---|")
    for likely in _LIKELY:
        named = chances >= likely
        rows, tokens = named.sum(1).mean(), (named & right).sum(1).mean()
        print(f"| {likely:.2f} | {1 + rows:.2f} | {1 + tokens:.2f} | {tokens / rows:.0%} |")


if __name__ == "__main__":
    main()
