"""What a run showed, over the tokens that finished after the warm-up, and its spread over seeds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats

from trimmoe.core.ledger import Ledger
from trimmoe.core.specs import FloatArray, IntArray
from trimmoe.simulator.settings import SimulationSettings
from trimmoe.simulator.state import State
from trimmoe.simulator.tables import RequestTable
from trimmoe.simulator.tally import UnitLog, Units
from trimmoe.simulator.world import AREA, EVENTS, IN_FLIGHT, RUNNING


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """Running sums at one instant."""

    time_s: float
    area: float
    """Units in flight, integrated over time."""
    in_flight: int
    running: int
    events: int
    server_busy_s: FloatArray
    """[M]."""
    link_busy_s: FloatArray
    """[M, M]."""
    sent: IntArray
    """Hidden vectors and token ids, [2, M, M]."""
    received: IntArray
    served: IntArray
    """Batches and units, [M, kind, 2]."""
    waited_s: FloatArray
    """[M, kind]."""

    @staticmethod
    def of(state: State, time_s: float) -> Snapshot:
        """The sums at `time_s`, which the event loop has reached."""
        # Service and serialisation are counted when they begin, so what is left of them is not
        # of this time yet.
        serving_s = np.maximum(state.serving_until_s - time_s, 0.0)
        sending_s = np.maximum(state.link_free_s - time_s, 0.0)
        return Snapshot(
            time_s=time_s,
            area=float(state.clock[AREA]),
            in_flight=int(state.numbers[IN_FLIGHT]),
            running=int(state.numbers[RUNNING]),
            events=int(state.numbers[EVENTS]),
            server_busy_s=state.busy_s - serving_s,
            link_busy_s=state.link_busy_s - sending_s,
            sent=state.sent.copy(),
            received=state.received.copy(),
            served=state.served.copy(),
            waited_s=state.waited_s.copy(),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One seed's run. Times are in virtual seconds; figures without `all_` leave out the
    warm-up."""

    token_s: FloatArray
    """Time of each decoded token, from when its user was shown the one before it, [n]."""
    first_token_s: FloatArray
    """Time to first token of each request that got it, [m]."""
    request_s: FloatArray
    """Time of each request that finished, [r]."""
    pace_s: FloatArray
    """Mean of `token_s` of each request that has any, [q]."""
    ledger: Ledger
    """What was executed, sent and spent for those tokens."""
    all_ledger: Ledger
    """The same for everything that finished since the start, prompts included."""
    before: Snapshot
    after: Snapshot
    all_units: UnitLog
    """Every unit that finished since the start."""
    output_tokens: int
    """Tokens that users got, those out of prompts included."""
    drafts: int
    """Exits of those decoded tokens, or guesses of what they predict, on which the next token set
    out."""
    wrong_drafts: int
    """Those of them that full depth did not confirm."""
    withdrawn_layers: int
    """Token-layers executed for what set out on the latter; what that sent is in the ledgers."""
    workload: FloatArray
    """W over F times the slot (20) of every whole scheduling slot after the warm-up, by server,
    [slots, M]; a slot is the time between two control instants."""

    @property
    def duration_s(self) -> float:
        return self.after.time_s - self.before.time_s

    @property
    def server_use(self) -> FloatArray:
        """Share of the time each server is at work, [M]."""
        return (self.after.server_busy_s - self.before.server_busy_s) / self.duration_s

    @property
    def link_use(self) -> FloatArray:
        """Share of the time each link sends, [M, M]."""
        return (self.after.link_busy_s - self.before.link_busy_s) / self.duration_s

    @property
    def link_bytes(self) -> IntArray:
        """Hidden vectors' bytes put on each link, prompts included, [M, M]."""
        return (self.after.sent[0] - self.before.sent[0]) * self.ledger.hidden_bytes

    @property
    def waiting_s(self) -> FloatArray:
        """Mean wait of an expert's work for its server, [M]."""
        served = (self.after.served - self.before.served)[:, 1, 1]
        waited_s = (self.after.waited_s - self.before.waited_s)[:, 1]
        return waited_s / np.maximum(served, 1)

    @property
    def mean_in_flight(self) -> float:
        """Units in flight on average."""
        return (self.after.area - self.before.area) / self.duration_s


