"""How often a prediction flips when what an expert gives comes late, beside what else can be done
about an expert that is elsewhere.

    python benchmarks/bench_late.py --plan plan.trim --text FILE [--text FILE]

*Late by n*: the slot's expert runs on the state that it always reads, nobody waits for it, and
what it gives joins the residual with what the experts of the n-th layer after its own give; at the
last layer everything is waited for. The others: nothing runs in the slot, or a copy of its expert
in four or two bits. First one slot of one token at a time against clean keys and values, as
calibration measures losses, by the slot's rank and the token's steadiness class. Then all slots of
whole texts that the plan sends elsewhere, or every second one by chance, echoes and all.

Nothing here is timed: the same inputs give the same figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trimmoe.calibrate.curves import clopper_pearson_lower, clopper_pearson_upper
from trimmoe.calibrate.head import greedy
from trimmoe.calibrate.text import read_texts, token_windows
from trimmoe.calibrate.windows import Windows, run_layer
from trimmoe.core.plan import Plan, load_plan
from trimmoe.core.profile import load_profile
from trimmoe.core.specs import BoolArray, IntArray
from trimmoe.core.stand_ins import numbered
from trimmoe.experiments.opening import profile_path, resolved
from trimmoe.models.base import DROPPED, MoEView
from trimmoe.models.load import load_tokenizer, open_model
from trimmoe.models.passed import Routing
from trimmoe.progress import Bars
from trimmoe.runtime.observe import Observer

_LENGTH = 256
_FROM = 32
"""Tokens of each window that are context alone."""
_CONFIDENCE = 0.95
Chosen = Callable[[int, Tensor], Tensor]
"""Which slots of a layer's activated sets [n, k] are changed, bool [n, k]."""
Choose = Callable[[IntArray], Chosen]
"""The same of windows with these numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Instead:
    """What is done about a slot."""

    name: str
    late: int | None = None
    """Layers."""
    bits: int | None = None
    """Of a copy."""


WAYS = (
    *(Instead(name=f"late by {late}", late=late) for late in (1, 2, 4)),
    Instead(name="a copy in 4 bits", bits=4),
    Instead(name="a copy in 2 bits", bits=2),
    Instead(name="nothing"),
)


@dataclass(kw_only=True, slots=True)
class Course:
    """States on their way through the layers, one way taken of the slots that are changed."""

    view: MoEView
    way: Instead
    copies: IntArray
    """Number of every expert's copy in the way's bits, [N, E]."""
    due: dict[int, Tensor] = field(default_factory=dict)
    """What joins behind a layer, [n, d]."""

    def after(self, layer: int, attended: Tensor, routing: Routing, changed: Tensor) -> Tensor:
        """States after a layer, [n, d], of which `changed`, bool [n, k], are other slots."""
        own = routing.experts
        if self.way.bits is not None:
            experts = torch.where(changed, torch.from_numpy(self.copies[layer])[own], own)
            return run_layer(self.view, layer, attended, routing, experts)
        joins = layer if self.way.late is None else layer + self.way.late
        joins = min(joins, self.view.spec.layer_count - 1)
        if joins == layer and self.way.late is not None:
            changed = torch.zeros_like(changed)
        after = run_layer(self.view, layer, attended, routing, torch.where(changed, DROPPED, own))
        if joins > layer:
            part = self.view.experts(
                layer,
                attended,
                torch.where(changed, own, DROPPED),
                routing.gates,
                normed=routing.normed,
            )
            self.due[joins] = _longer(self.due.get(joins), part) + part
        if layer in self.due:
            after = (after + _longer(self.due.pop(layer), after)).to(after.dtype)
        return after


def _longer(rows: Tensor | None, like: Tensor) -> Tensor:
    """Some rows, zeros for those that came later."""
    whole = torch.zeros_like(like) if rows is None else like.new_zeros(like.shape, dtype=rows.dtype)
    if rows is not None:
        whole[: len(rows)] = rows
    return whole


def whole_texts(view: MoEView, ids: IntArray, course: Course, chosen: Chosen) -> IntArray:
    """What is predicted after every token of windows [W, T], [W, T]."""
    cache = view.new_cache(slots=len(ids))
    batch = view.batch(cache, range(len(ids)), [range(ids.shape[1])] * len(ids))
    hidden = view.embed(torch.from_numpy(ids), batch)
    for layer in range(view.spec.layer_count):
        attended = batch.pack(view.attend(layer, hidden, batch, cache))
        routing = view.route(layer, attended, groups=batch.groups)
        after = course.after(layer, attended, routing, chosen(layer, routing.experts))
        hidden = batch.unpack(after)
    return greedy(view, batch.pack(view.tail(hidden, batch, cache))).reshape(ids.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Singles:
    """Single slots of one window that are changed, ordered by layer."""

    position: IntArray
    """[S]."""
    layer: IntArray
    rank: IntArray

    @staticmethod
    def drawn(view: MoEView, length: int, count: int, rng: np.random.Generator) -> Singles:
        layers, top_k = view.spec.layer_count, view.spec.top_k
        return Singles(
            position=rng.integers(_FROM, length, count),
            layer=np.sort(rng.integers(layers - 1, size=count)),
            rank=rng.integers(top_k, size=count),
        )


def single_slots(
    view: MoEView, row: IntArray, courses: list[Course], singles: Singles, observer: Observer
) -> tuple[BoolArray, IntArray]:
    """Whether each change of one window flips its token's prediction, by way [W, S], and the class
    its token is in, [S]. At the last layer nothing can be late, so none is made there."""
    cache, classes = view.new_cache(slots=1), np.zeros(singles.layer.size, dtype=np.int64)
    batch = view.batch(cache, [0], [range(row.size)])
    hidden = view.embed(torch.from_numpy(row[None]), batch)
    position = torch.from_numpy(singles.position)
    states = [hidden.new_zeros(0, hidden.shape[-1]) for _ in courses]
    for layer in range(view.spec.layer_count):
        attended = batch.pack(view.attend(layer, hidden, batch, cache))
        begun, now = np.searchsorted(singles.layer, [layer, layer + 1])
        starting = attended[position[begun:now]]
        classes[begun:now] = observer.steadiness(layer, starting)
        changed = torch.zeros(now, view.spec.top_k, dtype=torch.bool)
        changed[torch.arange(begun, now), torch.from_numpy(singles.rank[begun:now])] = True
        for index, course in enumerate(courses):
            moved = states[index]
            if begun:
                moved = view.attend_whatif(layer, moved, position[:begun], 0, cache)
            rows = torch.cat([moved, starting])
            routing = view.route(layer, rows)
            states[index] = course.after(layer, rows, routing, changed)
        routing = view.route(layer, attended, groups=batch.groups)
        hidden = batch.unpack(run_layer(view, layer, attended, routing, routing.experts))
    clean = greedy(view, batch.pack(view.tail(hidden, batch, cache)))[singles.position]
    made = [greedy(view, view.tail_whatif(each, position, 0, cache)) for each in states]
    return np.stack(made) != clean, classes


def _with_copies(view: MoEView) -> None:
    """Make copies of all experts, in all bits that are looked at."""
    for bits in {way.bits for way in WAYS if way.bits is not None}:
        if not view.have_copies(np.full((view.spec.layer_count, view.spec.expert_count), bits)):
            raise SystemExit("Copies need a model in compiled blocks: float32 on a processor.")


def _courses(view: MoEView) -> list[Course]:
    shape = view.spec.layer_count, view.spec.expert_count
    return [
        Course(view=view, way=way, copies=numbered(np.full(shape, way.bits or 0))) for way in WAYS
    ]


def _of_plan(plan: Plan, users: IntArray, length: int, layer: int, experts: Tensor) -> Tensor:
    """The slots that are elsewhere, for windows of users of these servers."""
    user = torch.from_numpy(np.repeat(users, length))
    server = torch.from_numpy(plan.routes)[user, layer]
    return ~torch.from_numpy(plan.hosts)[:, layer][server[:, None], experts]


def _by_chance(seed: int, layer: int, experts: Tensor) -> Tensor:
    rng = np.random.default_rng([seed, layer])
    return torch.from_numpy(rng.integers(2, size=tuple(experts.shape)) == 1)


def _none(_layer: int, experts: Tensor) -> Tensor:
    return torch.zeros(experts.shape, dtype=torch.bool)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--plan", type=Path, action="append", required=True)
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--singles", type=int, default=1000, help="changed slots of each window")
    parser.add_argument("--chance", action="store_true", help="also every second slot by chance")
    options = parser.parse_args()
    path = resolved(options.model)
    view = open_model(path, dtype=torch.float32, hashed=True)
    profile = load_profile(profile_path(options.profile, options.model))
    profile.require_model(view.spec)
    _with_copies(view)
    observer, tokenizer = Observer(profile, view.device), load_tokenizer(path)
    plans = {path.stem: load_plan(path) for path in options.plan}
    chosen: dict[str, Choose] = {
        f"elsewhere on {stem}": partial(_elsewhere, plan) for stem, plan in plans.items()
    }
    if options.chance:
        chosen["half by chance"] = lambda users: partial(_by_chance, int(users[0]))
    for text in options.text:
        ids = token_windows(
            read_texts([text]), tokenizer=tokenizer, tokens=options.tokens, window=_LENGTH, seed=0
        )
        _print_singles(view, text.name, Windows(ids=ids), options.singles, observer)
        _print_whole(view, text.name, Windows(ids=ids), chosen)


def _print_singles(
    view: MoEView, name: str, windows: Windows, count: int, observer: Observer
) -> None:
    rng, flipped, classes, ranks = np.random.default_rng(0), [], [], []
    with Bars() as progress:
        bar = progress.add_task("Single slots", total=windows.count)
        for row in windows.ids:
            singles = Singles.drawn(view, windows.length, count, rng)
            some, its = single_slots(view, row, _courses(view), singles, observer)
            flipped.append(some)
            classes.append(its)
            ranks.append(singles.rank)
            progress.advance(bar, 1)
    flips, its, rank = np.concatenate(flipped, 1), np.concatenate(classes), np.concatenate(ranks)
    kinds = [("all", np.ones(rank.size, dtype=bool))]
    kinds += [(f"slot {one + 1}", rank == one) for one in range(view.spec.top_k)]
    kinds += [(f"class {one}", its == one) for one in np.unique(its)]
    print(f"\n{name}: one slot, flips of its own token in percent\n")
    print("| | " + " | ".join(f"{kind} ({those.sum()})" for kind, those in kinds) + " |")
    print("|---" * (1 + len(kinds)) + "|")
    for way, row in zip(WAYS, flips, strict=True):
        print(f"| {way.name} | " + " | ".join(_share(row[those]) for _, those in kinds) + " |")


def _print_whole(view: MoEView, name: str, windows: Windows, choices: dict[str, Choose]) -> None:
    rows: dict[str, list[BoolArray]] = {}
    changed: dict[str, list[float]] = {kind: [] for kind in choices}
    with Bars() as progress:
        total = -(-windows.count // 4) * (1 + len(choices) * len(WAYS))
        bar = progress.add_task("Whole texts", total=total)
        for users in np.array_split(np.arange(windows.count), -(-windows.count // 4)):
            ids = windows.ids[users]
            clean = whole_texts(view, ids, _courses(view)[0], _none)
            progress.advance(bar, 1)
            for (kind, choose), course in (
                (choice, course) for choice in choices.items() for course in _courses(view)
            ):
                counted = partial(_counting, changed[kind], choose(users))
                flipped = whole_texts(view, ids, course, counted) != clean
                rows.setdefault(f"{course.way.name}|{kind}", []).append(flipped[:, _FROM:].ravel())
                progress.advance(bar, 1)
    print(f"\n{name}: many slots, flips of all tokens in percent, echoes and all\n")
    heads = [f"{kind} ({100 * np.mean(changed[kind]):.0f} % of slots)" for kind in choices]
    print("| | " + " | ".join(heads) + " |")
    print("|---" * (1 + len(choices)) + "|")
    for way in WAYS:
        cells = [_share(np.concatenate(rows[f"{way.name}|{kind}"])) for kind in choices]
        print(f"| {way.name} | " + " | ".join(cells) + " |")


def _elsewhere(plan: Plan, users: IntArray) -> Chosen:
    return partial(_of_plan, plan, users % plan.routes.shape[0], _LENGTH)


def _counting(shares: list[float], chosen: Chosen, layer: int, experts: Tensor) -> Tensor:
    slots = chosen(layer, experts)
    shares.append(float(slots.float().mean()))
    return slots


def _share(flipped: BoolArray) -> str:
    """Percent, and its 95 % interval."""
    counts = np.array([flipped.sum()]), np.array([flipped.size])
    level = (1 + _CONFIDENCE) / 2
    low = 100 * float(clopper_pearson_lower(*counts, level)[0])
    high = 100 * float(clopper_pearson_upper(*counts, level)[0])
    return f"{100 * flipped.mean():.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
