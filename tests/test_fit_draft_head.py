"""A draft head is fitted to a model: what is trained is what servers run, and it learns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from draft_heads import PlainHead, random_head
from serving import Tiny
from trimmoe.calibrate.draft_head import (
    FitSettings,
    Taught,
    chain_loss,
    fit_draft_head,
    open_taught,
    sizes_for,
)
from trimmoe.calibrate.draft_module import DraftModule, NamedLoss
from trimmoe.cli import app
from trimmoe.core.errors import UserError
from trimmoe.core.specs import MOST_DRAFTED
from trimmoe.models.draft_head_file import load_draft_head, save_draft_head

CPU = torch.device("cpu")


def test_what_is_trained_is_what_servers_run() -> None:
    """The module's drafts after every token of a text, and the plain head's after its last one."""
    weights = random_head(64, 96)
    module = DraftModule(weights.sizes)
    for kept, given in ((module.matrices, weights.matrices), (module.norms, weights.norms)):
        for name, part in given.items():
            kept[name].data = torch.from_numpy(part)
    draws = torch.Generator().manual_seed(1)
    head, embedding = (torch.randn(96, 64, generator=draws) for _ in range(2))
    states = torch.randn(1, 12, 64, generator=draws)
    tokens = torch.randint(96, (13,), generator=draws)
    with torch.no_grad():
        read = module(states, embedding[tokens[1:]][None], 3)
    plain = PlainHead(weights, head, embedding)
    for at in (2, 6, 9):
        following = tokens[at + 1 : at + 3].tolist()
        wanted = plain.scores(states[0, :at], tokens[: at + 1].tolist(), following)
        for ahead, scores in enumerate(wanted):
            made = read[ahead][0, at - 1] @ head.T
            assert torch.allclose(made.double(), scores, atol=1e-3), (at, ahead)


def test_the_gradient_of_the_loss_is_that_of_its_formula() -> None:
    draws = torch.Generator().manual_seed(2)
    states = torch.randn(5, 8, generator=draws, requires_grad=True)
    rows, logits = torch.randn(20, 8, generator=draws), torch.randn(5, 20, generator=draws)
    NamedLoss.apply(states, rows, logits).backward()
    made, states.grad = states.grad, None
    said = (states @ rows.T).log_softmax(-1)
    soft = -(logits.softmax(-1) * said).sum(-1).mean()
    hard = torch.nn.functional.nll_loss(said, logits.argmax(-1))
    (0.6 * soft + 0.4 * hard).backward()
    assert made is not None
    assert states.grad is not None
    assert torch.allclose(made, states.grad, atol=1e-6)


def test_a_head_learns_what_the_model_says(tiny: Tiny, tmp_path: Path) -> None:
    """In a few steps, on a model of random weights that ends up in circles."""
    taught = open_taught(tiny.folder, CPU)
    draws = np.random.default_rng(0)
    windows = torch.from_numpy(draws.integers(0, 256, (80, 24)))
    settings = FitSettings(steps=80, prompt=8, going_on=16, sequences=128, batch=16, frequent=200)
    told: list[float] = []
    head = fit_draft_head(taught, windows, settings, lambda _, done: told.append(done))
    assert told[-1] == 1.0
    assert len(head.right) == MOST_DRAFTED
    assert head.right[0] > 5 / 256, "hardly better than by chance"
    assert len(head.frequent) == 200
    save_draft_head(head, tmp_path / "head.safetensors")
    spec = tiny.view.spec
    load_draft_head(
        tmp_path / "head.safetensors", hidden=spec.hidden_size, vocabulary=spec.vocab_size
    )


def test_the_loss_falls(tiny: Tiny) -> None:
    taught = open_taught(tiny.folder, CPU)
    torch.manual_seed(0)
    sizes = sizes_for(taught.rows.shape[1])
    module = DraftModule(sizes)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (8, 24)))
    optimiser = torch.optim.AdamW(module.parameters(), lr=3e-3)
    losses = []
    for _ in range(25):
        optimiser.zero_grad()
        loss = chain_loss(module, taught, tokens, taught.rows)
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


def test_what_cannot_be_opened_or_fitted_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="transformers cannot open"):
        open_taught(tmp_path, CPU)
    with pytest.raises(UserError, match="no draft head"):
        sizes_for(100)


def test_a_model_goes_on_by_its_most_probable_tokens_or_by_chance(tiny: Tiny) -> None:
    taught: Taught = open_taught(tiny.folder, CPU)
    prompt = [5, 77, 130]
    greedy = taught.goes_on(torch.tensor([prompt]), 6, None)[0].tolist()
    assert greedy[:3] == prompt
    assert greedy[3:][: len(tiny.greedy(prompt, 6))] == tiny.greedy(prompt, 6)
    torch.manual_seed(0)
    drawn = taught.goes_on(torch.tensor([prompt] * 8), 6, 0.8)
    assert len({tuple(row.tolist()) for row in drawn}) > 1


def test_the_command_writes_a_head_for_a_model(tiny: Tiny, tmp_path: Path) -> None:
    text, path = tmp_path / "text.txt", tmp_path / "head.safetensors"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 400)
    ran = CliRunner().invoke(
        app,
        [
            "draft-head", str(tiny.folder), "--text", str(text), "-o", str(path),
            "--steps", "3", "--tokens", "4000", "--sequences", "64", "--device", "cpu",
        ],
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    spec = tiny.view.spec
    head = load_draft_head(path, hidden=spec.hidden_size, vocabulary=spec.vocab_size)
    assert all(0.0 <= share <= 1.0 for share in head.right)


def test_what_is_learned_fits_into_the_context() -> None:
    assert FitSettings().within(8192) == FitSettings()
    short = FitSettings().within(64)
    assert (short.prompt, short.going_on) == (16, 48)
