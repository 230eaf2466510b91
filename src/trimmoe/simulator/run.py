"""Driver B: the engine on a virtual clock, with queues at servers and links.

A run alternates between deciding tokens ahead (`ahead.Ahead`, the engine's own steps) and letting
the compiled event loop find out when what was decided happens.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain

import numpy as np

from trimmoe.core.errors import UserError
from trimmoe.core.events import Receipt
from trimmoe.core.exit_states import ExitState
from trimmoe.core.specs import BoolArray, ClusterSpec, FloatArray, IntArray
from trimmoe.core.trace import Trace
from trimmoe.cost.model import Accounting
from trimmoe.engine.guesses import DraftsAlong
from trimmoe.engine.step import Engine
from trimmoe.policy.base import Policy
from trimmoe.policy.build import Deployment, make_policy
from trimmoe.simulator import loop
from trimmoe.simulator.ahead import Ahead
from trimmoe.simulator.arrivals import Requests, Source
from trimmoe.simulator.expected import Expected
from trimmoe.simulator.feed import TraceFeed, require_guesses
from trimmoe.simulator.heap import push
from trimmoe.simulator.measure import Sample, Snapshot, sample
from trimmoe.simulator.outages import Outages
from trimmoe.simulator.settings import Load, Prefill, SimulationSettings
from trimmoe.simulator.state import State, make_state, with_room
from trimmoe.simulator.supply import AHEAD, AHEAD_OF_CHANGE, Supply
from trimmoe.simulator.tables import RequestTable, RowPool
from trimmoe.simulator.tally import AUDITS, DELAY_S, LOSS, UnitLog, Units
from trimmoe.simulator.waiting import Waiting
from trimmoe.simulator.workload import Workload, relieved
from trimmoe.simulator.world import (
    CONFIRMED,
    IN_FLIGHT,
    LOG_NUMBER,
    LOG_REQUEST,
    LOG_ROW,
    LOG_WORD,
    LOGGED,
    NEXT_REQUEST,
    NONE,
    REQUEST,
    TRAILING,
    make_world,
)

Advance = Callable[[float], None]
"""Told how many virtual seconds have passed."""
PolicyOf = Callable[[Deployment], Policy]


def simulate(
    engine: Engine,
    deployment: Deployment,
    trace: Trace,
    settings: SimulationSettings,
    *,
    policy_of: PolicyOf | None = None,
    requests: Requests | None = None,
    advance: Advance = lambda _: None,
) -> list[Sample]:
    """One sample per seed; the same arguments always give the same samples.

    `requests` are played instead of drawn ones, in the closed loop each as soon as there is room.
    `policy_of` makes the policy of a deployment anew where waiting times are fed back; by default
    the one of the engine's settings. Raises `UserError` if prompts are to be simulated under
    `migrate` accounting, where a chunk has no one place, or if servers are to guess and the trace
    does not say what.
    """
    require_guesses(engine.settings, engine.cost.server_count, trace)
    load = settings.load
    assert requests is None or requests.count
    migrates = engine.cost.accounting is Accounting.MIGRATE
    if migrates and load.prefill is not Prefill.EXCLUDED:
        raise UserError("`migrate` accounting has no prompts; exclude the prefill.")

    def rebuilt(waiting_s: FloatArray, full: BoolArray) -> Engine:
        cost = engine.cost.with_waiting(waiting_s)
        plan = replace(deployment.plan, hosts=relieved(deployment.plan.hosts, full))
        waited_for = replace(deployment, cost=cost, plan=plan)
        if policy_of is not None:
            return replace(engine, policy=policy_of(waited_for), cost=cost)
        policy = make_policy(waited_for, engine.profile, engine.settings)
        return replace(engine, policy=policy, cost=cost)

    cluster = deployment.plan.cluster
    with _uncollected():
        return [
            _Run(engine, cluster, trace, settings, seed, rebuilt, requests).to_the_end(advance)
            for seed in settings.seeds
        ]


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without looking for cycles among the millions of small objects of a run, which has none."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


class _Run:
    """One seed."""

    def __init__(
        self,
        engine: Engine,
        cluster: ClusterSpec,
        trace: Trace,
        settings: SimulationSettings,
        seed: int,
        rebuilt: Callable[[FloatArray, BoolArray], Engine],
        given: Requests | None,
    ) -> None:
        load, cost = settings.load, engine.cost
        self.settings, self.rebuilt = settings, rebuilt
        self.closed = load.concurrency is not None
        feed = TraceFeed(trace=trace)
        along = _along(engine, feed, cluster, load)
        self.world = make_world(
            cost,
            cluster,
            engine.routes,
            batch_times=settings.batch_times_on(cluster),
            max_batch=settings.max_batch,
            link_queues=settings.link_queues,
            closed=self.closed,
            endless=given is None,
            frozen=engine.settings.readings.exit_state is ExitState.FROZEN,
            whole=engine.settings.readings.exit_state is ExitState.WHOLE,
            drafts=engine.settings.drafts,
            guesses=engine.settings.guesses,
            chunks=engine.settings.guess_chunks,
            segments=engine.settled is not None,
            slots=trace.experts.shape[2],
            hosts=engine.hosts if engine.settled is not None else None,
            along=along.most,
            named=cluster.access_share @ along.named,
            first_right=feed.first_right,
        )
        self.decider = Ahead(
            along=along,
            engine=engine,
            feed=feed,
            seed=seed,
            budget=settings.budget,
            confidence=settings.confidence,
            streams=load.concurrency,
        )
        self.source = Source(
            load,
            cluster.access_share,
            sequences=trace.sequence_count,
            length=trace.length,
            seed=seed,
        )
        self.table = RequestTable.of(given or self._drawn(), load.prefill_chunk)
        self.pool = RowPool.of(
            cost.layer_count,
            trace.experts.shape[2],
            cost.server_count,
            max(engine.settings.guesses, 1),
        )
        self.state = make_state(cost.server_count, cost.layer_count, cost.form_s.shape[2])
        self.supply = Supply(
            decider=self.decider,
            table=self.table,
            pool=self.pool,
            trace_length=trace.length,
            closed=self.closed,
            ahead=AHEAD_OF_CHANGE if settings.waiting_feedback else AHEAD,
        )
        self.workload = Workload(slot_s=settings.control_s, expert_s=cost.form_s)
        self.full = np.zeros(cost.server_count, dtype=bool)
        """Servers that are not to be given more work."""
        self.engines = {self.full.tobytes(): engine}
        """Of every set of full servers there has been, where waiting times do not count."""
        self.outages = Outages(settings, servers=cost.server_count, seed=seed)
        self.waiting = Waiting.none(cost.server_count, settings.waiting_memory)
        self.finished: list[tuple[int, int]] = []
        """Rows and requests of decoded tokens since the last control instant."""
        self.trailing = np.zeros(0, dtype=np.int64)
        """Rows of tokens that are with their users and still leave states in the layers left, and
        of what follows wrong drafts or guesses and has not been withdrawn everywhere."""
        self.expected = Expected(
            # They are of streams that have their servers to themselves.
            leads=engine.guess_rules.leads(engine.guess_rules.least_among(1)),
        )
        self.units = Units.empty(cost.layer_count, cost.server_count, cost.hidden_bytes)
        self.until_s = 0.0
        self._start()

    def _drawn(self) -> Requests:
        """Those to begin with."""
        if self.closed:
            return self.source.draw(4 * (self.settings.load.concurrency or 0) + 256)
        return self.source.until(self.settings.end_s)

    def _start(self) -> None:
        count = min(self.settings.load.concurrency or 1, self.table.requests.count)
        self.state = with_room(self.state, count)
        for request in range(count):
            at_s = 0.0 if self.closed else float(self.table.asked.arrival_s[0])
            push(self.state, at_s, 1, REQUEST, request)
        self.state.numbers[NEXT_REQUEST] = count

    def to_the_end(self, advance: Advance) -> Sample:
        """Run and measure."""
        settings, before = self.settings, None
        marks = np.arange(1, int(settings.end_s / settings.control_s) + 1) * settings.control_s
        marks = np.unique(np.concatenate([marks, [settings.warm_up_s, settings.end_s]]))
        if settings.warm_up_s == 0:
            before = Snapshot.of(self.state, 0.0)
        for mark in marks[marks > 0].tolist():
            advance(mark - self.until_s)
            self._run_until(mark)
            if mark == settings.warm_up_s:
                before = Snapshot.of(self.state, mark)
        assert before is not None
        after = Snapshot.of(self.state, settings.end_s)
        # A multiple of the slot is one, however it was rounded.
        slots = np.round(np.array([settings.warm_up_s, settings.end_s]) / settings.control_s, 9)
        workload = self._assigned().use(int(np.ceil(slots[0])), int(slots[1]))
        return sample(settings, self.table, self.units, before, after, workload)

    def _assigned(self) -> Workload:
        """All work that has been assigned so far."""
        flying = np.array(self.table.flying(self.pool.rows), dtype=np.int64)
        return self.workload.with_flying(self.pool.rows, flying)

    def _run_until(self, end_s: float) -> None:
        self.until_s = end_s
        while True:
            stopped = loop.run_until(
                self.world, self.pool.rows, self.table.asked, self.state, end_s
            )
            if stopped == loop.TIME_UP:
                break
            if stopped == loop.STARVED:
                self.supply.replenish(self.state, end_s)
            elif stopped == loop.NEEDS_ROOM:
                self.state = with_room(self.state, self.state.entry_unit.size)
            elif stopped == loop.NEEDS_REQUESTS:
                self.table.extend(self.source.draw(self.table.requests.count))
            else:
                self._drain()
        self._drain()
        self._control()

    def _drain(self) -> None:
        """Read the log of finished units."""
        state, pool = self.state, self.pool
        logged = int(state.numbers[LOGGED])
        log, times = state.log[:logged].copy(), state.log_time[:logged].copy()
        state.numbers[LOGGED] = 0
        words = log[:, LOG_WORD] == CONFIRMED
        if words.any():
            of = log[words]
            self.units.confirm(of[:, LOG_REQUEST], of[:, LOG_NUMBER], times[words, 1])
            log, times = log[~words], times[~words]
            logged = log.shape[0]
        units = [pool.unit(row) for row in log[:, LOG_ROW].tolist()]
        unit = np.repeat(np.arange(logged), [len(rows) for rows in units])
        rows = np.fromiter(chain.from_iterable(units), dtype=np.int64, count=unit.size)
        decoded = np.array([pool.receipts[one[0]] is not None for one in units], dtype=bool)
        measured = decoded & (times[:, 1] >= self.settings.warm_up_s)
        if self.world.guesses:
            of, row = log[decoded, LOG_REQUEST], log[decoded, LOG_ROW]
            access = self.table.asked.access[of]
            self.expected.put_right(pool.books, row, pool.rows.guess[row], of, access)
        self.units.count(pool.books, rows, measured[unit])
        self.workload.count(pool.rows, rows, times[unit, 0])
        if self.world.drafts:
            shown = rows[measured[unit]]
            self.units.count_drafts(pool.books, shown, pool.rows.draft[shown] != NONE)
        if self.world.guesses:
            followed = rows[measured[unit] & pool.rows.followed[rows]]
            self.units.count_guesses(pool.rows.guess[followed])
        sums = np.zeros((logged, 2))
        np.add.at(sums, unit, pool.books.numbers[rows][:, [DELAY_S, LOSS]])
        for at, (request, row, *_) in enumerate(log.tolist()):
            if decoded[at]:
                self.finished.append((row, request))
            else:
                pool.free(row)
        ended, asked = log[:, LOG_REQUEST], self.table.asked
        self.table.closing.update(ended[asked.done[ended] == asked.units[ended]].tolist())
        self.units.keep(
            UnitLog(
                request=log[:, LOG_REQUEST],
                number=log[:, LOG_NUMBER],
                began_s=times[:, 0],
                finished_s=times[:, 1],
                decoded=decoded,
                expected_s=sums[:, 0],
                loss=sums[:, 1],
            )
        )
        self.expected.forget(self.table.closing)
        if 2 * (state.numbers[IN_FLIGHT] + state.numbers[TRAILING] + 2) > state.log.shape[0]:
            self.state = _with_log(state, 2 * state.log.shape[0])

    def _control(self) -> None:
        """What was learnt reaches the decisions; outages begin."""
        self.outages.befall(self.state, self.until_s)
        receipts = self._receipts([row for row, _ in self.finished])
        finished = np.array(self.finished, dtype=np.int64).reshape(-1, 2)
        audited = self.pool.books.numbers[finished[:, 0], AUDITS]
        access = self.table.asked.access[finished[:, 1]]
        servers, disagrees = self.world.delay_s.shape[0], self.pool.books.disagrees[finished[:, 0]]
        audits = np.bincount(access, audited, servers).astype(np.int64)
        wrong = np.bincount(access[disagrees], minlength=servers)
        stale = self.decider.control(receipts, audits, wrong, self._engine())
        self._clear(finished[:, 0])
        for request in self.table.closing:
            self.decider.close(request)
        self.table.closing.clear()
        if stale:
            self.table.drop_ahead(self.pool)
            self.decider.rewind(self._receipts(self.table.flying(self.pool.rows)))

    def _engine(self) -> Engine:
        """What decides from now on."""
        engine, slots = self.decider.engine, self.until_s / self.settings.control_s
        if engine.settings.readings.workload_limit and np.isclose(slots, round(slots)):
            self.full = self._assigned().full(self.until_s)
        if self.settings.waiting_feedback:
            return self.rebuilt(self.waiting.measured(self.state), self.full)
        key = self.full.tobytes()
        if key not in self.engines:
            self.engines[key] = self.rebuilt(engine.cost.waiting_s, self.full)
        return self.engines[key]

    def _clear(self, finished: IntArray) -> None:
        """Give back the rows of what is through, of `finished` tokens [n] and of trails."""
        pool = self.pool
        done = np.concatenate([self.trailing, finished, pool.drafts(finished)])
        under_way = pool.rows.trailing[done]
        self.finished, self.trailing = [], done[under_way]
        through = done[~under_way]
        if self.world.drafts or self.world.guesses:
            withdrawn = through[np.isfinite(pool.rows.over_s[through])]
            measured = pool.rows.over_s[withdrawn] >= self.settings.warm_up_s
            self.units.withdraw(self.decider.engine.cost, pool.rows, withdrawn, measured)
        for row in through.tolist():
            pool.free(row)

    def _receipts(self, rows: list[int]) -> list[Receipt]:
        """Those of decoded tokens; prompts have none."""
        found = (self.pool.receipts[row] for row in rows)
        return [receipt for receipt in found if receipt is not None]


def _along(engine: Engine, feed: TraceFeed, cluster: ClusterSpec, load: Load) -> DraftsAlong:
    """Of as many streams as a load has under way."""
    if not engine.settings.guesses:
        return DraftsAlong.none(cluster.server_count)
    chances = feed.chances(engine.settings, cluster.server_count)
    streams, read = load.concurrency or 1, 0.0
    here = np.ceil(streams * cluster.access_share).astype(np.int64)
    if load.prefill is not Prefill.EXCLUDED:
        read = load.prompt_tokens / load.output_tokens
    chunk = min(load.prompt_tokens, load.prefill_chunk)
    return engine.guess_rules.drafts_along(
        streams, here, chances, feed.first_right, read=read, chunk=chunk
    )


def _with_log(state: State, size: int) -> State:
    log = np.zeros((size, state.log.shape[1]), dtype=np.int64)
    return state._replace(log=log, log_time=np.zeros((size, 2)))
