"""How often the second guess is right where the first is not, and from how often on it would pay to
follow both.

    python benchmarks/bench_runner_up.py --plan plan.trim --text FILE [--draft-model PATH]

Of the own pass of every server of a plan, with its experts and copies of others, and of a draft
model if one is given. Following the second guess as well sends one more row through the layers; it
saves the way through all of them where it is right. Nothing here is timed: the same inputs give the
same figures, and times are the cost model's.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trimmoe.calibrate.text import read_texts, token_windows
from trimmoe.core.plan import Plan, load_plan
from trimmoe.core.precision import Precision
from trimmoe.core.profile import Profile, load_profile
from trimmoe.core.specs import FloatArray, IntArray
from trimmoe.cost.guessing import guess_times_s, row_times_s
from trimmoe.experiments.method_engines import method_engine
from trimmoe.experiments.methods import configured, find_method
from trimmoe.experiments.opening import open_drafts, profile_path, resolved
from trimmoe.models.base import MoEView
from trimmoe.models.draft import DraftModel
from trimmoe.models.exact import exact_logits
from trimmoe.models.load import load_tokenizer, open_model
from trimmoe.policy.presets import speculative
from trimmoe.runtime.home import home_states, owns

_LENGTH, _FROM, _AT_ONCE = 256, 32, 64
"""Tokens of a window, those of them that are context alone, and those that are read together."""
_GUESSES = 3
_SHARES = (0.05, 0.1, 0.2)
"""Of tokens after which two guesses are followed, those of which the first has the least lead."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--quantise", type=Precision, default=Precision.NONE)
    parser.add_argument("--draft-model")
    options = parser.parse_args()
    path = resolved(options.model)
    view = open_model(path, dtype=torch.float32, hashed=True, quantise=options.quantise)
    profile = load_profile(profile_path(options.profile, options.model))
    plan, tokenizer = load_plan(options.plan), load_tokenizer(path)
    draft = open_drafts(options.draft_model, view, tokenizer, speculative(), slots=1)
    even = _break_even(view, profile, plan)
    print(
        "| text | source | first right | second, where that is wrong | third | second pays from "
        "| first or second, followed both where they are nearest |"
    )
    print("|---|---|---|---|---|---|---|")
    for text in options.text:
        ids = token_windows(
            read_texts([text]), tokenizer=tokenizer, tokens=options.tokens, window=_LENGTH, seed=0
        )
        for name, right, least in _sources(view, profile, plan, ids, draft, even):
            first, second, third, *tenths = right
            wrong = 1 - first
            nearest = ", ".join(
                f"{share:.0%}: {each:.1%}" for share, each in zip(_SHARES, tenths, strict=True)
            )
            print(
                f"| {text.name} | {name} | {first:.1%} | {second / wrong:.1%} | "
                f"{third / max(wrong - second, 1e-9):.1%} | {least / wrong:.1%} | {nearest} |"
            )


def _sources(
    view: MoEView,
    profile: Profile,
    plan: Plan,
    ids: IntArray,
    draft: DraftModel | None,
    even: FloatArray,
) -> Iterator[tuple[str, FloatArray, float]]:
    """Sources of guesses, the shares of tokens whose first, second and third guess is right, and
    the share of all tokens whose second guess has to be."""
    predicted = torch.stack(exact_logits(view, ids.tolist())).argmax(-1)[:, _FROM:]
    for server, own in enumerate(owns(view, profile, plan.hosts, plan.stand_in_bits)):
        made = []
        for row in ids.tolist():
            cache = view.new_cache(slots=1)
            batch = view.batch(cache, [0], [range(len(row))])
            made.append(_best(view.logits(home_states(view, [row], batch, cache, own))))
        name = plan.cluster.server_names[server]
        yield name, _right(torch.stack(made), predicted), float(even[server])
    if draft is not None:
        made = [_drafted(draft, row) for row in ids.tolist()]
        yield "draft model", _right(torch.stack(made), predicted), float(even.mean())


def _drafted(draft: DraftModel, row: list[int]) -> Tensor:
    memory = draft.begin()
    starts = range(0, len(row), _AT_ONCE)
    made = [_best(draft.read(memory, at, row[at : at + _AT_ONCE])) for at in starts]
    draft.end(memory)
    return torch.cat(made)


def _best(logits: Tensor) -> Tensor:
    """The most probable tokens, best first, and the first one's lead, [n, 4]."""
    found = logits.float().softmax(-1).topk(_GUESSES, dim=-1)
    lead = found.values[:, 0] - found.values[:, 1]
    return torch.cat([found.indices.double(), lead.double()[:, None]], dim=1)


def _right(made: Tensor, predicted: Tensor) -> FloatArray:
    """Share of tokens of which each of three guesses is right, and of which the first or, in each
    of `_SHARES`, the second is; `made` [W, T, 4] as `_best` has it."""
    made = made[:, _FROM:].flatten(0, 1)
    same = (made[:, :_GUESSES] == predicted.flatten()[:, None]).double()
    nearest = same[:, 1][made[:, _GUESSES].argsort()].cumsum(0) / len(same)
    both = [same[:, 0].mean() + nearest[int(share * len(same)) - 1] for share in _SHARES]
    return np.array([*same.mean(0).tolist(), *(float(each) for each in both)])


def _break_even(view: MoEView, profile: Profile, plan: Plan) -> FloatArray:
    """Share of tokens whose second guess has to be right so that what is saved, the way through all
    layers less a guess, makes up for a row more on every token's way, by access server, [M]."""
    method = find_method("speculative")
    settings = configured(method, budget=0.0, confidence=0.9)
    engine = method_engine(method, plan, profile, view.spec, settings)
    cost, top_k = engine.cost, view.spec.top_k
    whole_s = np.full(cost.server_count, engine.reference_s * cost.layer_count)
    saved_s = np.maximum(whole_s - guess_times_s(cost, top_k), 1e-12)
    return row_times_s(cost, engine.routes, top_k) / saved_s


if __name__ == "__main__":
    with torch.inference_mode():
        main()
