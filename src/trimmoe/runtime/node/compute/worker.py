"""The worker's side of a server: the only code that touches the model, the cache and the engine.

It runs in one thread, one batch at a time. Between two batches no wave is in the engine: every
row has left it as a `Wave` row of its own, so that the engine can be exchanged there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
    Receipt,
    SequenceClosed,
    SequenceOpened,
    Settled,
    TokensArrived,
    TokensExported,
    TokensImported,
    Trailed,
)
from trimmoe.core.profile import Profile
from trimmoe.core.specs import IntArray
from trimmoe.core.wave import Wave
from trimmoe.cost.guessing import token_batch_times, visits
from trimmoe.engine.step import Engine
from trimmoe.models.base import MoEView
from trimmoe.models.batch import TokenBatch
from trimmoe.models.passed import Routing
from trimmoe.runtime.counters import ExpertCounter
from trimmoe.runtime.drafter import Drafter
from trimmoe.runtime.node.compute.completion import completed, trailed
from trimmoe.runtime.node.compute.draft_runner import DraftRunner
from trimmoe.runtime.node.compute.end_drafts import EndDrafts
from trimmoe.runtime.node.compute.execution import run_and_ship
from trimmoe.runtime.node.compute.pace import ChunkPace, GuessPace, Pace
from trimmoe.runtime.node.compute.runner import ModelRunner
from trimmoe.runtime.node.compute.segments import Segments
from trimmoe.runtime.node.compute.shipping import Cargo, Split
from trimmoe.runtime.node.compute.states import entering, states_of
from trimmoe.runtime.node.compute.verifying import Verifier
from trimmoe.runtime.node.records.messages import Parcel, Start
from trimmoe.runtime.node.records.output import Arrival, BatchOutput, LogEntry
from trimmoe.runtime.node.records.rows import Rows
from trimmoe.runtime.node.records.units import Unit, boarded, told_unless_zero
from trimmoe.runtime.observe import Observer


class Worker(ModelRunner):
    """See the module's docstring. `server` is this server's index."""

    def __init__(
        self,
        view: MoEView,
        profile: Profile,
        engine: Engine,
        *,
        server: int,
        slots: int,
        seed: int = 0,
        pace: Pace | None = None,
        log_events: bool = False,
        verifier: Verifier | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        super().__init__(view, server=server, slots=slots, pace=pace, verifier=verifier)
        self.guess_pace = GuessPace(batch_times=token_batch_times(engine.cost, view.spec.top_k))
        self.chunk_pace = ChunkPace()
        self.token_turn_s = 0.0
        """What tokens took in their last turn."""
        self.end_drafts = EndDrafts(view=view, wanted=lambda: self.engine.settings.reads_along)
        self.drafter = drafter
        self.draft_runner = DraftRunner.of(
            view, slots, profile if engine.settings.guesses else None
        )
        self.engines = [engine]
        self.state = engine.start()
        self.segments = Segments.of(engine, server)
        self.log: list[LogEntry] | None = [] if log_events else None
        self.counter = ExpertCounter(view.spec.layer_count, view.spec.expert_count)
        self.observer = Observer(profile, view.device)
        self.sends_whole = view.widths.moving == view.spec.hidden_size
        """Whether states behind a layer that is through are what moves."""
        self.route_rows: dict[tuple[int, ...], int] = {}
        self._reads_from: dict[tuple[int, ...], int] = {}
        self._end = range(view.spec.layer_count, view.spec.layer_count + 1)
        """What follows the last layer."""
        self._draws = np.random.default_rng(seed)
        self._wave = 0
        self.index_routes()

    @property
    def engine(self) -> Engine:
        """The one in force."""
        return self.engines[-1]

    def swap(self, engine: Engine) -> None:
        """Decide with another engine from now on; rows of routes keep their meaning."""
        assert not self.state.waves
        self.draft_runner.forget_foreseen()
        if self.log is None:
            self.engines[-1] = engine
        else:
            self.engines.append(engine)
        self.segments = Segments.of(engine, self.server)
        self.index_routes()

    @property
    def loss_weights(self) -> list[float]:
        """omega_D that tokens of this server's users set out with."""
        state = self.state
        rows = {self.server, *(account.route for account in state.accounts.values())}
        # A route that was added has its weight once a token sets out on it, if routes have any.
        known = rows & set(range(len(state.feedback.route_weights))) or rows
        return np.unique(state.feedback.weights_of(np.array(list(known)))).tolist()

    def is_home(self, route: tuple[int, ...]) -> bool:
        """Whether all that tokens of this server's users need on a route is here."""
        return bool(self.engine.guess_rules.home[self.server]) and set(route) == {self.server}

    def index_routes(self) -> None:
        """Look up rows of the engine's routes by route."""
        self.visits = visits(self.engine.routes)
        rows = enumerate(self.engine.routes.tolist())
        self.route_rows = {tuple(route): row for row, route in reversed(list(rows))}

    def tell(self, event: Event) -> tuple[Command, ...]:
        """One step of the engine."""
        self.state, commands = self.engine.step(self.state, event)
        self.counter.absorb([(event, commands)])
        if self.log is not None:
            entry = LogEntry(engine=len(self.engines) - 1, event=event, commands=commands)
            self.log.append(entry)
        return commands

    def open(self, opened: SequenceOpened, route: tuple[int, ...]) -> None:
        """Open the account of a sequence on a route."""
        self.tell(replace(opened, route=self.route_rows[route]))

    def begin_anew(self, opened: SequenceOpened, route: tuple[int, ...], start: int) -> None:
        """Open an account again, whose tokens from a position on were withdrawn."""
        self.draft_runner.forget(opened.sequence, start)
        self.open(opened, route)

    def least_chance(self, route: tuple[int, ...], streams: int) -> float:
        """As `GuessRules.least_among` has it, of sequences on a route while so many streams are
        under way in the cluster."""
        rules, row = self.engine.guess_rules, self.route_rows.get(route)
        if tuple(self.engine.routes[self.server].tolist()) == route:
            row = self.server
        if row is None:
            return self.engine.settings.guess_chance
        return float(rules.least_among(streams)[row])

    def reads_from(self, route: tuple[int, ...]) -> int:
        """The layer that this server's own readings of sequences on a route begin with."""
        if not (self.segments.in_force and self.engine.settings.guesses):
            return 0
        if route not in self._reads_from:
            self._reads_from[route] = self.draft_runner.first_layer(route, self.server)
        return self._reads_from[route]

    def kept_at(self, unit: Unit) -> int | None:
        """The layer before which a unit's states are kept for readings, if it is of one that is
        read here."""
        if unit.seat.access != self.server or unit.trailing:
            return None
        return self.reads_from(unit.seat.route) or None

    def keep(self, unit: Unit, states: Tensor, result: BatchOutput) -> None:
        """These states [n, d] of a unit are what readings begin with."""
        if unit.seat.sequence in self.state.accounts and not unit.is_void:
            reading = self.draft_runner.keep(unit.seat.sequence, unit.start, states)
            if reading is not None:
                result.reading.append(reading)

    def close(self, sequence: int) -> None:
        """Close an account if there is one."""
        self.draft_runner.close(sequence)
        self._no_draft(sequence)
        if sequence in self.state.accounts:
            self.tell(SequenceClosed(sequence=sequence))

    def retire(self, sequence: int, read: int, length: int) -> None:
        """Close an account and keep what this server has read of its sequence up to `read`, and the
        states to read on from there up to `length`."""
        self.draft_runner.retain(sequence, read, length)
        self._no_draft(sequence)
        if sequence in self.state.accounts:
            self.tell(SequenceClosed(sequence=sequence))

    def _no_draft(self, sequence: int) -> None:
        """What the draft model has read of a sequence is not kept for others."""
        if self.drafter is not None:
            self.drafter.close(sequence)

    def settle(self, receipts: tuple[Receipt, ...], agrees: list[bool]) -> None:
        """Tokens of this server's users finished elsewhere, or were audited anywhere."""
        if receipts:
            self.tell(Settled(receipts=receipts))
        if agrees:
            self.tell(Audited(wave=self.new_wave(), agrees=np.array(agrees)))

    def arrive(self, arrivals: Sequence[Arrival]) -> BatchOutput:
        """The next tokens of this server's users set out."""
        going = [one for one in arrivals if one.sequence in self.state.accounts]
        if not going:
            return BatchOutput()
        arrived = TokensArrived(
            wave=self.new_wave(),
            sequences=tuple(one.sequence for one in going),
            draws=self._draws.random(len(going)),
            guessed=np.array([one.guessed for one in going]),
            departing=True,
        )
        (depart,) = self.tell(arrived)
        assert isinstance(depart, Depart)
        tokens = depart.tokens
        parcels = []
        for first in np.unique(tokens.server).tolist():
            which = np.flatnonzero(tokens.server == first)
            chosen = [going[i] for i in which.tolist()]
            rows = Rows(
                [one.sequence for one in chosen],
                [one.position for one in chosen],
                [1] * len(chosen),
                [],
                told_unless_zero([one.epoch for one in chosen]),
                wants=told_unless_zero([one.wants for one in chosen]),
            )
            start = Start(rows=rows, tokens=[one.token for one in chosen])
            parcels.append(Parcel(to=first, message=start, wave=tokens.take(which)))
        return BatchOutput(parcels=parcels)

    def states(self, layer: int, units: Sequence[Unit], batch: TokenBatch) -> Tensor:
        """What the rows of units about to enter a layer are, [n, d]."""
        if layer == 0:
            return batch.pack(self.view.embed(batch.pad([u.tokens for u in units]), batch))
        states = [states_of(self.view, unit, layer - 1) for unit in units]
        owing = [row for row, unit in enumerate(units) if unit.own is not None]
        if owing:
            owed = [units[row].own for row in owing]
            experts = torch.cat([own.experts for own in owed if own]).numpy()
            gates = torch.cat([own.gates for own in owed if own])
            gates = entering(self.view, gates, torch.float32)
            attended = torch.cat([states[row] for row in owing])
            given = self.view.give(layer - 1, attended, experts, gates)
            for at, row in enumerate(owing):
                states[row] = given[at : at + 1]
            self.pace.experts(layer - 1, experts)
        return states[0] if len(states) == 1 else torch.cat(states)

    def finish(self, layer: int, units: Sequence[Unit]) -> BatchOutput:
        """A layer gathered here: exits are due, or the next layer."""
        ordered, wave = self.boarded(units)
        identity = self.new_wave()
        self.tell(TokensImported(wave=identity, tokens=wave, executing=True))
        result = BatchOutput()
        output = torch.cat([states_of(self.view, unit, layer) for unit in ordered])
        self._executed(identity, layer, np.arange(len(ordered)), output, ordered, result)
        return result

    def execute(
        self,
        command: Execute,
        tokens: Wave | None,
        units: Sequence[Unit],
        attended: Tensor,
        routing: Routing,
        result: BatchOutput,
    ) -> None:
        """Run and send what was decided for rows of which attention and router gave these.

        `tokens`: the rows of the command, about to enter the next layer, if the engine has let
        them go already.
        """
        layer, rows = command.layer, command.rows
        split = Split.of(
            command.slot_expert,
            command.slot_server,
            command.destination,
            here=self.server,
            server_count=self.engine.cost.server_count,
        )
        which, at = [units[row] for row in rows.tolist()], torch.from_numpy(rows)
        cargo = Cargo.of_tokens(self.view, layer, which, attended[at], routing.gates[at])

        def depart(chosen: IntArray) -> Wave:
            if tokens is None:
                return self.departed(command.wave, rows[chosen])
            return tokens if chosen.size == rows.size else tokens.take(chosen)

        entering = tokens is not None
        run_and_ship(self, depart, cargo, split, routing.normed[at], result, entering=entering)
        staying = np.flatnonzero(~split.leaves)
        if not staying.size:
            return
        size = self.view.spec.hidden_size
        kept = cargo.output[torch.from_numpy(staying), :size].to(self.view.dtype)
        if entering:
            self.go_on([which[row] for row in staying.tolist()], depart(staying), kept, result)
        else:
            self._executed(command.wave, layer, rows[staying], kept, units, result)

    def _executed(
        self,
        wave: int,
        layer: int,
        rows: IntArray,
        output: Tensor,
        units: Sequence[Unit],
        result: BatchOutput,
    ) -> None:
        """Tell the engine what came out, [rows, d], and do what it says."""
        if self.segments.in_force:
            # No token exits, so that nothing is looked at.
            last = np.full(rows.size, self.view.spec.layer_count)
            event = Executed(wave=wave, confidence=np.full(rows.size, -np.inf), exit_at=last)
        else:
            event = self.observer.executed(wave, layer, output)
        self.obey(self.tell(event), wave, rows, output, units, result)

    def obey(
        self,
        commands: Sequence[Command],
        wave: int,
        rows: IntArray,
        output: Tensor,
        units: Sequence[Unit],
        result: BatchOutput,
    ) -> None:
        """Do what the engine says of `rows` of whom a layer's output is there, [rows, d]."""
        at = {row: index for index, row in enumerate(rows.tolist())}
        for command in commands:
            assert isinstance(command, (Probe, Complete, Trailed, Attend))
            which = [units[row] for row in command.rows.tolist()]
            hidden = output[torch.tensor([at[row] for row in command.rows.tolist()])]
            if isinstance(command, Probe):
                predicted = self.view.logits(hidden).argmax(-1).tolist()
                for unit, token in zip(which, predicted, strict=True):
                    unit.probe = token
            elif isinstance(command, Complete):
                settings, drafts = self.engine.settings, self.end_drafts
                result.parcels += completed(self, settings, drafts, command, which, hidden)
                if command.layer == self.view.spec.layer_count:
                    result.written += [(unit, self._end) for unit in which]
            elif isinstance(command, Trailed):
                result.parcels += trailed(self, self.engine.settings, command, which, hidden)
                result.written += [(unit, self._end) for unit in which]
            else:
                self.go_on(which, self.departed(wave, command.rows), hidden, result)

    def go_on(
        self, units: Sequence[Unit], tokens: Wave, hidden: Tensor, result: BatchOutput
    ) -> None:
        """Units are about to enter a layer here, with these states [n, d]."""
        for row, unit in enumerate(units):
            unit.layer, unit.wave, unit.row = tokens.layer, tokens, row
            unit.hidden, unit.parts, unit.own = hidden[row : row + 1], (), None
            result.ready.append(unit)

    def boarded(self, units: Sequence[Unit]) -> tuple[list[Unit], Wave]:
        """One wave, with this server's numbers of their routes, and the units by its rows."""
        ordered, wave = boarded(units)
        route = np.array([self.route_rows[unit.seat.route] for unit in ordered], dtype=np.int64)
        # What was boarded is a copy that nobody else has seen.
        wave.put(slice(None), route=route)
        return ordered, wave

    def departed(self, wave: int, rows: IntArray) -> Wave:
        """Take rows out of the engine."""
        (depart,) = self.tell(TokensExported(wave=wave, rows=rows))
        assert isinstance(depart, Depart)
        return depart.tokens

    def new_wave(self) -> int:
        """A number that no wave has had."""
        self._wave += 1
        return self._wave
