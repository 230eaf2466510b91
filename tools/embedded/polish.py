"""Third stage: text and tasks, exits that are right when they are sure, and more trimming.

The output goes half towards the dense model's distribution and half towards the text itself. The
output head on the states after earlier layers goes towards the student's *own* output: what an
early exit must name is what the last layer will name, not what the text says. Attention learns too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from trimmoe.models.embedded.deltas import Geometry
from trimmoe.models.exit_head import rms_direction

from .distill import Pass, Student, dense_states, divergence
from .layerwise import LayerwiseSettings
from .network import BF16, Layer, StudentLayer, Trim, dense_layer
from .stages import Bench, progress
from .tasks import Windows, is_task, pack_whole, plain, task_documents
from .text import Source, documents, excerpts, pack, split
from .training import Step, train


@dataclass(frozen=True, kw_only=True, slots=True)
class PolishSettings:
    """How all layers train in the end."""

    steps: int = 600
    windows: int = 2
    length: int = 512
    lr: float = 1e-3
    warmup: int = 20
    clip: float = 1.0
    attention_rank: int = 16
    text_share: float = 0.5
    """Of the text itself in the goal of the final layer; the dense model has the rest."""
    answer_weight: float = 4.0
    """What an answer's token counts in the text's share against any other."""
    exit_from: int = 12
    """First layer whose state the output head may read."""
    exit_positions: int = 512
    """Positions that leave early, each after a layer drawn for it alone."""
    exit_weight: float = 0.25
    """What the divergence from the last layer counts after the last but one layer; after the
    first that may be left it counts `exit_least` times as much, in between in proportion."""
    exit_least: float = 0.3
    first_steps: int = 100
    """Steps in which the exits come first: their divergence counts `first_weight` instead."""
    first_weight: float = 1.0
    sure_weight: float = 0.2
    """Of the cross-entropy of linear probes that tell from a state's direction whether leaving
    there would be right: what a calibration will fit is then there to be read."""
    kept_share: float = 0.6
    """Of the layers' first state in the mean of first and last that the stage ends with: text
    unlike the stage's loses less, and text like it next to nothing."""
    balance_weight: float = 0.02
    anchor_weight: float = 0.02
    skip_share: float = 0.06
    drop_share: float = 0.10


def polish_windows(
    bench: Bench, sources: list[Source], settings: PolishSettings, *, seed: int
) -> Windows:
    """Every source with its share, shuffled; kept as `polish-tokens.pt`."""
    path = bench.work / "polish-tokens.pt"
    if not path.exists():
        total = sum(source.weight for source in sources)
        windows = settings.steps * settings.windows
        parts = [
            _source_windows(
                source, bench.tokenizer, windows=round(windows * source.weight / total),
                length=settings.length, seed=f"{seed}/polish/{index}",
            )
            for index, source in enumerate(sources)
        ]  # fmt: skip
        tokens = torch.cat([part.tokens for part in parts])
        answers = torch.cat([part.answers for part in parts])
        order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(seed))
        torch.save({"tokens": tokens[order], "answers": answers[order]}, path)
    return Windows(**torch.load(path))


def _source_windows(source: Source, tokenizer, *, windows: int, length: int, seed: str) -> Windows:
    generator = random.Random(seed)
    if is_task(source.path):
        stream = task_documents(source.path, generator)
        return pack_whole(stream, tokenizer, windows=windows, length=length)
    texts = split(documents(source.path), held_out=False)
    stream = excerpts(texts, generator, characters=16 * length)
    return plain(pack(stream, tokenizer, windows=windows, length=length))


def with_attention(
    bench: Bench, layers: Sequence[StudentLayer], first: LayerwiseSettings, *, rank: int, seed: int
) -> list[StudentLayer]:
    """The same layers, free to update attention as well; the updates begin at zero."""
    torch.manual_seed(seed)
    found = []
    for index, layer in enumerate(layers):
        wider = StudentLayer(
            bench.dense, index, bench.geometry, layer.order, rank=first.rank, attention_rank=rank
        )
        wider.load_state_dict(wider.state_dict() | layer.state_dict())
        found.append(wider)
    return found


