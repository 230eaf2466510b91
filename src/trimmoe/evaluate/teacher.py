"""Teacher forcing: decode real text under a policy, compare with the exact model.

Every sequence starts from an exactly executed context; from there each token is decoded under the
policy, attending to whatever KV the policy left behind, and the true next token follows whatever
was predicted. Flips are therefore measured jointly, with every approximation's effect on later
tokens in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import beta
from torch import Tensor

from trimmoe.core.ledger import Ledger
from trimmoe.core.specs import FloatArray, IntArray
from trimmoe.evaluate.jobs import Forced, added, run_jobs
from trimmoe.evaluate.scoring import Scoring
from trimmoe.models.base import MoEView
from trimmoe.models.encoder_decoder import EncoderDecoderView
from trimmoe.models.exact import exact_logits
from trimmoe.progress import track
from trimmoe.runtime.local import LocalDriver
from trimmoe.runtime.texts import batches

_ROWS_AT_ONCE = 512
"""Tokens that the exact model runs together: their logits exist at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Passages:
    """Held-out text cut into B sequences of equal length, with the exact model's answers."""

    token_ids: IntArray
    """[B, context + steps + 1]."""
    context: int
    """Tokens executed exactly before decoding starts."""
    predictions: IntArray
    """Exact model's next-token prediction at each decoded position, [B, steps]."""
    exact_nll: FloatArray
    """Negative log likelihood of the true next token under the exact model, [B, steps]."""

    @property
    def steps(self) -> int:
        return self.token_ids.shape[1] - self.context - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """What a policy did to a text and what it cost."""

    ledger: Ledger
    tokens: int
    flips: int
    """Decoded positions whose prediction differs from the exact model's."""
    nll: float
    """Mean negative log likelihood of the true next token."""
    worst_prefix: float = 0.0
    """Largest share of its credit that any sequence had been charged after any of its tokens."""
    guessed: int = 0
    """Decoded positions where the user's own server was sure enough of its guess."""
    guessed_right: int = 0
    """Those of them where the exact model agreed."""

    @property
    def agreement(self) -> float:
        return 1.0 - self.flips / self.tokens

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.nll))

    @property
    def flip_rate_interval(self) -> tuple[float, float]:
        """Two-sided 95 % Clopper-Pearson interval of the flip rate."""
        return flip_rate_interval(self.flips, self.tokens)


def flip_rate_interval(flips: int, tokens: int) -> tuple[float, float]:
    """Two-sided 95 % Clopper-Pearson interval of a rate."""
    low = beta.ppf(0.025, flips, tokens - flips + 1) if flips else 0.0
    high = 1.0 if flips == tokens else beta.ppf(0.975, flips + 1, tokens - flips)
    return float(low), float(high)


def cut_passages(
    view: MoEView, token_ids: Sequence[int], *, count: int, context: int, steps: int
) -> Passages:
    """Cut `count` passages, evenly spread over `token_ids`, and ask the exact model.

    Raises ValueError if the text is shorter than one passage.
    """
    length = context + steps + 1
    if len(token_ids) < length:
        raise ValueError(f"{len(token_ids)} tokens, one passage needs {length}")
    count = min(count, len(token_ids) // length)
    starts = np.linspace(0, len(token_ids) - length, count).astype(int)
    cut = np.array([token_ids[start : start + length] for start in starts])
    predictions, nll = [], []
    together = batches([length] * count, most_rows=_ROWS_AT_ONCE)
    for some in track(together, "Exact model on the held-out text"):
        rows = cut[some].tolist()
        for row, logits in zip(rows, _exact(view, rows, context), strict=True):
            predictions.append(logits.argmax(-1).numpy(force=True))
            nll.append(_nll(logits, torch.tensor(row[context + 1 :])))
    return Passages(
        token_ids=cut,
        context=context,
        predictions=np.stack(predictions),
        exact_nll=np.stack(nll),
    )


def _exact(view: MoEView, rows: list[list[int]], context: int) -> list[Tensor]:
    """The exact model's logits after each token from `context` on but the last, [steps, V] each."""
    if isinstance(view, EncoderDecoderView):
        decoded = [[view.start_token, *row[context:-1]] for row in rows]
        # One by one, as they are decoded: experts turn tokens away from a call with too many.
        sources = [row[:context] for row in rows]
        return [each[1:] for each in exact_logits(view, decoded, sources=sources, chunk=1)]
    return [each[context:] for each in exact_logits(view, [row[:-1] for row in rows])]


def score(
    driver: LocalDriver,
    passages: Passages,
    *,
    access: Sequence[int],
    budget: float,
    confidence: float,
    label: str,
    scoring: Scoring = Scoring.LAYERS,
) -> Score:
    """Decode the passages under the policy of a driver that has decoded nothing else; passage b
    enters at server `access[b]`."""
    jobs = [
        Forced(prompt=row[: passages.context], answer=row[passages.context :])
        for row in passages.token_ids.tolist()
    ]
    run_jobs(
        driver,
        jobs,
        access=np.asarray(access),
        budget=budget,
        confidence=confidence,
        at_once=len(jobs),
        label=label,
        scoring=scoring,
    )
    flips, nll, ledger = 0, 0.0, None
    for job, exact in zip(jobs, passages.predictions, strict=True):
        flips += int((np.array(job.predictions[1:]) != exact).sum())
        nll -= sum(job.logprobs[1:])
        ledger = added(ledger, job.ledger)
    assert ledger is not None
    return Score(
        ledger=ledger,
        tokens=ledger.tokens,
        flips=flips,
        nll=nll / ledger.tokens,
        worst_prefix=max(job.worst_prefix for job in jobs),
        guessed=driver.guesser.guessed if driver.guesser is not None else 0,
        guessed_right=driver.guesser.right if driver.guesser is not None else 0,
    )


def _nll(logits: Tensor, following: Tensor) -> FloatArray:
    """Negative log likelihood of token ids [n] under logits [n, V]."""
    losses = torch.nn.functional.cross_entropy(
        logits.float(), following.to(logits.device), reduction="none"
    )
    return losses.double().numpy(force=True)
