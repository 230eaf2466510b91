"""What a model does for one wave: the commands of an engine, executed in this process.

The rows of a wave are tokens of any sequences at any positions. One step of decoding has a row per
sequence; teacher forcing has many, and attention lets each see the earlier ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from trimmoe.core.events import Attend, Complete, Execute, Executed, Probe, Routed
from trimmoe.core.profile import Profile
from trimmoe.core.specs import IntArray
from trimmoe.models.base import MoEView, Routing, TokenBatch
from trimmoe.models.cache import KVCache
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


class Execution:
    """A view with a cache and the profile's heads; obeys commands about one wave at a time."""

    def __init__(self, view: MoEView, profile: Profile, *, slots: int) -> None:
        self.view = view
        self.cache: KVCache = view.new_cache(slots=slots)
        self._observer = Observer(profile, view.device)

    def begin(self, slots: Sequence[int], positions: Sequence[int], tokens: list[int]) -> Running:
        """Embed a wave: one token [n] at one position [n] of the sequence in one slot [n] each."""
        places = list(zip(slots, positions, strict=True))
        assert all(a[0] != b[0] or a[1] < b[1] for a, b in pairwise(places))
        running = Running(slots=slots, positions=positions, hidden=torch.empty(0))
        batch = self._batch(tuple(range(len(tokens))), running)
        ids = iter(tokens)
        padded = batch.pad([[next(ids) for _ in row] for row in batch.positions])
        running.hidden = batch.pack(self.view.embed(padded, batch))
        return running

    def attend(self, command: Attend, running: Running) -> Routed:
        """Attention and router of a layer."""
        batch = self._batch(tuple(command.rows.tolist()), running)
        hidden = batch.unpack(running.hidden[_index(command.rows)])
        attended = batch.pack(self.view.attend(command.layer, hidden, batch, self.cache))
        routing = self.view.route(command.layer, attended)
        running.attended, running.routing = attended, routing
        return self._observer.routed(command.wave, command.layer, attended, routing)

    def execute(self, command: Execute, running: Running) -> Executed:
        """The experts of a layer, for the rows of the last `attend`."""
        assert running.routing is not None
        assert running.attended is not None
        layer, normed = command.layer, running.routing.normed
        shared = self.view.shared(layer, running.attended, normed=normed)
        routed = None
        if (command.slot_expert >= 0).any():
            experts = torch.from_numpy(command.slot_expert).to(self.view.device)
            routed = self.view.experts(
                layer, running.attended, experts, running.routing.gates, normed=normed
            )
        output = self.view.finish(layer, running.attended, shared, routed)
        running.hidden[_index(command.rows)] = output
        return self._observer.executed(command.wave, layer, output)

    def probe(self, command: Probe, running: Running) -> Tensor:
        """States that `logits` takes of rows where their exit was due, [n, d]."""
        return running.hidden[_index(command.rows)]

    def complete(self, command: Complete, running: Running) -> Tensor:
        """States that `logits` takes, [n, d]; those that exited fill the KV of later layers."""
        batch = self._batch(tuple(command.rows.tolist()), running)
        hidden = batch.unpack(running.hidden[_index(command.rows)])
        if command.layer == self.view.spec.layer_count:
            return batch.pack(self.view.tail(hidden, batch, self.cache))
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
