"""Whether the output head predicts a given token: exact, mostly at a fraction of the head's cost.

Calibration asks this of every token after many layers and of every what-if, and the head is as
large as a dozen layers of a small model. It never needs the prediction itself: one token that
wins is enough to say no, and logits in bfloat16, several times quicker on processors that multiply
it, decide wherever their error bound lets them. Where it does not, only the few tokens that might
win are looked at in single precision. The answers are those of the whole head throughout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trimmoe.core.specs import BoolArray, IntArray
from trimmoe.models.base import MoEView
from trimmoe.runtime.home import runners_up

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


def nearly(view: MoEView, hidden: Tensor) -> IntArray:
    """`runtime.home.runners_up` for states [n, d]; int64 [n]."""
    found = [runners_up(view.logits(block)) for block in hidden.split(_ROWS)]
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
        plain = view.dtype != torch.float32 or view.device.type != "cpu"
        self._duel = None if plain else _Duel(view)
        wanted = _multiplies_bf16() if screen is None else screen
        self._screen = _Screen(self._duel) if self._duel is not None and wanted else None

    def agrees(self, hidden: Tensor, tokens: IntArray, rivals: IntArray | None = None) -> BoolArray:
        """Whether the prediction from states [n, d] is `tokens` [n]; bool [n].

        `rivals` [n] are guesses of what else it might be, such as what another layer predicts:
        one that wins saves the search. What is found instead of `tokens` is written to it.
        """
        guesses = tokens.copy() if rivals is None else rivals
        if not len(tokens):
            return np.zeros(0, dtype=bool)
        parts = (torch.from_numpy(array).split(_ROWS) for array in (tokens, guesses))
        blocks = zip(hidden.split(_ROWS), *parts, strict=True)
        return torch.cat([self._block(*block) for block in blocks]).numpy()

    def _block(self, hidden: Tensor, tokens: Tensor, rivals: Tensor) -> Tensor:
        if self._duel is None:
            return torch.from_numpy(greedy(self._view, hidden)) == tokens
        agrees = torch.zeros(len(tokens), dtype=torch.bool)
        states = self._view.head(hidden)[0]
        left = torch.nonzero(~self._duel.won(states, rivals, tokens))[:, 0]
        if self._screen is not None and len(left):
            sure, rivals[left] = self._screen.search(states[left], tokens[left])
            agrees[left] = sure
            lost = self._duel.won(states[left], rivals[left], tokens[left])
            left = left[~(sure | lost)]
        if self._screen is not None and len(left):
            won, lost = self._screen.settle(states[left], tokens[left])
            agrees[left] = won
            left = left[~(won | lost)]
        if len(left):
            best = torch.from_numpy(greedy(self._view, hidden[left]))
            agrees[left] = best == tokens[left]
            rivals[left] = torch.where(agrees[left], rivals[left], best)
        return agrees


def _multiplies_bf16() -> bool:
    """Whether the processor multiplies bfloat16 several times quicker than single precision."""
    can = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(can.get("amx_bf16") or can.get("avx512_bf16"))


class _Duel:
    """Which of two tokens has the larger logit, in float32, beyond what rounding could turn."""

    def __init__(self, view: MoEView) -> None:
        self.head = view.head(torch.zeros(1, view.spec.hidden_size))[1].detach()
        self.norm = self.head.norm(dim=1)
        self.step = 4 * (self.head.shape[1] + 2) * _FLOAT32_STEP
        """Times the two norms: the most that float32 sums err, with room to spare."""

    def won(self, states: Tensor, tokens: Tensor, others: Tensor) -> Tensor:
        """Whether `tokens` [n] surely beat `others` [n] from normed states [n, d]; bool [n]."""
        ahead = self.logit(states, tokens) - self.logit(states, others)
        return ahead > self.error(states, tokens) + self.error(states, others)

    def logit(self, states: Tensor, tokens: Tensor) -> Tensor:
        return (states * self.head[tokens]).sum(dim=1)

    def error(self, states: Tensor, tokens: Tensor) -> Tensor:
        return self.step * states.norm(dim=1) * self.norm[tokens]


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
    logit.
    """

    def __init__(self, duel: _Duel) -> None:
        self._duel = duel
        firsts = range(0, len(duel.head), _COLUMNS)
        parts = zip(firsts, duel.head.split(_COLUMNS), duel.norm.split(_COLUMNS), strict=True)
        self._slices = [self._rounded(*part) for part in parts]

    def _rounded(self, first: int, exact: Tensor, norm: Tensor) -> _Slice:
        rounded = exact.bfloat16()
        error = (exact - rounded.float()).norm(dim=1) + self._duel.step * norm
        return _Slice(first=first, rows=_bounded(rounded, rounded.float().norm(dim=1), error))

    def search(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Whether `tokens` [n] surely have the largest logits from normed states [n, d], bool [n],
        and the likeliest to beat them [n]."""
        bound, rival = self._highest(states, tokens)
        own = self._duel.logit(states, tokens) - self._duel.error(states, tokens)
        return own > bound, rival

    def settle(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Whether `tokens` [n] surely have the largest logits from normed states [n, d], and
        whether some other token's surely is larger, by looking at all that might be; bool [n] each.
        Costs more than `search` and leaves next to nothing open."""
        own = self._duel.logit(states, tokens) - self._duel.error(states, tokens)
        rows, rivals = self._near(states, tokens, own)
        beaten = self._duel.won(states[rows], tokens[rows], rivals)
        beating = self._duel.won(states[rows], rivals, tokens[rows])
        open_ones, lost = torch.zeros((2, len(tokens)), dtype=torch.bool)
        open_ones[rows[~beaten]] = True
        lost[rows[beating]] = True
        return ~open_ones, lost

    def _near(self, states: Tensor, tokens: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and the tokens whose logits there might reach those of `tokens`, `own` at least,
        [m] each."""
        # The bound of `_highest`, turned round: what a logit in bfloat16 must at least be.
        least = own / (1 + torch.sign(own) * (2 * _BF16_STEP)) - torch.finfo(torch.float32).tiny
        least = _rounded_down(least)[:, None]
        found = []
        for part, logits in self._logits(states, tokens):
            near = torch.nonzero(logits >= least)
            found.append(near + torch.tensor([0, part.first]))
        rows, rivals = torch.cat(found).unbind(dim=1)
        return rows, rivals

    def _highest(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Bound of all logits but those of `tokens` [n], and which token's it is; both [n]."""
        best = torch.full(tokens.shape, -torch.inf)
        rival = tokens.clone()
        for part, logits in self._logits(states, tokens):
            # Which one the largest is takes three times as long to find as how large it is.
            top = logits.amax(dim=1).float()
            higher = torch.nonzero(top > best)[:, 0]
            best[higher] = top[higher]
            rival[higher] = logits[higher].argmax(dim=1) + part.first
        # The product itself was rounded to bfloat16 at the end.
        return best + (2 * _BF16_STEP) * best.abs(), rival

    def _logits(self, states: Tensor, tokens: Tensor) -> Iterator[tuple[_Slice, Tensor]]:
        """Each slice with the bounds of its logits, bfloat16 [n, c]; those of `tokens` are -inf."""
        rounded = states.bfloat16()
        error = (states - rounded.float()).norm(dim=1)
        rows = _bounded(rounded, error, states.norm(dim=1))
        for part in self._slices:
            logits = F.linear(rows, part.rows)
            here = torch.nonzero((tokens >= part.first) & (tokens < part.first + len(part.rows)))
            logits[here[:, 0], tokens[here[:, 0]] - part.first] = -torch.inf
            yield part, logits


def _bounded(rounded: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Rows [n, d] with two bounds [n] behind each."""
    return torch.cat([rounded, _rounded_up(torch.stack([first, second], dim=1))], dim=1)


def _rounded_up(values: Tensor) -> Tensor:
    """bfloat16 that is no smaller than the non-negative float32 `values`."""
    return (values * (1 + 3 * _BF16_STEP)).bfloat16()


def _rounded_down(values: Tensor) -> Tensor:
    """bfloat16 that is no larger than the float32 `values`."""
    return (values - 3 * _BF16_STEP * values.abs()).bfloat16()