@torch.no_grad()
def mixed_loss(
    student: torch.Tensor, teacher: torch.Tensor, follows: torch.Tensor, embed: torch.Tensor,
    *, text_share: float, weights: torch.Tensor, chunk: int = 512,
) -> tuple[dict[str, float], torch.Tensor]:  # fmt: skip
    """Mean KL(teacher || student) and cross-entropy of the tokens that follow, and the gradient.

    `student` and `teacher` are normed states (positions, hidden), `follows` int64 (positions,);
    the gradient is that of (1 - text_share) KL + text_share weights x cross-entropy, weights
    (positions,), in the mean over positions.
    """
    totals, gradients = {"kl": 0.0, "nll": 0.0}, []
    parts = (part.split(chunk) for part in (student, teacher, follows, text_share * weights))
    for mine, aim, token, read in zip(*parts, strict=True):
        own = functional.linear(mine, embed).float().log_softmax(-1)
        wanted = functional.linear(aim, embed).float().log_softmax(-1)
        goal = wanted.exp()
        totals["kl"] += (goal * wanted.sub_(own)).sum().item()
        totals["nll"] += functional.nll_loss(own, token, reduction="sum").item()
        taught = 1.0 - text_share
        slope = own.exp_().mul_((taught + read)[:, None]).sub_(goal, alpha=taught)
        slope[torch.arange(len(token)), token] -= read
        gradients.append(slope.to(BF16) @ embed)
    means = {name: round(total / len(student), 4) for name, total in totals.items()}
    return means, torch.cat(gradients) / len(student)


def exit_weights(
    layers: torch.Tensor, settings: PolishSettings, depth: int, step: int
) -> torch.Tensor:
    """float32, one for each of `layers`: more the later, as an early layer can know less."""
    done = (layers - settings.exit_from) / max(1, depth - 2 - settings.exit_from)
    most = settings.first_weight if step < settings.first_steps else settings.exit_weight
    return most * (settings.exit_least + (1 - settings.exit_least) * done)


