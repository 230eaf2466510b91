"""What operators watch: vLLM's metrics under our name, and what only TrimMoE has.

Each app has a registry of its own. What a back end knows, such as links and queues, is asked of
it at scrape time; what requests tell, such as latencies, is counted as they pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from trimmoe.api.recent import Recent
from trimmoe.core.ledger import Kind, Ledger
from trimmoe.runtime.counters import ExpertUse
from trimmoe.runtime.service import InferenceService, ServiceStats

_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
_NEXT_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5)
_WHOLE_S = (0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1200)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)


@dataclass(kw_only=True, slots=True)
class Measured:
    """One request's times, by a monotonic clock."""

    prompt_tokens: int
    started_s: float
    first_token_s: float = 0.0
    last_token_s: float | None = None
    tokens: int = 0
    ended: bool = False


class ApiMetrics:
    """The metrics of one app over one service."""

    def __init__(self, service: InferenceService) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._model = service.model.id
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens read.")
        self._generated = self._counter("generation_tokens", "Tokens generated.")
        self._success = self._counter(
            "request_success", "Requests ended, by how.", "finished_reason"
        )
        self._layers = self._counter("token_layers", "Layers of tokens, by what became.", "kind")
        self._spent = self._counter("budget_spent", "Proxy flips charged to quality budgets.")
        self._credited = self._counter("budget_credited", "Proxy flips that budgets allowed.")
        self._first = self._histogram(
            "time_to_first_token_seconds", "From request to first token.", _FIRST_TOKEN_S
        )
        self._next = self._histogram(
            "inter_token_latency_seconds", "From token to token.", _NEXT_TOKEN_S
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "From request to last token.", _WHOLE_S
        )
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._answer = self._histogram("request_generation_tokens", "Of an answer.", _TOKENS)
        self._registry.register(_ServiceCollector(service))
        self.recent = Recent()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        names = ("model_name", *labels)
        return Counter(f"trimmoe_{name}", text, names, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(
            f"trimmoe_{name}", text, ("model_name",), buckets=buckets, registry=self._registry
        )
        return family.labels(self._model)

    def token(self, measured: Measured, now_s: float, ledger: Ledger | None) -> None:
        """Count one generated token."""
        if measured.last_token_s is None:
            self._first.observe(now_s - measured.started_s)
            self.recent.first(now_s, now_s - measured.started_s)
            measured.first_token_s = now_s
            self._prompt_tokens.labels(self._model).inc(measured.prompt_tokens)
        else:
            self._next.observe(now_s - measured.last_token_s)
        self.recent.token(now_s)
        measured.last_token_s = now_s
        measured.tokens += 1
        self._generated.labels(self._model).inc()
        if ledger is not None:
            self._spent.labels(self._model).inc(ledger.loss)
            self._credited.labels(self._model).inc(ledger.budget)
            for kind, count in zip(Kind, ledger.kinds.sum(0).tolist(), strict=True):
                self._layers.labels(self._model, kind.name.lower()).inc(count)

    def end(self, measured: Measured, now_s: float, reason: str) -> None:
        """Count the end of a request; only the first call does."""
        if measured.ended:
            return
        measured.ended = True
        self._success.labels(self._model, reason).inc()
        self._whole.observe(now_s - measured.started_s)
        self._prompt.observe(measured.prompt_tokens)
        self._answer.observe(measured.tokens)
        if measured.tokens > 1 and measured.last_token_s is not None:
            taken_s = measured.last_token_s - measured.first_token_s
            self.recent.ended(now_s, taken_s / (measured.tokens - 1))

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)


class _ServiceCollector:
    """Asks the service when Prometheus asks us."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        stats = self._service.stats()
        model = self._service.model.id
        for name, text, value in (
            ("num_requests_running", "Requests being answered.", stats.running),
            ("num_requests_waiting", "Requests waiting for room.", stats.waiting),
            ("kv_cache_usage_perc", "Share of the KV cache taken, 0..1.", stats.kv_cache_usage),
            ("servers_left_out", "Servers not asked any more: wrong results.", stats.left_out),
        ):
            yield _family(GaugeMetricFamily, name, text, ("model_name",), [((model,), value)])
        for name, text, value in (
            ("exits_audited", "Due exits run on to be checked.", stats.audits),
            ("exits_false", "Audited exits that would have changed the token.", stats.false_exits),
            ("guesses", "Tokens that set out on a guess and were checked.", stats.guesses),
            ("guesses_right", "Of these, what full depth confirmed.", stats.right_guesses),
            ("prefix_cache_queries", "Prompt tokens looked for.", stats.prefix_queries),
            ("prefix_cache_hits", "Of these, tokens not read again.", stats.prefix_hits),
            ("results_verified", "Experts' results computed twice.", stats.verified),
            ("results_wrong", "Of these, results that differed.", stats.wrong_results),
        ):
            yield _family(CounterMetricFamily, name, text, ("model_name",), [((model,), value)])
        yield from _links(stats)
        yield _experts(stats)


def _links(stats: ServiceStats) -> Iterable[Metric]:
    ends = ("source", "destination")
    sent = [((link.source, link.destination), link.size_bytes) for link in stats.links]
    yield _family(CounterMetricFamily, "link_bytes", "Hidden vectors sent.", ends, sent)
    trips = [
        ((link.source, link.destination), link.round_trip_s)
        for link in stats.links
        if link.round_trip_s is not None
    ]
    yield _family(GaugeMetricFamily, "link_round_trip_seconds", "There and back.", ends, trips)


def _experts(stats: ServiceStats) -> Metric:
    """Only what has occurred: layers times experts times uses would be many empty series."""
    counts = stats.expert_executions
    values = [
        ((str(layer), str(expert), ExpertUse(use).name.lower()), counts[layer, expert, use])
        for layer, expert, use in np.argwhere(counts).tolist()
    ]
    labels = ("layer", "expert", "kind")
    return _family(CounterMetricFamily, "expert_executions", "Activated experts.", labels, values)


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    labels: tuple[str, ...],
    values: Iterable[tuple[tuple[str, ...], float]],
) -> Metric:
    family = kind(f"trimmoe_{name}", text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family
