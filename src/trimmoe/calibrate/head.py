"""Whether the output head predicts a given token: exact, mostly at a fraction of the head's cost.

Calibration asks this of every token after many layers and of every what-if, and the head is as
large as a dozen layers of a small model. It never needs the prediction itself, so logits in
bfloat16, several times quicker on processors that multiply it, decide wherever their error bound
lets them; the rest meet the whole head in the view's own precision. The answers are those of the
whole head throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trimmoe.core.specs import BoolArray, IntArray
from trimmoe.models.base import MoEView

_ROWS = 1024
"""States of one head call: [1024, V] logits stay small and multiply at full speed."""
_COLUMNS = 2048
"""Tokens of the vocabulary whose bfloat16 logits are made at once: they stay in the cache."""
_BF16_STEP = 2.0**-8
"""Largest relative error of rounding to bfloat16."""
_FLOAT32_STEP = 2.0**-24


def greedy(view: MoEView, hidden: Tensor) -> IntArray:
    """Token of the largest logit (the first among equals) for states [n, d]; int64 [n]."""
    # max with indices takes half the time of argmax.
    found = [view.logits(block).max(dim=-1).indices for block in hidden.split(_ROWS)]
    return torch.cat(found).cpu().numpy()


def most_likely(view: MoEView, hidden: Tensor) -> tuple[IntArray, np.ndarray]:
    """The same, and the natural logarithm of its probability, float32 [n]."""
    tokens, log_probabilities = [], []
    for block in hidden.split(_ROWS):
        logits = view.logits(block)
        best = logits.max(dim=-1)
        tokens.append(best.indices)
        log_probabilities.append(best.values.float() - logits.float().logsumexp(dim=-1))
    return torch.cat(tokens).cpu().numpy(), torch.cat(log_probabilities).cpu().numpy()


class Referee:
    """Answers for one view; keeps a bfloat16 copy of its head where that is of use."""

    def __init__(self, view: MoEView, *, screen: bool | None = None) -> None:
        """`screen`: use bfloat16 first; None: where it is quicker."""
        self._view = view
        self._screen = _Screen(view) if (_quick(view) if screen is None else screen) else None

    def agrees(self, hidden: Tensor, tokens: IntArray) -> BoolArray:
        """Whether the prediction from states [n, d] is `tokens` [n]; bool [n]."""
        expected = torch.from_numpy(tokens)
        blocks = zip(hidden.split(_ROWS), expected.split(_ROWS), strict=True)
        found = [self._block(states, wanted) for states, wanted in blocks]
        return np.concatenate(found) if found else np.zeros(0, dtype=bool)

    def _block(self, hidden: Tensor, tokens: Tensor) -> BoolArray:
        if self._screen is None:
            return greedy(self._view, hidden) == tokens.numpy()
        agrees, certain = self._screen.judge(self._view.head(hidden)[0], tokens)
        open_rows = torch.nonzero(~certain)[:, 0]
        if len(open_rows):
            exact = greedy(self._view, hidden[open_rows]) == tokens[open_rows].numpy()
            agrees[open_rows] = torch.from_numpy(exact)
        return agrees.numpy()


def _quick(view: MoEView) -> bool:
    """Whether the processor multiplies bfloat16 by itself and the view does not use it already."""
    if view.dtype != torch.float32 or view.device.type != "cpu":
        return False
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("amx_bf16"))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slice:
    """Some columns of the head, `first` the first one's token."""

    first: int
    rows: Tensor
    """bfloat16 [c, d + 2]: the head's rows, the norm of each and that of its rounding error."""


class _Screen:
    """Upper bounds of all logits by one bfloat16 product.

    With x = a + e and w = b + f, a and b rounded: x.w <= a.b + |e||b| + |x||f|. The two last terms
    are a product too, so they ride along as two more columns, and the largest entry bounds every
    logit. What float32 sums add is covered by a few of its steps per term.
    """

    def __init__(self, view: MoEView) -> None:
        self._head = view.head(torch.zeros(1, view.spec.hidden_size))[1].detach()
        self._step = 4 * (self._head.shape[1] + 2) * _FLOAT32_STEP
        self._norm = self._head.norm(dim=1)
        self._slices = [self._rounded(first) for first in range(0, len(self._head), _COLUMNS)]

    def _rounded(self, first: int) -> _Slice:
        exact = self._head[first : first + _COLUMNS]
        norm = self._norm[first : first + _COLUMNS]
        rounded = exact.bfloat16()
        error = (exact - rounded.float()).norm(dim=1) + self._step * norm
        bounds = _rounded_up(torch.stack([rounded.float().norm(dim=1), error], dim=1))
        return _Slice(first=first, rows=torch.cat([rounded, bounds], dim=1))

    def judge(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Whether the largest logit of each normed state [n, d] is that of `tokens` [n], and
        whether that is certain; both bool [n]."""
        own = (states * self._head[tokens]).sum(dim=1)
        length = states.norm(dim=1)
        slack = self._step * length
        bound, rival = self._highest(states, length, tokens)
        agrees = own - slack * self._norm[tokens] > bound
        rival_logit = (states * self._head[rival]).sum(dim=1)
        refuted = rival_logit - own > slack * (self._norm[rival] + self._norm[tokens])
        return agrees, agrees | refuted

    def _highest(self, states: Tensor, length: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Bound of all logits but those of `tokens` [n], and which token's it is; both [n]."""
        rounded = states.bfloat16()
        error = (states - rounded.float()).norm(dim=1)
        bounds = _rounded_up(torch.stack([error, length], dim=1))
        rows = torch.cat([rounded, bounds], dim=1)
        best = torch.full_like(length, -torch.inf)
        token = torch.zeros_like(tokens)
        for part in self._slices:
            logits = F.linear(rows, part.rows)
            here = torch.nonzero((tokens >= part.first) & (tokens < part.first + len(part.rows)))
            logits[here[:, 0], tokens[here[:, 0]] - part.first] = -torch.inf
            top = logits.max(dim=1)
            higher = top.values.float() > best
            best = torch.where(higher, top.values.float(), best)
            token = torch.where(higher, top.indices + part.first, token)
        # The product itself was rounded to bfloat16 at the end.
        return best + (2 * _BF16_STEP) * best.abs(), token


def _rounded_up(values: Tensor) -> Tensor:
    """bfloat16 that is no smaller than the non-negative float32 `values`."""
    return (values * (1 + 3 * _BF16_STEP)).bfloat16()
