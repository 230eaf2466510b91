"""The other recipe: the dense model in every expert, each trained on a text of its own.

Branch, train, mix: one branch of the dense model for each kind of text, trained apart with a
low-rank update of its FFN; the branches become the experts of a model in Mixtral's form; the
routers first learn whose text a token comes from, then all of it trains on the mixed text.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch.nn import functional

from trimmoe.models.embedded.deltas import FFN, Geometry

from .carve import ridge
from .distill import DistillSettings, dense_walk
from .network import BF16, UpcycledLayer, dense_layer
from .stages import Bench, distill_stage
from .text import Source, documents, excerpts, pack, split


@dataclass(frozen=True, kw_only=True, slots=True)
class UpcycleSettings:
    """How the branches and the mix train."""

    rank: int = 8
    branch: DistillSettings = field(
        default_factory=lambda: DistillSettings(
            steps=40, windows=2, lr=2e-3, skip_share=0.0, drop_share=0.0, exit_weight=0.0
        )
    )
    mix: DistillSettings = field(default_factory=lambda: DistillSettings(steps=24, windows=2))
    router_windows: int = 16
    """Windows of each branch's text that the first routers are fitted to."""
    router_spread: float = 1.0
    """Standard deviation of the first routers' logits."""


def upcycled_geometry(geometry: Geometry) -> Geometry:
    """Every expert as large as the dense FFN, two of them for a token, nothing shared."""
    return replace(geometry, expert_neurons=geometry.neurons, shared_neurons=0, top_k=2)


def branch_texts(sources: list[Source], *, seed: int) -> dict[str, list[str]]:
    """Training documents by branch: a file is one branch, FILE=N is N branches by topic."""
    found = {}
    for source in sources:
        name = source.path.name.split(".")[0]
        parts = by_topic(split(documents(source.path), held_out=False), round(source.weight), seed)
        found |= {f"{name}-{index}": part for index, part in enumerate(parts)}
    return found


def by_topic(texts: list[str], count: int, seed: int, *, head: int = 3000) -> list[list[str]]:
    """Documents in `count` groups that share words, told by the first `head` characters."""
    if count == 1:
        return [texts]
    from sklearn.cluster import KMeans
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.preprocessing import normalize

    words = TfidfVectorizer(stop_words="english", max_features=20000, sublinear_tf=True)
    weights = words.fit_transform(text[:head] for text in texts)
    size = min(64, weights.shape[1] - 1)
    points = normalize(TruncatedSVD(size, random_state=seed).fit_transform(weights))
    groups = KMeans(count, n_init=4, random_state=seed)  # pyright: ignore[reportArgumentType]
    labels = groups.fit_predict(points)
    return [[texts[i] for i in np.flatnonzero(labels == topic)] for topic in range(count)]


def branch_windows(texts: list[str], tokenizer, *, windows: int, length: int, seed: str):
    """int32 (windows, length) of one branch's text."""
    stream = excerpts(texts, random.Random(seed), characters=16 * length)
    return pack(stream, tokenizer, windows=windows, length=length).to(torch.int32)


def branch_stage(
    bench: Bench, name: str, tokens: torch.Tensor, settings: UpcycleSettings, *, seed: int
) -> list[dict[str, torch.Tensor]]:
    """The dense model's low-rank update for one text, by layer; `branch-NAME.pt`."""
    single = replace(bench, geometry=replace(bench.geometry, experts=1, top_k=1))
    layers = new_layers(single, rank=settings.rank, seed=seed)
    distill_stage(
        single, layers, tokens, settings.branch, seed=seed, name=f"branch-{name}", taught=False
    )
    return [layer.state_dict() for layer in layers]


def new_layers(bench: Bench, *, rank: int, seed: int) -> list[UpcycledLayer]:
    torch.manual_seed(seed)
    depth = range(bench.geometry.layers)
    return [UpcycledLayer(bench.dense, index, bench.geometry, rank=rank) for index in depth]


@torch.no_grad()
def text_routers(bench: Bench, tokens: list[torch.Tensor], *, spread: float) -> list[torch.Tensor]:
    """Per layer float32 (experts, hidden): which branch's text a token is from.

    `tokens` holds some windows of every branch; the dense model's states are what the routers
    see first, so ridge regression on them is the start.
    """
    layers = [dense_layer(bench.dense, index) for index in range(bench.geometry.layers)]
    embed = bench.dense["embed"].to(BF16)
    inputs: list[list[torch.Tensor]] = [[] for _ in layers]
    labels = []
    for branch, windows in enumerate(tokens):
        for index, (x, _) in enumerate(dense_walk(windows.long(), layers, embed, bench.geometry)):
            inputs[index].append(x.flatten(0, 1))
        labels.append(torch.full((windows.numel(),), branch))
    wanted = functional.one_hot(torch.cat(labels), len(tokens)).float()
    wanted = wanted - wanted.mean(0)
    found = []
    for parts in inputs:
        x = torch.cat(parts)
        router = ridge(x, wanted)
        logits = functional.linear(x.float(), router)
        found.append(router * (spread / (logits - logits.mean(-1, keepdim=True)).std()))
    return found


@torch.no_grad()
def mixture(
    bench: Bench,
    branches: list[list[dict[str, torch.Tensor]]],
    routers: list[torch.Tensor],
    *,
    rank: int,
) -> list[UpcycledLayer]:
    """The branches as the experts of one model."""
    layers = new_layers(bench, rank=rank, seed=0)
    for index, (layer, router) in enumerate(zip(layers, routers, strict=True)):
        layer.router.copy_(router)
        for name in FFN:
            for factors, kind in ((layer.a, "a"), (layer.b, "b")):
                every = [branch[index][f"{kind}.{name}"] for branch in branches]
                factors[name].copy_(torch.cat(every))
    return layers


def upcycle(
    bench: Bench,
    texts: dict[str, list[str]],
    mixed: torch.Tensor,
    settings: UpcycleSettings,
    *,
    seed: int,
) -> list[UpcycledLayer]:
    """Branches, routers and mix; a run that was cut off goes on from the last step written."""
    bench = replace(bench, geometry=replace(upcycled_geometry(bench.geometry), experts=len(texts)))
    need = settings.branch.steps * settings.branch.windows
    branches, first = [], []
    for index, (name, documents_) in enumerate(texts.items()):
        tokens = branch_windows(
            documents_, bench.tokenizer, windows=need, length=settings.branch.length,
            seed=f"{seed}/{name}",
        )  # fmt: skip
        branches.append(branch_stage(bench, name, tokens, settings, seed=seed + index))
        first.append(tokens[: settings.router_windows])
    routers = text_routers(bench, first, spread=settings.router_spread)
    layers = mixture(bench, branches, routers, rank=settings.rank)
    if settings.mix.steps:
        distill_stage(bench, layers, mixed, settings.mix, seed=seed, name="mix", taught=False)
    return layers