class Probes(nn.Module):
    """One linear probe for each layer's states; they help to train and are not shipped."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(geometry.layers, geometry.hidden))
        self.bias = nn.Parameter(torch.zeros(geometry.layers))

    def forward(self, states: torch.Tensor, layers: torch.Tensor) -> torch.Tensor:
        """Log odds (positions,) for states (positions, hidden) after `layers` (positions,)."""
        directions = rms_direction(states)
        return (directions * self.weight[layers]).sum(-1) + self.bias[layers]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exits:
    """Tokens that leave early, each after a layer of its own."""

    layers: torch.Tensor
    """int64 (positions,)."""
    hidden: torch.Tensor
    """States after those layers, (positions, hidden)."""
    states: torch.Tensor
    """The same as the output head reads them."""
    final: torch.Tensor
    """What it reads after the last layer; no gradient."""


def draw_exits(
    student: Student, found: Pass, settings: PolishSettings, generator: torch.Generator
) -> Exits:
    final = found.states.detach().flatten(0, 1)
    chosen = torch.randperm(len(final), generator=generator)[: settings.exit_positions]
    last = student.geometry.layers - 1
    layers = torch.randint(settings.exit_from, last, chosen.shape, generator=generator)
    every = torch.stack([state.flatten(0, 1) for state in found.after.values()])
    hidden = every[layers - settings.exit_from, chosen]
    return Exits(layers=layers, hidden=hidden, states=student.normed(hidden), final=final[chosen])


@torch.no_grad()
def agreement(states: torch.Tensor, final: torch.Tensor, embed: torch.Tensor) -> torch.Tensor:
    """Whether the output head names the same token from both; bool (positions,)."""
    named = [functional.linear(each, embed).argmax(-1) for each in (states, final)]
    return named[0] == named[1]


def polish_step(
    student: Student, teacher: list[Layer], windows: Windows, settings: PolishSettings, *, seed: int
) -> Step:
    """A step of `train`: gradients of some windows."""

    def step(rows: torch.Tensor, index: int) -> dict[str, float]:
        generator = torch.Generator().manual_seed(seed + index)
        trim = Trim(
            skip_share=settings.skip_share, drop_share=settings.drop_share, generator=generator
        )
        batch = windows.tokens[rows].long()
        tokens, follows = batch[:, :-1], batch[:, 1:].flatten()
        weights = 1 + (settings.answer_weight - 1) * windows.answers[rows][:, 1:].flatten()
        kept = range(settings.exit_from, student.geometry.layers - 1)
        found = student.run(tokens, trim, kept=kept)
        goal = dense_states(tokens, teacher, student.embed, student.final_norm, student.geometry)
        flat = found.states.flatten(0, 1)
        entry, gradient = mixed_loss(
            flat.detach(), goal.flatten(0, 1), follows, student.embed,
            text_share=settings.text_share, weights=weights,
        )  # fmt: skip
        exits = draw_exits(student, found, settings, generator)
        early_gradient, sure, more = _exit_losses(student, exits, settings, index)
        side = settings.balance_weight * found.balance.sum() + settings.sure_weight * sure
        side = side + settings.anchor_weight * found.drift.sum()
        roots = [flat, exits.states, side]
        torch.autograd.backward(roots, [gradient, early_gradient, torch.ones_like(side)])
        routing = {"balance_max": found.balance.max(), "drift": found.drift.mean()}
        return entry | more | {name: round(value.item(), 4) for name, value in routing.items()}

    return step


def _exit_losses(
    student: Student, exits: Exits, settings: PolishSettings, step: int
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Gradient for the early states, the probes' loss, and what the log says."""
    weights = exit_weights(exits.layers, settings, student.geometry.layers, step)
    loss, gradient = divergence(exits.states.detach(), exits.final, student.embed)
    agrees = agreement(exits.states.detach(), exits.final, student.embed).float()
    odds = student.probes(exits.hidden, exits.layers)
    sure = functional.binary_cross_entropy_with_logits(odds, agrees)
    entry = {"exits": loss, "agree": agrees.mean().item(), "sure": sure.item()}
    rounded = {name: round(value, 4) for name, value in entry.items()}
    return gradient * weights[:, None].to(BF16), sure, rounded


def polish_stage(
    bench: Bench, layers: Sequence[StudentLayer], sources: list[Source],
    first: LayerwiseSettings, settings: PolishSettings, *, seed: int,
) -> list[StudentLayer]:  # fmt: skip
    """Layers after the third stage; `polish.pt` holds the state, `polish.log` every step's loss."""
    windows = polish_windows(bench, sources, settings, seed=seed)
    layers = with_attention(bench, layers, first, rank=settings.attention_rank, seed=seed)
    began = [{n: value.clone() for n, value in layer.state_dict().items()} for layer in layers]
    student = Student(bench.dense, layers, bench.geometry)
    student.probes = Probes(bench.geometry)
    teacher = [dense_layer(bench.dense, index) for index in range(bench.geometry.layers)]
    with progress() as display:
        task = display.add_task("polish", total=settings.steps)
        train(
            student, polish_step(student, teacher, windows, settings, seed=seed), settings,
            windows=len(windows.tokens), checkpoint=bench.work / "polish.pt",
            advance=lambda steps: display.advance(task, steps),
        )  # fmt: skip
    for layer, first_state in zip(layers, began, strict=True):
        average(layer, first_state, share=settings.kept_share)
    return layers


@torch.no_grad()
def average(layer: StudentLayer, earlier: dict[str, torch.Tensor], *, share: float) -> None:
    """Move the layer towards an earlier state of it, factor by factor: near one another the means
    of the factors multiply to nearly the mean of the products."""
    for name, value in layer.named_parameters():
        value.lerp_(earlier[name], share)