def sample(
    settings: SimulationSettings,
    table: RequestTable,
    units: Units,
    before: Snapshot,
    after: Snapshot,
    workload: FloatArray,
) -> Sample:
    """The figures of a run that has ended."""
    log = units.log
    asked, prefills = table.asked, table.prefills[log.request]
    measured, number = log.finished_s >= settings.warm_up_s, log.number
    # The first token comes out of the last chunk of the prompt, or is the first one decoded.
    first = number == np.maximum(prefills - 1, 0)
    last = number == asked.units[log.request] - 1
    gives = log.decoded | (number == prefills - 1)
    shown_s, before_s = shown(log, units.words)
    since_s = shown_s - asked.arrival_s[log.request]
    counted = measured & log.decoded
    token_s = (shown_s - before_s)[counted]
    tokens = np.bincount(log.request[counted])
    total_s = np.bincount(log.request[counted], token_s)
    return Sample(
        token_s=token_s,
        first_token_s=since_s[measured & first],
        request_s=since_s[measured & last],
        pace_s=total_s[tokens > 0] / tokens[tokens > 0],
        ledger=units.decoded.ledger,
        all_ledger=units.everything.ledger,
        before=before,
        after=after,
        all_units=log,
        output_tokens=int((measured & gives).sum()),
        drafts=units.right_drafts + units.wrong_drafts,
        wrong_drafts=units.wrong_drafts,
        withdrawn_layers=units.withdrawn_layers,
        workload=workload,
    )


def shown(log: UnitLog, words: FloatArray) -> tuple[FloatArray, FloatArray]:
    """When the user was shown what each finished unit predicts, and the unit before it, or when
    the first of a request began, [U] each.

    A draft is shown when full depth has confirmed it, which `words` [3, n] tells by request and
    number, and everything in turn. Of drafts that were still on their way when the run ended it
    counts when they were made.
    """
    units = int(log.number.max(initial=0)) + 1
    key = log.request * units + log.number
    order = np.argsort(key)
    key, shown_s = key[order], log.finished_s[order]
    # What was confirmed has finished, so it is in the log.
    at = np.searchsorted(key, words[0] * units + words[1])
    np.maximum.at(shown_s, at, words[2])
    follows = np.r_[False, key[1:] // units == key[:-1] // units][: key.size]
    late = follows
    while late.any():
        earlier_s = np.r_[0.0, shown_s[:-1]]
        late = follows & (earlier_s > shown_s)
        shown_s[late] = earlier_s[late]
    before_s = np.where(follows, np.r_[0.0, shown_s[:-1]], log.began_s[order])
    back = np.argsort(order)
    return shown_s[back], before_s[back]


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over seeds with its two-sided 95 % t-interval; no interval from one seed alone."""

    mean: float
    low_95: float
    high_95: float


def estimate(values: list[float]) -> Estimate:
    """Mean and interval of one figure per seed; seeds without the figure (NaN) do not count."""
    known = np.array([value for value in values if np.isfinite(value)])
    if not known.size:
        return Estimate(mean=np.nan, low_95=np.nan, high_95=np.nan)
    mean = float(known.mean())
    if known.size == 1:
        return Estimate(mean=mean, low_95=np.nan, high_95=np.nan)
    half = float(stats.t.ppf(0.975, known.size - 1) * known.std(ddof=1) / np.sqrt(known.size))
    return Estimate(mean=mean, low_95=mean - half, high_95=mean + half)


def figures(one: Sample, sla_s: float) -> dict[str, float]:
    """The figures of one seed, in units named by their keys."""
    ledger, tokens = one.ledger, max(one.ledger.tokens, 1)
    return {
        "token_ms": _mean(one.token_s) * 1e3,
        "token_p50_ms": _quantile(one.token_s, 0.5) * 1e3,
        "token_p99_ms": _quantile(one.token_s, 0.99) * 1e3,
        "expected_token_ms": ledger.mean_delay_s * 1e3,
        "first_token_ms": _mean(one.first_token_s) * 1e3,
        "first_token_p99_ms": _quantile(one.first_token_s, 0.99) * 1e3,
        "tokens_per_s": one.output_tokens / one.duration_s,
        "requests_per_s": one.request_s.size / one.duration_s,
        "requests_running": float(one.after.running),
        "server_use_mean": float(one.server_use.mean()),
        "server_use_max": float(one.server_use.max()),
        "link_use_max": float(one.link_use.max()),
        "overloaded_share": _mean((one.workload > 1.0).astype(np.float64)),
        "sent_mb_per_s": float(one.link_bytes.sum()) / one.duration_s / 1e6,
        "hops_per_token": ledger.hops / tokens,
        "remote_share": ledger.remote_share,
        "drafts_per_token": one.drafts / tokens,
        "wrong_draft_share": one.wrong_drafts / max(one.drafts, 1),
        "withdrawn_layers_per_token": one.withdrawn_layers / tokens,
        "budget_per_token": ledger.budget / tokens,
        "budget_spent_per_token": ledger.loss / tokens,
        "sla_share": _mean((one.token_s <= sla_s).astype(np.float64)),
    }


def _mean(values: FloatArray) -> float:
    return float(values.mean()) if values.size else np.nan


def _quantile(values: FloatArray, level: float) -> float:
    return float(np.quantile(values, level)) if values.size else np.nan
