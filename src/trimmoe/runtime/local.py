"""The in-process driver: one real model obeys the engine's commands, links are only charged.

The arithmetic is that of the distributed system: skipped layers take the residual, substitutes
run, exited tokens propagate their state into the KV of later layers and the next token attends to
it. What is emulated is where things run; delays come from the cost model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from trimmoe.core.events import (
    Attend,
    Audited,
    Command,
    Complete,
    Depart,
    Event,
    Execute,
    Executed,
    Probe,
    Routed,
    SequenceClosed,
    SequenceOpened,
    Strand,
    TokensArrived,
)
from trimmoe.core.ledger import Ledger
from trimmoe.core.profile import Profile
from trimmoe.core.specs import IntArray
from trimmoe.engine.state import EngineState
from trimmoe.engine.step import Engine
from trimmoe.models.base import EncoderDecoderView, MoEView, Routing, TokenBatch
from trimmoe.models.cache import KVCache
from trimmoe.models.exact import full_depth
from trimmoe.runtime.observe import Observer

WAVE = 0
"""This driver runs one wave at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """The prediction after one token of one sequence."""

    sequence: int
    logits: Tensor
    """[V]."""
    ledger: Ledger


@dataclass(kw_only=True, slots=True)
class _Running:
    """A wave being executed."""

    slots: list[int]
    positions: list[int]
    hidden: Tensor
    """[n, d], by row of the wave."""
    layer: int = -1
    batches: dict[tuple[int, ...], TokenBatch] = field(default_factory=dict)
    routing: Routing | None = None
    attended: Tensor | None = None
    probes: dict[int, Tensor] = field(default_factory=dict)
    """Logits of audited rows where their exit was due."""


