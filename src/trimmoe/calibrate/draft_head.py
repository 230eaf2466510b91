"""Fit a draft head to a model: it learns to name what the model itself says some tokens ahead, on
text and on what the model goes on with, as EAGLE's heads and multi-token prediction do."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimmoe.calibrate.draft_module import DraftModule, NamedLoss
from trimmoe.core.errors import UserError
from trimmoe.core.precision import GROUP
from trimmoe.core.specs import MOST_DRAFTED
from trimmoe.models.draft import causal_model
from trimmoe.models.draft_head import HeadWeights, Sizes

HEAD_SIZE, ROPE_THETA, EPSILON = 64, 1e5, 1e-5
_WEIGHTS = (1.0, 0.8, 0.65, 0.5)
"""Of a chain's drafts in the loss."""
_BETAS, _DECAY, _WARM_STEPS, _LEAST = (0.9, 0.95), 0.01, 100, 0.02
_CLIP, _MEAN_STEPS = 1.0, 50
_TEXT_EVERY = 3
"""Every so many steps learn from text, the others from what the model goes on with."""
Tell = Callable[[str, float], None]
"""Told what is done, and how much of it, from 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FitSettings:
    """How long a head is fitted, and how large it is."""

    minutes: float = 10.0
    """Of training; what the model goes on with is made before."""
    steps: int | None = None
    """Of training in place of the minutes: the same head however fast the machine is."""
    prompt: int = 48
    going_on: int = 144
    """Tokens of a prompt, and of what the model makes of it: every second one by its most probable
    tokens, the others drawn at a temperature."""
    temperature: float = 0.8
    sequences: int = 4096
    """Of what the model goes on with."""
    batch: int = 64
    """Windows of text in a step."""
    frequent: int = 16_384
    """Tokens that can be named."""
    rate: float = 2e-3
    seed: int = 0

    def within(self, context: int) -> FitSettings:
        """The same for a model of such a context, which may be shorter than what is learned."""
        prompt = min(self.prompt, context // 4)
        return replace(self, prompt=prompt, going_on=min(self.going_on, context - prompt))


@dataclass(frozen=True, kw_only=True, slots=True)
class Taught:
    """A model of transformers as a head learns from it."""

    model: Any

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def rows(self) -> Tensor:
        """The output head's, [V, d]."""
        return self.model.get_output_embeddings().weight.detach()

    @torch.no_grad()
    def states(self, tokens: Tensor) -> Tensor:
        """As the output head reads them, for tokens [B, T], [B, T, d]."""
        return self.model.base_model(input_ids=tokens).last_hidden_state

    @torch.no_grad()
    def embedded(self, tokens: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(tokens)

    @torch.no_grad()
    def goes_on(self, prompts: Tensor, new: int, temperature: float | None) -> Tensor:
        """Prompts [B, P] and so many tokens more; the most probable ones, or drawn."""
        sampling: dict[str, Any] = {"do_sample": temperature is not None}
        if temperature is not None:
            sampling |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        return self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            min_new_tokens=new,
            max_new_tokens=new,
            pad_token_id=0,
            **sampling,
        )


