"""The engine: Algorithm 2 driven by events.

Order within a layer (DESIGN section 4): exit test on the last executed state, attention and
router, decision, execution.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from trimmoe.core.events import (
    Attend,
    Audited,
    Command,
    Complete,
    Event,
    Execute,
    Executed,
    Probe,
    Routed,
    SequenceClosed,
    SequenceOpened,
    TokensArrived,
)
from trimmoe.core.ledger import Kind, Ledger, layer_kinds
from trimmoe.core.profile import Profile
from trimmoe.core.specs import IntArray
from trimmoe.cost.model import Accounting, CostModel, layer_messages
from trimmoe.engine.feedback import Feedback, observe, observe_audits
from trimmoe.engine.state import NOT_PROBED, Account, EngineState, Wave, new_wave
from trimmoe.policy.base import Observation, Policy
from trimmoe.policy.settings import BudgetRule, PolicySettings

Step = tuple[EngineState, tuple[Command, ...]]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The fixed part: what to decide with. All memory is in `EngineState`."""

    policy: Policy
    settings: PolicySettings
    profile: Profile
    cost: CostModel
    routes: IntArray
    """kappa per access server, [M, N]."""
    reference_s: float
    """d_ref, to normalise delays (43)."""

    def start(self) -> EngineState:
        """The state before the first event."""
        return EngineState(feedback=Feedback(loss_weight=self.settings.loss_weight))

    def step(self, state: EngineState, event: Event) -> Step:
        """What follows from `event`; pure."""
        match event:
            case SequenceOpened():
                return self._opened(state, event), ()
            case SequenceClosed():
                left = {k: v for k, v in state.accounts.items() if k != event.sequence}
                return replace(state, accounts=left), ()
            case TokensArrived():
                return self._arrived(state, event)
            case Routed():
                return self._routed(state, event)
            case Executed():
                return self._executed(state, event)
            case Audited():
                return self._audited(state, event), ()

    def _opened(self, state: EngineState, event: SequenceOpened) -> EngineState:
        assert event.budget >= 0
        account = Account(
            access=event.access,
            budget=event.budget,
            confidence=self._needed(event.confidence),
        )
        return state.with_accounts({event.sequence: account})

    def _needed(self, confidence: float) -> float:
        """p_J, raised to where calibration bounds what exits flip by what is tolerated."""
        if self.settings.exit_risk is None:
            return confidence
        return max(confidence, self.profile.exit_floor_at_risk(self.settings.exit_risk))

    def _arrived(self, state: EngineState, event: TokensArrived) -> Step:
        accounts = [state.accounts[sequence] for sequence in event.sequences]
        access = np.array([account.access for account in accounts], dtype=np.int64)
        first = access if self.cost.accounting is Accounting.MIGRATE else self.routes[access, 0]
        needed = np.array([account.confidence for account in accounts])
        wave = new_wave(
            event.sequences,
            accounts,
            draws=event.draws,
            server=first,
            allowance=np.array([account.balance + account.budget for account in accounts]),
            confidence_needed=np.maximum(
                needed, np.minimum(needed + state.feedback.exit_raise, 1.0)
            ),
            start_s=self.cost.token_transfer_s[access, first],
            layer_count=self.cost.layer_count,
            server_count=self.cost.server_count,
        )
        attend = Attend(wave=event.wave, layer=0, rows=wave.alive, server=wave.server)
        return state.with_wave(event.wave, wave), (attend,)

    def _routed(self, state: EngineState, event: Routed) -> Step:
        wave = state.waves[event.wave]
        rows = wave.alive
        audited = wave.probed[rows] != NOT_PROBED
        # What checks an exit must itself be the full-depth model.
        allowance = np.where(audited, 0.0, wave.allowance[rows])
        decision = self.policy.decide(
            Observation(
                layer=wave.layer,
                access=wave.access[rows],
                server=wave.server[rows],
                experts=event.experts,
                masses=event.masses,
                importance=event.importance,
                steadiness=event.steadiness,
                allowance=allowance,
                exit_at=wave.exit_at[rows],
                loss_weight=state.feedback.loss_weight,
            )
        )
        assert (decision.loss <= allowance).all(), "a policy overspent the quality budget"
        where = (decision.slot_expert, decision.slot_server)
        messages = layer_messages(self.cost, wave.server[rows], decision.destination, *where)
        kinds = wave.kinds.copy()
        kinds[rows, wave.layer] = layer_kinds(*where, event.experts, wave.server[rows])
        run = (decision.slot_expert >= 0).sum(-1)
        dropped = np.where(run > 0, decision.slot_expert.shape[1] - run, 0)
        dense_s = self.cost.dense_s[wave.server[rows], wave.layer]
        wave = replace(wave, kinds=kinds).at(
            rows,
            allowance=np.maximum(wave.allowance[rows] - decision.loss, 0.0),
            loss=wave.loss[rows] + decision.loss,
            delay_s=wave.delay_s[rows] + decision.delay_s + dense_s,
            messages=wave.messages[rows] + messages,
            slots_run=wave.slots_run[rows] + run,
            slots_dropped=wave.slots_dropped[rows] + dropped,
            server=decision.destination,
        )
        execute = Execute(
            wave=event.wave,
            layer=wave.layer,
            rows=rows,
            slot_expert=decision.slot_expert,
            slot_server=decision.slot_server,
            destination=decision.destination,
        )
        return state.with_wave(event.wave, wave), (execute,)

    def _executed(self, state: EngineState, event: Executed) -> Step:
        wave = state.waves[event.wave]
        rows, done = wave.alive, wave.layer + 1
        skipped = wave.kinds[rows, wave.layer] == Kind.SKIPPED
        confidence = np.where(skipped, -np.inf, event.confidence)
        wave = replace(wave, layer=done).at(rows, confidence=confidence, exit_at=event.exit_at)
        if done == self.cost.layer_count:
            return self._completed(state, event.wave, wave, rows)
        due = confidence >= wave.confidence_needed[rows]
        due &= self.settings.levers.exit & (wave.probed[rows] == NOT_PROBED)
        audit = due & (wave.draws[rows] < self.settings.audit_share)
        commands: tuple[Command, ...] = ()
        if audit.any():
            wave = wave.at(rows[audit], probed=np.array(wave.layer - 1))
            commands = (Probe(wave=event.wave, layer=wave.layer - 1, rows=rows[audit]),)
        state, completions = self._completed(state, event.wave, wave, rows[due & ~audit])
        left = state.waves[event.wave].alive if event.wave in state.waves else rows[:0]
        if left.size:
            server = state.waves[event.wave].server[left]
            completions += (Attend(wave=event.wave, layer=done, rows=left, server=server),)
        return state, commands + completions

    def _completed(self, state: EngineState, identity: int, wave: Wave, rows: IntArray) -> Step:
        """Close the books of `rows`; drop the wave when nothing of it is left to hear of."""
        wave = replace(wave, alive=np.setdiff1d(wave.alive, rows))
        if not rows.size:
            return state.with_wave(identity, wave), ()
        wave = self._settled(wave, rows)
        state = state.with_accounts(self._balances(state, wave, rows))
        state = replace(state, feedback=self._observed(state.feedback, wave, rows))
        pending = wave.alive.size or (wave.probed != NOT_PROBED).any()
        complete = Complete(
            wave=identity,
            layer=wave.layer,
            rows=rows,
            server=wave.server[rows],
            ledgers=tuple(self._ledger(wave, row) for row in rows),
        )
        return state.with_wave(identity, wave if pending else None), (complete,)

    def _settled(self, wave: Wave, rows: IntArray) -> Wave:
        """Charge the token's return to its user and the propagation of an exit state.

        Propagation is off the critical path: it costs messages, not delay. Under `migrate` the
        KV cache is free by definition.
        """
        back_s = self.cost.token_transfer_s[wave.server[rows], wave.access[rows]]
        wave = wave.at(rows, delay_s=wave.delay_s[rows] + back_s)
        if self.cost.accounting is Accounting.MIGRATE or wave.layer == self.cost.layer_count:
            return wave
        messages = wave.messages.copy()
        for row in rows:
            later = np.unique(self.routes[wave.access[row], wave.layer :])
            server = wave.server[row]
            messages[row, server, later[later != server]] += 1
        return replace(wave, messages=messages)

    def _balances(self, state: EngineState, wave: Wave, rows: IntArray) -> dict[int, Account]:
        keep = self.settings.budget_rule is BudgetRule.BUCKET
        changed = {}
        for row in rows:
            sequence = wave.sequences[row]
            balance = float(wave.allowance[row]) if keep else 0.0
            if sequence in state.accounts:
                changed[sequence] = replace(state.accounts[sequence], balance=balance)
        return changed

    def _observed(self, feedback: Feedback, wave: Wave, rows: IntArray) -> Feedback:
        budget, loss = wave.budget[rows], wave.loss[rows]
        exact_s = self.reference_s * self.cost.layer_count
        exited = wave.layer < self.cost.layer_count
        return observe(
            feedback,
            self.settings,
            budget_use=np.divide(loss, budget, where=budget > 0, out=np.zeros_like(loss)),
            relative_delay=wave.delay_s[rows] / exact_s,
            exit_confidence=wave.confidence[rows] if exited else np.zeros(0),
        )

    def _ledger(self, wave: Wave, row: int) -> Ledger:
        kinds = np.zeros((self.cost.layer_count, len(Kind)), dtype=np.int64)
        kinds[np.arange(self.cost.layer_count), wave.kinds[row]] = 1
        return Ledger(
            tokens=1,
            kinds=kinds,
            slots_run=int(wave.slots_run[row]),
            slots_dropped=int(wave.slots_dropped[row]),
            messages=wave.messages[row],
            hidden_bytes=self.cost.hidden_bytes,
            delay_s=float(wave.delay_s[row]),
            loss=float(wave.loss[row]),
            budget=float(wave.budget[row]),
            audits=int(wave.probed[row] != NOT_PROBED),
        )

    def _audited(self, state: EngineState, event: Audited) -> EngineState:
        wave = state.waves[event.wave]
        state = replace(state, feedback=observe_audits(state.feedback, event.agrees))
        return state.with_wave(event.wave, wave if wave.alive.size else None)