class LocalDriver:
    """Decodes many sequences step by step under one engine."""

    def __init__(
        self, view: MoEView, profile: Profile, engine: Engine, *, slots: int, seed: int = 0
    ) -> None:
        self.view, self.engine = view, engine
        self.state: EngineState = engine.start()
        self.log: list[tuple[Event, tuple[Command, ...]]] | None = None
        """Set to a list to record every event with its commands, e.g. to replay them."""
        self._cache: KVCache = view.new_cache(slots=slots)
        self._slot_of: dict[int, int] = {}
        self._length_of: dict[int, int] = {}
        self._draws = np.random.default_rng(seed)
        self._observer = Observer(profile, view.device)

    @torch.inference_mode()
    def open(
        self, sequence: int, prompt: Sequence[int], *, access: int, budget: float, confidence: float
    ) -> Tensor:
        """Admit a sequence and run its prompt exactly; logits [V] after the prompt.

        Where there is an encoder, the prompt is its input and decoding starts from nothing.
        """
        slot = self._cache.alloc()
        if isinstance(self.view, EncoderDecoderView):
            self.view.attach(self._cache, slot, self.view.encode([prompt])[0])
            prompt = [self.view.start_token]
        self._slot_of[sequence], self._length_of[sequence] = slot, len(prompt)
        batch = self.view.batch(self._cache, [slot], [range(len(prompt))])
        hidden = self.view.embed(batch.pad([prompt]), batch)
        last = full_depth(self.view, hidden, batch, self._cache)[-1:]
        self._tell(
            SequenceOpened(sequence=sequence, access=access, budget=budget, confidence=confidence)
        )
        return self.view.logits(last)[0]

    def close(self, sequence: int) -> None:
        """End a sequence and free its cache."""
        self._cache.free(self._slot_of.pop(sequence))
        del self._length_of[sequence]
        self._tell(SequenceClosed(sequence=sequence))

    @torch.inference_mode()
    def decode(self, tokens: dict[int, int]) -> list[Decoded]:
        """Feed one token to each of the given sequences; predictions in the same order."""
        sequences = tuple(tokens)
        wave = self._embedded(sequences, list(tokens.values()))
        done: dict[int, Decoded] = {}
        draws = self._draws.random(len(sequences))
        pending = list(self._tell(TokensArrived(wave=WAVE, sequences=sequences, draws=draws)))
        while pending:
            pending.extend(self._obey(pending.pop(0), wave, sequences, done))
        for sequence in sequences:
            self._length_of[sequence] += 1
        return [done[row] for row in range(len(sequences))]

    def _tell(self, event: Event) -> tuple[Command, ...]:
        self.state, commands = self.engine.step(self.state, event)
        if self.log is not None:
            self.log.append((event, commands))
        return commands

    def _embedded(self, sequences: tuple[int, ...], tokens: list[int]) -> _Running:
        slots = [self._slot_of[sequence] for sequence in sequences]
        positions = [self._length_of[sequence] for sequence in sequences]
        batch = self.view.batch(self._cache, slots, [[position] for position in positions])
        hidden = self.view.embed(batch.pad([[token] for token in tokens]), batch)
        return _Running(slots=slots, positions=positions, hidden=batch.pack(hidden))

    def _obey(
        self, command: Command, wave: _Running, sequences: tuple[int, ...], done: dict[int, Decoded]
    ) -> tuple[Command, ...]:
        match command:
            case Attend():
                return self._tell(self._attend(command, wave))
            case Execute():
                return self._tell(self._execute(command, wave))
            case Probe():
                logits = self.view.logits(wave.hidden[_index(command.rows)])
                wave.probes.update(zip(command.rows.tolist(), logits, strict=True))
                return ()
            case Complete():
                return self._complete(command, wave, sequences, done)
            case Depart() | Strand():
                raise AssertionError("one process holds every expert, and nothing leaves it")

    def _batch(self, rows: IntArray, wave: _Running) -> TokenBatch:
        key = tuple(rows.tolist())
        if key not in wave.batches:
            wave.batches[key] = self.view.batch(
                self._cache, [wave.slots[r] for r in key], [[wave.positions[r]] for r in key]
            )
        return wave.batches[key]

    def _attend(self, command: Attend, wave: _Running) -> Routed:
        batch = self._batch(command.rows, wave)
        hidden = batch.unpack(wave.hidden[_index(command.rows)])
        attended = batch.pack(self.view.attend(command.layer, hidden, batch, self._cache))
        routing = self.view.route(command.layer, attended)
        wave.layer, wave.attended, wave.routing = command.layer, attended, routing
        return self._observer.routed(WAVE, command.layer, attended, routing)

    def _execute(self, command: Execute, wave: _Running) -> Executed:
        assert wave.routing is not None
        assert wave.attended is not None
        layer, normed = command.layer, wave.routing.normed
        shared = self.view.shared(layer, wave.attended, normed=normed)
        routed = None
        if (command.slot_expert >= 0).any():
            experts = torch.from_numpy(command.slot_expert).to(self.view.device)
            routed = self.view.experts(
                layer, wave.attended, experts, wave.routing.gates, normed=normed
            )
        output = self.view.finish(layer, wave.attended, shared, routed)
        wave.hidden[_index(command.rows)] = output
        return self._observer.executed(WAVE, layer, output)

    def _complete(
        self,
        command: Complete,
        wave: _Running,
        sequences: tuple[int, ...],
        done: dict[int, Decoded],
    ) -> tuple[Command, ...]:
        batch = self._batch(command.rows, wave)
        hidden = batch.unpack(wave.hidden[_index(command.rows)])
        if command.layer < self.view.spec.layer_count:
            for layer in range(command.layer, self.view.spec.layer_count):
                self.view.propagate(layer, hidden, batch, self._cache)
            self.view.propagate_tail(hidden, batch, self._cache)
        else:
            hidden = self.view.tail(hidden, batch, self._cache)
        logits = self.view.logits(batch.pack(hidden))
        for row, ledger, scores in zip(command.rows.tolist(), command.ledgers, logits, strict=True):
            done[row] = Decoded(sequence=sequences[row], logits=scores, ledger=ledger)
        return self._report_audits(command, wave, done)

    def _report_audits(
        self, command: Complete, wave: _Running, done: dict[int, Decoded]
    ) -> tuple[Command, ...]:
        probed = [row for row in command.rows.tolist() if row in wave.probes]
        if not probed:
            return ()
        agrees = [bool(wave.probes[row].argmax() == done[row].logits.argmax()) for row in probed]
        return self._tell(Audited(wave=WAVE, agrees=np.array(agrees)))


def _index(rows: IntArray) -> Tensor:
    return torch.from_numpy(rows)