def open_taught(folder: Path, device: torch.device) -> Taught:
    """A checkpoint in transformers. Raises `UserError` if it cannot be opened."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    advice = "give a checkpoint in safetensors"
    model = causal_model(
        folder, str(folder), advice, dtype=dtype, device=device, use_safetensors=True
    )
    return Taught(model=model)


def sizes_for(hidden: int) -> Sizes:
    """Of a head for states of so many numbers. Raises `UserError` where there is none."""
    if hidden % GROUP:
        raise UserError(f"States of {hidden} numbers take no draft head; {GROUP} has to divide it.")
    heads = max(hidden // HEAD_SIZE, 1)
    shared = next(n for n in (heads // 4, heads // 3, heads) if n and heads % n == 0)
    return Sizes(
        hidden=hidden,
        heads=heads,
        kv_heads=shared,
        head_size=min(HEAD_SIZE, hidden),
        inner=2 * hidden,
        rope_theta=ROPE_THETA,
        epsilon=EPSILON,
    )


def fit_draft_head(
    taught: Taught, windows: Tensor, settings: FitSettings, tell: Tell = lambda *_: None
) -> HeadWeights:
    """A head for a model, fitted on windows of text [W, L], of which every tenth is held out."""
    torch.manual_seed(settings.seed)
    windows = windows.to(taught.device)
    held = torch.arange(len(windows), device=windows.device) % 10 == 9
    text, kept = windows[~held], windows[held]
    made = _continuations(taught, text, settings, tell)
    frequent = _frequent(torch.cat([text.flatten(), made.flatten()]), taught, settings.frequent)
    sizes = sizes_for(taught.rows.shape[1])
    module = DraftModule(sizes).to(taught.device)
    best = _trained(module, taught, (text, made), frequent, settings, tell)
    module.load_state_dict(best)
    prompts = kept[:, : settings.prompt]
    greedy = taught.goes_on(prompts, settings.going_on, None)
    return HeadWeights(
        sizes=sizes,
        matrices={name: part.detach().cpu().numpy() for name, part in module.matrices.items()},
        norms={name: part.detach().cpu().numpy() for name, part in module.norms.items()},
        frequent=frequent.cpu().numpy(),
        right=right_shares(module, taught, greedy, settings.prompt, frequent),
        about={"settings": repr(settings), "made_by": "trimmoe draft-head"},
    )


def _continuations(taught: Taught, text: Tensor, settings: FitSettings, tell: Tell) -> Tensor:
    """What the model makes of prompts from anywhere in the text, [n, P + new]."""
    found: list[Tensor] = []
    prompt = min(settings.prompt, text.shape[1])
    for at in range(0, settings.sequences, settings.batch):
        tell("what the model goes on with", at / settings.sequences)
        rows = torch.randint(len(text), (settings.batch,), device=text.device)
        start = int(torch.randint(text.shape[1] - prompt + 1, ()))
        prompts = text[rows, start : start + prompt]
        drawn = None if len(found) % 2 == 0 else settings.temperature
        found.append(taught.goes_on(prompts, settings.going_on, drawn))
    return torch.cat(found)[: settings.sequences]


def _frequent(tokens: Tensor, taught: Taught, count: int) -> Tensor:
    vocabulary = taught.rows.shape[0]
    counts = torch.bincount(tokens, minlength=vocabulary)[:vocabulary]
    return counts.topk(min(count, vocabulary)).indices.sort().values


def _trained(
    module: DraftModule,
    taught: Taught,
    sources: tuple[Tensor, Tensor],
    frequent: Tensor,
    settings: FitSettings,
    tell: Tell,
) -> dict[str, Tensor]:
    """The mean of what the parameters were in the end."""
    optimiser = torch.optim.AdamW(module.parameters(), betas=_BETAS, weight_decay=_DECAY)
    rows = taught.rows[frequent]
    mean = {name: value.detach().clone() for name, value in module.state_dict().items()}
    began_s, step, done = time.monotonic(), 0, 0.0
    limit_s = 60.0 * settings.minutes
    while done < 1.0:
        source = sources[0] if step % _TEXT_EVERY == 0 else sources[1]
        tokens = source[torch.randint(len(source), (settings.batch,), device=source.device)]
        warm = min(1.0, (step + 1) / _WARM_STEPS)
        slowly = 0.5 * (1.0 + math.cos(math.pi * done)) + _LEAST
        for group in optimiser.param_groups:
            group["lr"] = settings.rate * warm * slowly
        loss = chain_loss(module, taught, tokens, rows)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), _CLIP)
        optimiser.step()
        kept = min(step / (step + _MEAN_STEPS), 1.0 - 1.0 / _MEAN_STEPS)
        for name, value in module.state_dict().items():
            mean[name].lerp_(value, 1.0 - kept)
        step += 1
        spent = step / settings.steps if settings.steps else (time.monotonic() - began_s) / limit_s
        done = min(spent, 1.0)
        tell(f"training, loss {float(loss.detach()):.3f}", done)
    return mean


def chain_loss(module: DraftModule, taught: Taught, tokens: Tensor, rows: Tensor) -> Tensor:
    """Of a chain of drafts behind every token of sequences [B, T]; `rows` [V', d] are the output
    head's of the tokens that can be named."""
    states, embedded = taught.states(tokens), taught.embedded(tokens[:, 1:])
    logits = states @ rows.T
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
        read = module(states[:, :-1], embedded, MOST_DRAFTED)
    losses = [
        weight
        * NamedLoss.apply(
            each.flatten(0, 1).to(rows.dtype), rows, logits[:, ahead + 1 :].flatten(0, 1)
        )
        for ahead, (weight, each) in enumerate(zip(_WEIGHTS, read, strict=True))
    ]
    return torch.stack(losses).sum()


@torch.no_grad()
def right_shares(
    module: DraftModule, taught: Taught, greedy: Tensor, prompt: int, frequent: Tensor
) -> tuple[float, ...]:
    """How often each draft of a chain is what the model says where those before it were, in
    sequences [B, T] that the model went on with by its most probable tokens after a prompt."""
    states, embedded = taught.states(greedy), taught.embedded(greedy[:, 1:])
    says = (states @ taught.rows.T).argmax(-1)
    read = module(states[:, :-1].float(), embedded.float(), MOST_DRAFTED)
    alive = torch.arange(greedy.shape[1] - 1, device=greedy.device) >= prompt - 1
    alive = alive.expand(greedy.shape[0], -1)
    shares: list[float] = []
    for ahead, each in enumerate(read):
        named = frequent[(each.to(taught.rows.dtype) @ taught.rows[frequent].T).argmax(-1)]
        alive = alive[:, : named.shape[1]]
        right = (named == says[:, ahead + 1 :]) & alive
        shares.append(float(right.sum() / alive.sum().clamp(min=1)))
        # It goes on where the draft is right, and is what the text goes on with.
        following = greedy[:, ahead + 2 :]
        alive = right[:, : following.shape[1]] & (named[:, : following.shape[1]] == following)
    return tuple(np.round(shares, 4).tolist())
