"""The worker's side of a server: the only code that touches the model, the cache and the engine.

It runs in one thread, one batch at a time. Between two batches no wave is in the engine: every
row has left it as a `Wave` row of its own, so that the engine can be exchanged there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    SegmentRan,
    SequenceClosed,
    SequenceOpened,
    Settled,
    Strand,
    TokensArrived,
    TokensExported,
    TokensImported,
    Trailed,
)
from trimmoe.core.profile import Profile
from trimmoe.core.specs import IntArray
from trimmoe.core.wave import Wave
from trimmoe.engine.step import Engine
from trimmoe.models.base import MoEView, Routing, TokenBatch
from trimmoe.runtime.counters import ExpertCounter
from trimmoe.runtime.node.completion import completed, trailed
from trimmoe.runtime.node.execution import run_and_ship
from trimmoe.runtime.node.homes import Homes
from trimmoe.runtime.node.messages import Parcel, Start
from trimmoe.runtime.node.outcome import Arrival, LogEntry, Outcome
from trimmoe.runtime.node.pace import Pace
from trimmoe.runtime.node.rows import Rows
from trimmoe.runtime.node.segments import Segments
from trimmoe.runtime.node.shipping import Cargo, Split
from trimmoe.runtime.node.units import Unit, boarded, epochs_of
from trimmoe.runtime.observe import Observer, routed_unseen

_KEPT_BATCHES = 16


class Executor:
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
    ) -> None:
        self.view, self.server = view, server
        self.pace = pace or Pace()
        self.send: Callable[[list[Parcel]], None] | None = None
        """Sends what can leave before its batch is through; without it nothing does."""
        self.cache = view.new_cache(slots=slots)
        self.homes = Homes.of(view, slots, profile if engine.settings.guesses else None)
        self.engines = [engine]
        self.state = engine.start()
        self.segments = Segments.of(engine, server)
        self.log: list[LogEntry] | None = [] if log_events else None
        self.counter = ExpertCounter(view.spec.layer_count, view.spec.expert_count)
        self.observer = Observer(profile, view.device)
        self.route_rows: dict[tuple[int, ...], int] = {}
        self._draws = np.random.default_rng(seed)
        self._wave = 0
        self._batches: dict[tuple[tuple[int, ...], tuple[int, ...]], TokenBatch] = {}
        self.index_routes()

    @property
    def engine(self) -> Engine:
        """The one in force."""
        return self.engines[-1]

    def swap(self, engine: Engine) -> None:
        """Decide with another engine from now on; rows of routes keep their meaning."""
        assert not self.state.waves
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

    def index_routes(self) -> None:
        """Look up rows of the engine's routes by route."""
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

    def close(self, sequence: int) -> None:
        """Close an account if there is one."""
        self.homes.close(sequence)
        if sequence in self.state.accounts:
            self.tell(SequenceClosed(sequence=sequence))

    def settle(self, receipts: tuple[Receipt, ...], agrees: list[bool]) -> None:
        """Tokens of this server's users finished elsewhere, or were audited anywhere."""
        if receipts:
            self.tell(Settled(receipts=receipts))
        if agrees:
            self.tell(Audited(wave=self._new_wave(), agrees=np.array(agrees)))

    def arrive(self, arrivals: Sequence[Arrival]) -> Outcome:
        """The next tokens of this server's users set out."""
        going = [one for one in arrivals if one.sequence in self.state.accounts]
        if not going:
            return Outcome()
        wave = self._new_wave()
        sequences = tuple(one.sequence for one in going)
        arrived = TokensArrived(
            wave=wave,
            sequences=sequences,
            draws=self._draws.random(len(going)),
            guessed=np.array([one.guessed for one in going]),
        )
        self.tell(arrived)
        tokens = self.departed(wave, np.arange(len(going)))
        parcels = []
        for first in np.unique(tokens.server).tolist():
            which = np.flatnonzero(tokens.server == first)
            chosen = [going[i] for i in which.tolist()]
            rows = Rows(
                [one.sequence for one in chosen],
                [one.position for one in chosen],
                [1] * len(chosen),
                [],
                epochs_of(chosen),
            )
            start = Start(rows=rows, tokens=[one.token for one in chosen])
            parcels.append(Parcel(to=first, message=start, wave=tokens.take(which)))
        return Outcome(parcels=parcels)

    @torch.inference_mode()
    def attend(self, layer: int, units: Sequence[Unit]) -> Outcome:
        """Generated tokens pass the layers that leave nothing to decide, if there are any, and
        attention, router, decision and own slots of the one after them."""
        ordered, wave = self._boarded(units)
        batch, identity = self.batch(ordered), self._new_wave()
        if layer == 0:
            hidden = batch.pack(self.view.embed(batch.pad([u.tokens for u in ordered]), batch))
        else:
            hidden = torch.cat([unit.states() for unit in ordered])
        self.tell(TokensImported(wave=identity, tokens=wave, executing=False))
        until = min(self.segments.end(unit.seat.route, layer) for unit in ordered)
        last = min(until + 1, self.view.spec.layer_count)
        ran = self.view.run(
            layer,
            min(unit.waits_before(layer + 1, last) for unit in ordered),
            hidden,
            batch,
            self.cache,
            self.segments.settled(until),
        )
        self.pace.segment(layer, ran.experts)
        outcome = Outcome(written=[(u, at) for u in ordered for at in range(layer, ran.layer)])
        if ran.experts.shape[1]:
            commands = self.tell(SegmentRan(wave=identity, experts=ran.experts))
            if ran.routing is None:
                self._obey(
                    commands, identity, np.arange(len(ordered)), ran.hidden, ordered, outcome
                )
                return outcome
        assert ran.routing is not None
        self.pace.dense(ran.layer, len(ordered))
        outcome.written += [(unit, ran.layer) for unit in ordered]
        if self.segments.in_force:
            routed = routed_unseen(identity, ran.routing)
        else:
            routed = self.observer.routed(identity, ran.layer, ran.hidden, ran.routing)
        for command in self.tell(routed):
            if isinstance(command, Strand):
                stranded = [ordered[row] for row in command.rows.tolist()]
                for unit in stranded:
                    unit.layer = ran.layer
                outcome.stranded += stranded
            else:
                assert isinstance(command, Execute)
                self._execute(command, ordered, ran.hidden, ran.routing, outcome)
        return outcome

    @torch.inference_mode()
    def finish(self, layer: int, units: Sequence[Unit]) -> Outcome:
        """A layer gathered here: exits are due, or the next layer."""
        ordered, wave = self._boarded(units)
        identity = self._new_wave()
        self.tell(TokensImported(wave=identity, tokens=wave, executing=True))
        outcome = Outcome()
        output = torch.cat([unit.states() for unit in ordered])
        self._executed(identity, layer, np.arange(len(ordered)), output, ordered, outcome)
        return outcome

    def batch(self, units: Sequence[Unit]) -> TokenBatch:
        """The units' rows as one step; the same units pass many layers together."""
        slots = tuple(unit.seat.slot for unit in units)
        key = (slots, tuple(unit.start for unit in units))
        if any(unit.count > 1 for unit in units):
            return self.view.batch(self.cache, slots, [unit.positions for unit in units])
        if key not in self._batches:
            if len(self._batches) >= _KEPT_BATCHES:
                self._batches.clear()
            self._batches[key] = self.view.batch(
                self.cache, slots, [unit.positions for unit in units]
            )
        return self._batches[key]

    def run_here(
        self, layer: int, attended: Tensor, experts: IntArray, gates: Tensor, normed: Tensor
    ) -> Tensor:
        """The layer's output as far as this server gives it, [n, d]."""
        shared = self.view.shared(layer, attended, normed=normed)
        routed = None
        if (experts >= 0).any():
            chosen = torch.from_numpy(experts).to(self.view.device)
            routed = self.view.experts(layer, attended, chosen, gates, normed=normed)
        return self.view.finish(layer, attended, shared, routed)

    def _execute(
        self,
        command: Execute,
        units: list[Unit],
        attended: Tensor,
        routing: Routing,
        outcome: Outcome,
    ) -> None:
        layer, rows = command.layer, torch.from_numpy(command.rows)
        split = Split.of(
            command.slot_expert,
            command.slot_server,
            command.destination,
            here=self.server,
            server_count=self.engine.cost.server_count,
        )
        attended, gates = attended[rows], routing.gates[rows]
        cargo = Cargo(
            layer=layer,
            units=[units[row] for row in command.rows.tolist()],
            unit_of=np.arange(command.rows.size),
            offset=np.zeros(command.rows.size, dtype=np.int64),
            attended=attended,
            output=torch.empty_like(attended),
            gates=gates,
        )
        ahead = self.segments.in_force and layer + 1 < self.view.spec.layer_count
        if ahead:
            # Nothing hangs on what comes out, so that the engine need not wait for it.
            self.tell(self._executed_unseen(command.wave, command.rows.size))
        run_and_ship(self, command, cargo, split, routing.normed[rows], outcome, entering=ahead)
        staying = np.flatnonzero(~split.leaves)
        if not staying.size:
            return
        kept = cargo.output[torch.from_numpy(staying)]
        if ahead:
            self._go_on(command.wave, command.rows[staying], layer + 1, kept, units, outcome)
        else:
            self._executed(command.wave, layer, command.rows[staying], kept, units, outcome)

    def _executed_unseen(self, wave: int, count: int) -> Executed:
        """For engines that no token exits from, which look at nothing of it."""
        last = np.full(count, self.view.spec.layer_count)
        return Executed(wave=wave, confidence=np.full(count, -np.inf), exit_at=last)

    def emit(self, parcels: list[Parcel], outcome: Outcome) -> None:
        """Send parcels now if that is possible, or with the rest of the outcome."""
        if self.send is None:
            outcome.parcels += parcels
        elif parcels:
            self.send(parcels)

    def _executed(
        self,
        wave: int,
        layer: int,
        rows: IntArray,
        output: Tensor,
        units: list[Unit],
        outcome: Outcome,
    ) -> None:
        """Tell the engine what came out, [rows, d], and do what it says."""
        if self.segments.in_force:
            event = self._executed_unseen(wave, rows.size)
        else:
            event = self.observer.executed(wave, layer, output)
        self._obey(self.tell(event), wave, rows, output, units, outcome)

    def _obey(
        self,
        commands: Sequence[Command],
        wave: int,
        rows: IntArray,
        output: Tensor,
        units: list[Unit],
        outcome: Outcome,
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
                outcome.parcels += completed(self, command, which, hidden)
                if command.layer == self.view.spec.layer_count:
                    outcome.written += [(unit, command.layer) for unit in which]
            elif isinstance(command, Trailed):
                outcome.parcels += trailed(self, command, which, hidden)
                outcome.written += [(unit, self.view.spec.layer_count) for unit in which]
            else:
                self._go_on(wave, command.rows, command.layer, hidden, units, outcome)

    def _go_on(
        self,
        wave: int,
        rows: IntArray,
        layer: int,
        hidden: Tensor,
        units: list[Unit],
        outcome: Outcome,
    ) -> None:
        """`rows` of a wave are about to enter a layer here, with these states."""
        tokens = self.departed(wave, rows)
        for index, row in enumerate(rows.tolist()):
            unit = units[row]
            unit.layer, unit.wave, unit.row = layer, tokens, index
            unit.hidden, unit.parts = hidden[index : index + 1], ()
            outcome.ready.append(unit)

    def _boarded(self, units: Sequence[Unit]) -> tuple[list[Unit], Wave]:
        """One wave, with this server's numbers of their routes."""
        ordered, wave = boarded(units)
        route = np.array([self.route_rows[unit.seat.route] for unit in ordered], dtype=np.int64)
        return ordered, replace(wave, route=route)

    def departed(self, wave: int, rows: IntArray) -> Wave:
        """Take rows out of the engine."""
        (depart,) = self.tell(TokensExported(wave=wave, rows=rows))
        assert isinstance(depart, Depart)
        return depart.tokens

    def _new_wave(self) -> int:
        self._wave += 1
        return self._wave
