"""What a model does for one wave: the commands of an engine, executed in this process.

The rows of a wave are tokens of any sequences at any positions. One step of decoding has a row per
sequence; teacher forcing has many, and attention lets each see the earlier ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from trimmoe.core.events import Attend, Complete, Execute, Executed, Probe, Routed, Trailed
from trimmoe.core.exit_states import ExitState
from trimmoe.core.profile import Profile
from trimmoe.core.specs import IntArray
from trimmoe.models.base import MoEView
from trimmoe.models.batch import TokenBatch
from trimmoe.models.cache import KVCache
from trimmoe.models.passed import Routing
from trimmoe.runtime.observe import Observer


@dataclass(kw_only=True, slots=True)
class Running:
    """A wave being executed."""

    slots: Sequence[int]
    """Cache slot of each row; the rows of a slot stand together, by position."""
    positions: Sequence[int]
    hidden: Tensor
    """[n, d], by row of the wave."""
    batches: dict[tuple[int, ...], TokenBatch] = field(default_factory=dict)
    routing: Routing | None = None
    attended: Tensor | None = None
    left: int
    """Rows that are not complete."""
    trailing: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Rows that exited and whose states go on without routed experts."""
    answered: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Rows that exited and are told of like the others."""


class Execution:
    """A view with a cache and the profile's heads; obeys commands about one wave at a time.

    Where exits leave `ExitState.DENSE`, exited rows go through the layers along with those that
    are still on their way, since these may stand before or behind them in one sequence; what they
    would do after the last of these is done at once.
    """

    def __init__(
        self, view: MoEView, profile: Profile, *, slots: int, exit_state: ExitState
    ) -> None:
        self.view, self._exit_state = view, exit_state
        self.cache: KVCache = view.new_cache(slots=slots)
        self._observer = Observer(profile, view.device)

    def begin(self, slots: Sequence[int], positions: Sequence[int], tokens: list[int]) -> Running:
        """Embed a wave: one token [n] at one position [n] of the sequence in one slot [n] each."""
        places = list(zip(slots, positions, strict=True))
        assert all(a[0] != b[0] or a[1] < b[1] for a, b in pairwise(places))
        running = Running(slots=slots, positions=positions, hidden=torch.empty(0), left=len(tokens))
        batch = self._batch(tuple(range(len(tokens))), running)
        ids = iter(tokens)
        padded = batch.pad([[next(ids) for _ in row] for row in batch.positions])
        running.hidden = batch.pack(self.view.embed(padded, batch))
        return running

    def attend(self, command: Attend, running: Running) -> Routed:
        """Attention and router of a layer."""
        attended = self._attended(command.layer, command.rows, running)
        routing = self.view.route(command.layer, attended)
        running.attended, running.routing = attended, routing
        return self._observer.routed(command.wave, command.layer, attended, routing)

    def execute(self, command: Execute, running: Running) -> Executed:
        """The experts of a layer, for the rows of the last `attend`."""
        assert running.routing is not None
        assert running.attended is not None
        layer, routing = command.layer, running.routing
        output = self.view.give(
            layer, running.attended, command.slot_expert, routing.gates, normed=routing.normed
        )
        running.hidden[_index(command.rows)] = output
        return self._observer.executed(command.wave, layer, output)

    def probe(self, command: Probe, running: Running) -> Tensor:
        """States that `logits` takes of rows where their exit was due, [n, d]."""
        return running.hidden[_index(command.rows)]

    def complete(self, command: Complete, running: Running) -> Tensor:
        """States that `logits` takes, [n, d]; those that exited fill the KV of later layers, unless
        they are commanded through them."""
        layers, rows = self.view.spec.layer_count, command.rows
        running.left -= rows.size
        if command.layer == layers:
            return self._tail(rows, running)
        if self._exit_state is ExitState.FROZEN:
            return self._propagated(command, running)
        states = running.hidden[_index(rows)]
        if self._exit_state is ExitState.WHOLE:
            running.answered = np.union1d(running.answered, rows)
            return states
        running.trailing = np.union1d(running.trailing, rows)
        if not running.left:
            for layer in range(command.layer, layers):
                self._attended(layer, rows[:0], running)
            self._tail(rows[:0], running)
        return states

    def trailed(self, command: Trailed, running: Running) -> Tensor:
        """States that `logits` takes of rows that exited before, [n, d]."""
        return self._tail(command.rows, running)

    def _attended(self, layer: int, rows: IntArray, running: Running) -> Tensor:
        """Attention of a layer for these rows, [rows, d]; trailing rows pass all of the layer."""
        together = np.union1d(rows, running.trailing)
        batch = self._batch(tuple(together.tolist()), running)
        hidden = batch.unpack(running.hidden[_index(together)])
        attended = batch.pack(self.view.attend(layer, hidden, batch, self.cache))
        if not running.trailing.size:
            return attended
        trails = torch.from_numpy(np.isin(together, running.trailing))
        running.hidden[_index(running.trailing)] = self.view.skip(layer, attended[trails])
        return attended[~trails]

    def _tail(self, rows: IntArray, running: Running) -> Tensor:
        """What follows the last layer, for these rows and all that exited: [rows, d]."""
        together = np.union1d(np.union1d(rows, running.trailing), running.answered)
        batch = self._batch(tuple(together.tolist()), running)
        hidden = batch.unpack(running.hidden[_index(together)])
        states = batch.pack(self.view.tail(hidden, batch, self.cache))
        return states[torch.from_numpy(np.isin(together, rows))]

    def _propagated(self, command: Complete, running: Running) -> Tensor:
        """Keys and values of the layers left, made from the states [n, d] of rows that exited."""
        batch = self._batch(tuple(command.rows.tolist()), running)
        hidden = batch.unpack(running.hidden[_index(command.rows)])
        for layer in range(command.layer, self.view.spec.layer_count):
            self.view.propagate(layer, hidden, batch, self.cache)
        self.view.propagate_tail(hidden, batch, self.cache)
        return batch.pack(hidden)

    def _batch(self, rows: tuple[int, ...], running: Running) -> TokenBatch:
        if rows not in running.batches:
            positions: dict[int, list[int]] = {}
            for row in rows:
                positions.setdefault(running.slots[row], []).append(running.positions[row])
            running.batches[rows] = self.view.batch(
                self.cache, list(positions), list(positions.values())
            )
        return running.batches[rows]


def _index(rows: IntArray) -> Tensor:
    return torch.from_numpy(rows)
