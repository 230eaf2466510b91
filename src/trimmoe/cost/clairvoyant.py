"""The least delay that any policy could reach, had it known every token's future.

With routing, importance, steadiness and exit outcomes known in advance, quality at a price turns
the problem into a shortest path per token: under `pinned` accounting an action does not move the
token, so each layer takes its best action and the only question is where to exit. For any price
the paths' total delay plus price times (loss - budget) is a lower bound (weak duality), and the
price that makes the bound greatest is found per sequence by bisection. The budget is held over the
whole sequence rather than at every prefix, which only lowers the bound.

Shapes: T tokens, S sequences, N layers, C actions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimmoe.core.specs import FloatArray, IntArray
from trimmoe.core.trace import Trace
from trimmoe.cost.actions import ActionSpace, as_batch
from trimmoe.cost.model import Accounting

_DOUBLINGS = 60
_BISECTIONS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """What a clairvoyant could not beat."""

    delay_s: float
    """Mean per token."""
    price_s: FloatArray
    """Seconds per unit of loss at which each sequence's bound is greatest, [S]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exits:
    """When tokens may exit and what that is charged."""

    threshold: float
    """p: confidence an exit needs; above 1 nothing exits."""
    loss: float
    """Charged per exit."""


def clairvoyant_bound(
    space: ActionSpace,
    trace: Trace,
    routes: IntArray,
    access: IntArray,
    *,
    budget: float,
    exits: Exits,
) -> Bound:
    """The bound for the tokens of `trace` under a budget of `budget` per token.

    `routes` [M, N], `access` [S]: where each sequence enters. Only pinned accounting: where
    tokens wander, an action changes what the next layer costs.
    """
    assert space.cost.accounting is not Accounting.MIGRATE
    choices = _Choices.of(space, trace, routes, access, exits)
    sequences, length = trace.sequence_count, trace.length
    allowed = budget * length

    def spent(price_s: FloatArray) -> tuple[FloatArray, FloatArray]:
        delay, loss = choices.best(np.repeat(price_s, length))
        by_sequence = delay.reshape(sequences, length), loss.reshape(sequences, length)
        return by_sequence[0].sum(1), by_sequence[1].sum(1)

    low, high = np.zeros(sequences), np.full(sequences, 1e-9)
    for _ in range(_DOUBLINGS):
        over = spent(high)[1] > allowed
        if not over.any():
            break
        low, high = np.where(over, high, low), np.where(over, 4.0 * high, high)
    best = np.full(sequences, -np.inf)
    price = np.zeros(sequences)
    for _ in range(_BISECTIONS):
        middle = np.where(low > 0, np.sqrt(low * high), high / 2)
        for candidate in (low, middle, high):
            delay, loss = spent(candidate)
            value = delay + candidate * (loss - allowed)
            price, best = np.where(value > best, candidate, price), np.maximum(best, value)
        over = spent(middle)[1] > allowed
        low, high = np.where(over, middle, low), np.where(over, high, middle)
    return Bound(delay_s=float(best.sum() / trace.token_count), price_s=price)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choices:
    """Everything a token could do, layer by layer."""

    start_s: FloatArray
    """The token id's way in, [T]."""
    dense_s: FloatArray
    """[T, N]."""
    back_s: FloatArray
    """The way back from where the token is after each layer, [T, N]."""
    exits: np.ndarray
    """Whether the token may exit after each layer, if it ran, bool [T, N]."""
    exit_loss: float
    run_s: list[FloatArray]
    """Per layer, delays of actions that run something, [T, C]; infinite where there is none."""
    run_loss: list[FloatArray]
    skip_s: FloatArray
    """[T, N]."""
    skip_loss: FloatArray

    @staticmethod
    def of(
        space: ActionSpace,
        trace: Trace,
        routes: IntArray,
        access: IntArray,
        exits: Exits,
    ) -> _Choices:
        cost, layers = space.cost, trace.layer_count
        entry = np.repeat(access, trace.length)
        route = routes[entry]
        after = np.concatenate([route[:, 1:], route[:, -1:]], axis=1)
        run_s, run_loss, skip_s, skip_loss = [], [], [], []
        for layer in range(layers):
            batch = as_batch(
                trace.experts[:, layer],
                trace.masses[:, layer].astype(np.float64),
                trace.importance[:, layer].astype(np.float64),
                np.minimum(trace.steadiness[:, layer], space.class_count - 1),
                route[:, layer],
                after[:, layer],
            )
            actions = space.enumerate(layer, batch)
            run_s.append(actions.delay_s[:, :-1])
            run_loss.append(actions.loss[:, :-1])
            skip_s.append(actions.delay_s[:, -1])
            skip_loss.append(actions.loss[:, -1])
        exiting = trace.confidence >= exits.threshold
        exiting[:, -1] = True
        return _Choices(
            start_s=cost.enter_s[entry, route[:, 0]],
            dense_s=cost.dense_s[route, np.arange(layers)],
            back_s=cost.token_transfer_s[after, entry[:, None]],
            exits=exiting if space.levers.exit else exiting & (np.arange(layers) == layers - 1),
            exit_loss=exits.loss,
            run_s=run_s,
            run_loss=run_loss,
            skip_s=np.stack(skip_s, axis=1),
            skip_loss=np.stack(skip_loss, axis=1),
        )

    def best(self, price_s: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Delay and loss of each token's best path at these prices [T], each [T]."""
        layers, rows = self.dense_s.shape[1], np.arange(price_s.size)
        delay, loss = self.back_s[:, -1], np.zeros(price_s.size)
        for layer in range(layers - 1, -1, -1):
            run = (self.run_s[layer] + price_s[:, None] * self.run_loss[layer]).argmin(1)
            ran_s, ran_loss = self.run_s[layer][rows, run], self.run_loss[layer][rows, run]
            go_on = delay + price_s * loss
            leave = np.full(price_s.size, np.inf)
            if layer < layers - 1:
                leaving = self.back_s[:, layer] + price_s * self.exit_loss
                leave = np.where(self.exits[:, layer], leaving, np.inf)
            left = leave < go_on
            end_s = np.where(left, self.back_s[:, layer], delay)
            end_loss = np.where(left, self.exit_loss, loss)
            ran = ran_s + end_s + price_s * (ran_loss + end_loss)
            skip = self.skip_s[:, layer] + self.skip_loss[:, layer] * price_s + go_on
            skipped = skip < ran
            delay = self.dense_s[:, layer] + np.where(
                skipped, self.skip_s[:, layer] + delay, ran_s + end_s
            )
            loss = np.where(skipped, self.skip_loss[:, layer] + loss, ran_loss + end_loss)
        return self.start_s + delay, loss
