"""Deciding tokens before their time has come, many requests at once.

What the engine decides about a token depends on the account of its sequence and on the feedback
in force when the token begins, never on the clock. Between two control instants the feedback does
not change, so the next tokens of all running requests can be decided together, in waves as wide
as there are requests, and the clock only has to find out when they happen. Two states of the
engine are kept: `settled` knows the tokens that are through, `ahead` those that were decided too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from trimmoe.core.events import (
    Attend,
    Audited,
    Depart,
    Event,
    Receipt,
    SequenceClosed,
    SequenceOpened,
    Settled,
    TokensArrived,
    TokensExported,
)
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.core.wave import Wave, join_waves
from trimmoe.cost.guessing import window
from trimmoe.engine.books import flipped
from trimmoe.engine.guesses import DraftsAlong
from trimmoe.engine.prompts import NO_EXIT
from trimmoe.engine.state import EngineState
from trimmoe.engine.step import Engine
from trimmoe.policy.relaxed import FLIP
from trimmoe.policy.trim import rounded_weight
from trimmoe.simulator.feed import TraceFeed
from trimmoe.simulator.head_drafts import HeadDrafts, head_drafts
from trimmoe.simulator.journey import TRAVELLING, Itinerary, travel
from trimmoe.simulator.uniform import uniform
from trimmoe.simulator.world import NONE, RIGHT, UNSURE, WRONG

ENTERING = 0


@dataclass(kw_only=True)
class Ahead:
    """The engine's two states at every access server, which learns from its own users' tokens only,
    and how they are told what happened."""

    engine: Engine
    feed: TraceFeed
    seed: int
    budget: float
    confidence: float
    along: DraftsAlong
    streams: int | None = None
    """Requests that are always under way; None: those whose accounts are open."""
    settled: list[EngineState] = field(init=False)
    """By access server."""
    ahead: list[EngineState] = field(init=False)
    _drafts: HeadDrafts = field(init=False)
    _access: dict[int, int] = field(default_factory=dict)
    """Of every open request."""
    _kept: dict[int, set[int]] = field(default_factory=dict)
    """Numbers of those tokens of which a guess of what they predict is kept, by request."""

    def __post_init__(self) -> None:
        servers = range(self.engine.cost.server_count)
        self.settled = [self.engine.start() for _ in servers]
        self.ahead = list(self.settled)
        first_right = self.engine.cost.head_right
        self._drafts = head_drafts(
            self.feed.trace, self.along, seed=self.seed, first_right=first_right
        )

    def open(self, request: int, access: int) -> None:
        """A request's account; before any of its tokens is decided."""
        self._access[request], self._kept[request] = access, set()
        self._drafts.open(request)
        event = SequenceOpened(
            sequence=request, access=access, budget=self.budget, confidence=self.confidence
        )
        for states in (self.settled, self.ahead):
            self._tell(states, access, event)

    def close(self, request: int) -> None:
        """A request is finished."""
        access = self._access.pop(request)
        self._drafts.close(request)
        del self._kept[request]
        for states in (self.settled, self.ahead):
            self._tell(states, access, SequenceClosed(sequence=request))

    def decide(
        self,
        requests: IntArray,
        numbers: IntArray,
        tokens: IntArray,
        before: IntArray,
        last: BoolArray,
        *,
        prompted: BoolArray,
    ) -> Itinerary:
        """The next token of each of these requests [n]: their `numbers`-th, `tokens` in the trace
        after those `before`; of some it is the `last`, and some were `prompted`.

        Afterwards the next ones may be decided."""
        draws = uniform(self.seed, requests, numbers)
        access = np.array([self._access[request] for request in requests.tolist()])
        settings, windows = self.engine.settings, np.zeros(requests.size, dtype=np.int64)
        guessed, along = windows > 0, self.along.most[access] > 0
        if settings.guesses:
            windows = self._windows[access]
            # Nobody guesses what comes behind nothing, nor what nothing may follow.
            behind = (numbers > 0) | prompted
            pairs = zip(requests.tolist(), numbers.tolist(), strict=True)
            kept = np.array([number - 1 in self._kept[request] for request, number in pairs])
            guessed = behind & (windows > 0) & (self._guesses(before, access)[1] | kept)
            guessed = np.where(along, self._drafts.is_right(requests, numbers - 1), guessed)
        groups = [np.flatnonzero(access == one) for one in np.unique(access)]
        waves = []
        for rows in groups:
            state = self.ahead[access[rows[0]]]
            sequences = tuple(requests[rows].tolist())
            waves.append(self._departed(state, sequences, draws[rows], guessed[rows]))
        order = np.concatenate(groups)
        state = EngineState(feedback=self.ahead[0].feedback)
        wave = join_waves(waves)
        journey = travel(self.engine, state, wave, self.feed, tokens[order], last[order])
        journey = journey.reordered(np.argsort(order))
        if settings.guesses:
            made, right = self._guesses(tokens, access)
            if settings.relaxed:
                asks = made & ~right & ~along & ~last & (windows > 0)
                right = right | self._keep(journey, numbers, asks & self.feed.near(tokens, access))
            fates, counts = self._drafts.drafted(requests, numbers, access, tokens)
            own = np.where(right, RIGHT, np.where(made, WRONG, UNSURE))
            journey.guess[:] = np.where(along, fates, own)
            # Nobody waits for what the last one would predict.
            journey.guess[last | (windows == 0)] = NONE
            journey.window[:] = np.where(along, counts, windows)
        self._settle(self.ahead, journey.receipts, learns=False)
        return journey

    def _keep(self, journey: Itinerary, numbers: IntArray, near: BoolArray) -> BoolArray:
        """Of tokens [n], these of their requests, whose guesses full depth nearly agrees with,
        which are kept, [n]: those whose requests have the credit. It is spent."""
        kept = np.zeros(near.size, dtype=bool)
        for row, receipt in enumerate(journey.receipts):
            account = self.ahead[self._access[receipt.sequence]].accounts[receipt.sequence]
            credit = account.balance + receipt.budget - receipt.loss
            kept[row] = near[row] and credit >= FLIP
            if kept[row]:
                self._kept[receipt.sequence].add(int(numbers[row]))
                journey.receipts[row] = replace(receipt, loss=receipt.loss + FLIP)
                journey.ledgers[row] = flipped(journey.ledgers[row])
        return kept

    def guessed_behind(self, access: IntArray, tokens: IntArray) -> tuple[IntArray, IntArray]:
        """What becomes of the guesses of what prompts' last `tokens` predict, and how many guesses
        may be ahead, [n] each. On a wrong one nothing sets out here."""
        windows = self._windows[access]
        right = self._guesses(tokens, access)[1]
        # Drafts come with the first token.
        nobody = (windows == 0) | (self.along.most[access] > 0)
        return np.where(nobody, NONE, np.where(right, RIGHT, UNSURE)), windows

    def _guesses(self, tokens: IntArray, access: IntArray) -> tuple[BoolArray, BoolArray]:
        """Whether what `tokens` predict is guessed surely enough, and rightly, [n] each."""
        return self.feed.guesses(tokens, access, self._least[access], self.engine.settings)

    @property
    def _least(self) -> FloatArray:
        """See `GuessRules.least_among`; of the servers that users enter at."""
        streams = len(self._access) if self.streams is None else self.streams
        return self.engine.guess_rules.least_among(streams)

    @cached_property
    def _chances(self) -> list[float]:
        """See `TraceFeed.chances`; the whole trace is looked at once."""
        return self.feed.chances(self.engine.settings, self.engine.cost.server_count)

    @property
    def _windows(self) -> IntArray:
        """Guesses that may be ahead of what is confirmed, by access server, [M]."""
        most, least = self.engine.settings.guesses, self._least[: self.engine.cost.server_count]
        pairs = zip(self._chances, least.tolist(), strict=True)
        windows = np.array([window(chance, each, most) for chance, each in pairs])
        # A server's own pass would be full depth itself at home.
        windows[self.engine.guess_rules.home | self.along.idle] = 0
        return np.where(self.along.most > 0, self.along.most, windows)

    def prefill(self, requests: IntArray, access: IntArray, tokens: IntArray) -> Itinerary:
        """Prompt tokens [n], which run exactly, without budget, unless the policy trims them: then
        each has that of a generated one, and what it leaves is lost. None exits."""
        budget = self.budget if self.engine.settings.readings.prompts_trimmed else 0.0
        state = EngineState(feedback=self.engine.start().feedback)
        for request, server in dict(zip(requests.tolist(), access.tolist(), strict=True)).items():
            opened = SequenceOpened(
                sequence=request, access=server, budget=budget, confidence=NO_EXIT
            )
            state, _ = self.engine.step(state, opened)
        draws, nothing = np.ones(tokens.size), np.zeros(tokens.size, dtype=bool)
        wave = self._departed(state, tuple(requests.tolist()), draws, nothing)
        elsewhere = EngineState(feedback=state.feedback)
        return travel(self.engine, elsewhere, wave, self.feed, tokens, nothing)

    def _departed(
        self,
        state: EngineState,
        sequences: tuple[int, ...],
        draws: FloatArray,
        guessed: BoolArray,
    ) -> Wave:
        """The next tokens of these sequences, on their way, some of them on guesses; the state is
        not kept."""
        arrived = TokensArrived(wave=ENTERING, sequences=sequences, draws=draws, guessed=guessed)
        state, (attend,) = self.engine.step(state, arrived)
        assert isinstance(attend, Attend)
        exported = TokensExported(wave=ENTERING, rows=attend.rows)
        _, (depart,) = self.engine.step(state, exported)
        assert isinstance(depart, Depart)
        return depart.tokens

    def _tell(self, states: list[EngineState], access: int, event: Event) -> None:
        states[access], _ = self.engine.step(states[access], event)

    def _settle(
        self, states: list[EngineState], receipts: Sequence[Receipt], *, learns: bool
    ) -> None:
        """Tell every access server of its tokens; without learning only the accounts change."""
        by_access: dict[int, list[Receipt]] = {}
        for receipt in receipts:
            by_access.setdefault(self._access[receipt.sequence], []).append(receipt)
        for access, mine in by_access.items():
            before = states[access].feedback
            self._tell(states, access, Settled(receipts=tuple(mine)))
            if not learns:
                states[access] = replace(states[access], feedback=before)

    def control(
        self, finished: list[Receipt], audits: IntArray, wrong: IntArray, engine: Engine
    ) -> bool:
        """Tell the settled states what happened since the last control instant; whether decisions
        made ahead no longer hold. `audits` [M] by access server, so many of them `wrong` [M];
        `engine` decides from now on."""
        same = engine is self.engine
        before = [_felt(state) for state in self.settled]
        for access in np.flatnonzero(audits).tolist():
            agrees = np.arange(audits[access]) >= wrong[access]
            self._tell(self.settled, access, Audited(wave=TRAVELLING, agrees=agrees))
        self._settle(self.settled, finished, learns=True)
        self.engine = engine
        if same and before == [_felt(state) for state in self.settled]:
            self._follow()
            return False
        return True

    def rewind(self, in_flight: list[Receipt]) -> None:
        """Forget what was decided, but for the tokens that have begun."""
        self.ahead = list(self.settled)
        self._settle(self.ahead, in_flight, learns=False)

    def _follow(self) -> None:
        pairs = zip(self.ahead, self.settled, strict=True)
        self.ahead = [replace(state, feedback=done.feedback) for state, done in pairs]


def _felt(state: EngineState) -> tuple[float, ...]:
    """The part of the feedback that decisions about arriving tokens look at."""
    feedback = state.feedback
    weights = (feedback.loss_weight, *feedback.route_weights)
    return (
        *(rounded_weight(weight) for weight in weights),
        feedback.exit_raise,
        *feedback.user_raises.values(),
    )
