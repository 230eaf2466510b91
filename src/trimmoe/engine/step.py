"""The engine: Algorithm 2 driven by events.

Order within a layer (DESIGN section 4): exit test on the last executed state, attention and
router, decision, execution.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from trimmoe.core.changed import changed
from trimmoe.core.events import (
    Attend,
    Audited,
    Command,
    Complete,
    Depart,
    Event,
    Executed,
    Probe,
    Receipt,
    Routed,
    SegmentRan,
    SequenceClosed,
    SequenceOpened,
    Settled,
    TokensArrived,
    TokensExported,
    TokensImported,
    Trailed,
)
from trimmoe.core.exit_states import ExitState
from trimmoe.core.ledger import Kind
from trimmoe.core.profile import Profile
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.core.wave import Wave
from trimmoe.cost.model import Accounting, CostModel
from trimmoe.cost.nearest import Nearest
from trimmoe.engine.books import (
    afterwards,
    closed,
    following,
    ledgers,
    missed,
    passed,
    receipts,
)
from trimmoe.engine.deciding import decided, ran_nearest
from trimmoe.engine.exits import ExitRules
from trimmoe.engine.feedback import Feedback, observe, observe_audits
from trimmoe.engine.guesses import GuessRules
from trimmoe.engine.state import Account, EngineState, new_wave
from trimmoe.policy.base import Policy
from trimmoe.policy.price import own_weight
from trimmoe.policy.readings import BudgetRule
from trimmoe.policy.settings import PolicySettings

Step = tuple[EngineState, tuple[Command, ...]]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The fixed part: what to decide with. All memory is in `EngineState`."""

    policy: Policy
    settings: PolicySettings
    profile: Profile
    cost: CostModel
    routes: IntArray
    """kappa per route, the first M by access server, [R, N]."""
    reference_s: float
    """d_ref, to normalise delays (43)."""
    route_weights: tuple[float, ...] = ()
    """omega_D to begin with, by route; empty for one that all share."""
    user_reference_s: FloatArray | None = None
    """d_ref of the users at each server, [M]; None where all go by `reference_s`."""
    hosts: BoolArray | None = None
    """Who holds which experts, [M, N, E]: what users' servers guess with in a driver that has them
    all in one process, and which servers hold all that their users' tokens need."""
    stand_in_bits: IntArray | None = None
    """Bits of their copies of other experts, as the plan has them, [M, N, E]."""

    @cached_property
    def exits(self) -> ExitRules:
        """When tokens leave early."""
        return ExitRules(
            settings=self.settings,
            profile=self.profile,
            cost=self.cost,
            routes=self.routes,
            reference_s=self.reference_s,
            late_s=self.policy.exact_to_go_s,
        )

    def exit_terms(self, confidence: float) -> tuple[float, float]:
        """The threshold p that a request's confidence amounts to before any feedback, and what an
        exit at it is charged."""
        needed = self.exits.needed(confidence)
        return needed, float(self.exits.charge(np.array([needed]))[0])

    @cached_property
    def guess_rules(self) -> GuessRules:
        """When users' servers guess ahead."""
        return GuessRules(
            settings=self.settings,
            cost=self.cost,
            routes=self.routes,
            reference_s=self.reference_s,
            busy=self.exits.busy,
            top_k=self.profile.patterns.shape[2],
            hosts=self.hosts,
        )

    @cached_property
    def copied_bits(self) -> IntArray | None:
        """Bits of the copies that slots may run on each server, [M, N, E]; None where no slot
        does."""
        copies, bits = self.policy.copies, self.stand_in_bits
        return None if copies is None or bits is None else bits * copies

    def without_copies(self) -> Engine:
        """The same for models that run none."""
        return replace(self, policy=self.policy.without_copies())

    @cached_property
    def settled(self) -> BoolArray | None:
        """Experts of which activated sets run where a token is without a decision, as long as it
        stays there, [M, N, E]; None where every layer is decided upon. If not, no token exits."""
        return None if self.nearest is None else self.nearest.here

    @cached_property
    def nearest(self) -> Nearest | None:
        """Of the policy; there if it leaves anything settled."""
        return self.policy.nearest

    @cached_property
    def decides(self) -> bool:
        """Whether it must be told more than activated sets."""
        return self.policy.decides

    def start(self) -> EngineState:
        """The state before the first event."""
        return EngineState(
            feedback=Feedback(
                loss_weight=self.settings.loss_weight, route_weights=self.route_weights
            )
        )

    def step(self, state: EngineState, event: Event) -> Step:
        """What follows from `event`; pure."""
        match event:
            case SequenceOpened():
                return self._opened(state, event), ()
            case SequenceClosed():
                left = dict(state.accounts)
                left.pop(event.sequence, None)
                return changed(state, accounts=left), ()
            case TokensArrived():
                return self._arrived(state, event)
            case TokensImported():
                return self._imported(state, event)
            case TokensExported():
                return self._exported(state, event)
            case Routed():
                return self._routed(state, event)
            case Executed():
                return self._executed(state, event)
            case SegmentRan():
                return self._segment_ran(state, event)
            case Audited():
                feedback = observe_audits(state.feedback, event.agrees)
                return replace(state, feedback=feedback), ()
            case Settled():
                return self._settled_here(state, event.receipts), ()

    def _opened(self, state: EngineState, event: SequenceOpened) -> EngineState:
        assert event.budget >= 0
        account = Account(
            access=event.access,
            route=event.access if event.route is None else event.route,
            budget=event.budget,
            confidence=self.exits.needed(event.confidence),
            balance=event.balance,
        )
        return state.with_accounts({event.sequence: account})

    def _grown(self, state: EngineState) -> EngineState:
        """The state with weights for routes that were added since it began."""
        known = state.feedback.route_weights
        if len(known) >= len(self.route_weights):
            return state
        weights = known + self.route_weights[len(known) :]
        return replace(state, feedback=replace(state.feedback, route_weights=weights))

    def _arrived(self, state: EngineState, event: TokensArrived) -> Step:
        state = self._grown(state)
        accounts = [state.accounts[sequence] for sequence in event.sequences]
        access = np.array([account.access for account in accounts], dtype=np.int64)
        route = np.array([account.route for account in accounts], dtype=np.int64)
        first = access if self.cost.accounting is Accounting.MIGRATE else self.routes[route, 0]
        needed = np.array([account.confidence for account in accounts])
        raises = state.feedback.raises_of(access)
        needed = np.maximum(needed, np.minimum(needed + raises, 1.0))
        if self.settings.drafts:
            needed = np.maximum(needed, self.exits.busy[route])
        balance = np.array([account.balance for account in accounts])
        if event.guessed is not None:
            # What is left belongs to a token ahead, until that has told what it spends.
            balance = np.where(event.guessed, 0.0, balance)
        wave = new_wave(
            event.sequences,
            accounts,
            draws=event.draws,
            server=first,
            allowance=balance + np.array([account.budget for account in accounts]),
            confidence_needed=needed,
            loss_weight=self.weights(state, route, access),
            exit_loss=self.exits.charge(needed),
            start_s=self.cost.enter_s[access, first],
            layer_count=self.cost.layer_count,
            server_count=self.cost.server_count,
        )
        if event.departing:
            return state, (Depart(wave=event.wave, tokens=wave),)
        attend = Attend(wave=event.wave, layer=0, rows=wave.alive, server=wave.server)
        return state.with_wave(event.wave, wave), (attend,)

    def weights(self, state: EngineState, route: IntArray, access: IntArray) -> FloatArray:
        """omega_D of arriving tokens, [n], for delays over `reference_s`."""
        weights = state.feedback.weights_of(route)
        if self.user_reference_s is None:
            return weights
        return own_weight(weights, self.user_reference_s[access], self.reference_s)

    def _imported(self, state: EngineState, event: TokensImported) -> Step:
        wave, tokens = event.wave, event.tokens
        assert wave not in state.waves
        state = state.with_wave(wave, tokens)
        if event.executing:
            return state, ()
        attend = Attend(wave=wave, layer=tokens.layer, rows=tokens.alive, server=tokens.server)
        return state, (attend,)

    def _exported(self, state: EngineState, event: TokensExported) -> Step:
        wave = state.waves[event.wave]
        left = wave.without(event.rows)
        state = state.with_wave(event.wave, left if left.alive.size else None)
        return state, (Depart(wave=event.wave, tokens=wave.take(event.rows)),)

    def _routed(self, state: EngineState, event: Routed) -> Step:
        wave, commands = decided(self.policy, self.cost, state.waves[event.wave], event)
        return state.with_wave(event.wave, wave if wave.alive.size else None), commands

    def _executed(self, state: EngineState, event: Executed) -> Step:
        wave = state.waves[event.wave]
        rows, done = wave.alive, wave.layer + 1
        skipped = wave.kinds[rows, wave.layer] == Kind.SKIPPED
        confidence = np.where(skipped, -np.inf, event.confidence)
        wave = wave.copy(layer=done)
        wave.put(rows, confidence=confidence, exit_at=event.exit_at)
        if done == self.cost.layer_count:
            return self._ended(state, event.wave, wave)
        due = self.exits.due(wave, rows)
        audit = due & (wave.draws[rows] < self.settings.readings.audit_share)
        # What goes on whole is checked without being held up for it.
        audit &= self.settings.readings.exit_state is not ExitState.WHOLE
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

    def _segment_ran(self, state: EngineState, event: SegmentRan) -> Step:
        assert self.nearest is not None, "a layer that is decided upon ran without a decision"
        if event.settled == event.experts.shape[1]:
            wave, _, _ = passed(self.nearest, event.tokens, event.experts, event.settled)
            if wave.layer == self.cost.layer_count:
                return self._ended(state, event.wave, wave)
            return state, (Depart(wave=event.wave, tokens=wave),)
        if self.decides:
            assert event.routed is not None
            settled = event.experts[:, : event.settled]
            wave, _, _ = passed(self.nearest, event.tokens, settled, event.settled)
            wave, commands = decided(self.policy, self.cost, wave, event.routed)
        else:
            wave, commands = ran_nearest(self.nearest, event)
        if not wave.alive.size:
            return state, commands
        if wave.layer + 1 == self.cost.layer_count:
            return state.with_wave(event.wave, wave), commands
        # Nothing hangs on what comes out of the layer.
        wave = changed(wave, layer=wave.layer + 1)
        whole = wave.alive.size == len(event.tokens.sequences)
        tokens = wave if whole else wave.take(wave.alive)
        return state, (*commands, Depart(wave=event.wave, tokens=tokens))

    def _ended(self, state: EngineState, identity: int, wave: Wave) -> Step:
        """All rows have passed the last layer."""
        rows = wave.alive
        answered = rows[wave.answered[rows]]
        state, commands = self._completed(state, identity, wave, rows[~wave.answered[rows]])
        if answered.size:
            done, state = wave.take(answered), state.with_wave(identity, None)
            told = afterwards(self.cost, done, drafts=self.settings.drafts)
            trailed = Trailed(
                wave=identity,
                rows=answered,
                server=done.server,
                ledgers=told,
                missed=missed(self.cost, done, told) if self.settings.drafts else (),
            )
            commands += (trailed,)
        return state, commands

    def _completed(self, state: EngineState, identity: int, wave: Wave, rows: IntArray) -> Step:
        """Close the books of `rows`; the wave goes with its last row."""
        if not rows.size:
            return state.with_wave(identity, wave if wave.alive.size else None), ()
        done = wave.take(rows)
        exit_state = self.settings.readings.exit_state
        if wave.layer < self.cost.layer_count and exit_state is ExitState.WHOLE:
            left = following(self.cost, wave, rows)
        else:
            left = wave.without(rows)
        state = state.with_wave(identity, left if left.alive.size else None)
        done = closed(self.cost, self.routes, done, done.alive, exit_state)
        told = receipts(self.cost, done)
        here = tuple(each for each in told if each.sequence in state.accounts)
        complete = Complete(
            wave=identity,
            layer=done.layer,
            rows=rows,
            server=done.server,
            ledgers=ledgers(self.cost, done),
            receipts=tuple(each for each in told if each.sequence not in state.accounts),
        )
        return self._settled_here(state, here), (complete,)

    def _settled_here(self, state: EngineState, receipts: tuple[Receipt, ...]) -> EngineState:
        """Carry receipts over into the accounts and the feedback."""
        receipts = tuple(each for each in receipts if each.sequence in state.accounts)
        if not receipts:
            return state
        state = self._grown(state)
        accounts = dict[int, Account]()
        if self.settings.readings.budget_rule is BudgetRule.BUCKET:
            for each in receipts:
                account = accounts.get(each.sequence, state.accounts[each.sequence])
                accounts[each.sequence] = account.settled(each.budget, each.loss)
        budget = np.array([each.budget for each in receipts])
        loss = np.array([each.loss for each in receipts])
        delay_s = np.array([each.delay_s for each in receipts])
        access = np.array([state.accounts[each.sequence].access for each in receipts])
        sure = [each.exit_confidence for each in receipts]
        exited = np.array([each is not None for each in sure])
        shared_s = np.full(access.size, self.reference_s)
        own_s = shared_s if self.user_reference_s is None else self.user_reference_s[access]
        feedback = observe(
            state.feedback,
            self.settings,
            route=np.array([state.accounts[each.sequence].route for each in receipts]),
            budget_use=np.divide(loss, budget, where=budget > 0, out=np.zeros_like(loss)),
            relative_delay=delay_s / (own_s * self.cost.layer_count),
            exit_confidence=np.array([each for each in sure if each is not None]),
            exit_user=access[exited],
        )
        return changed(state.with_accounts(accounts), feedback=feedback)
