"""The engine's books in Prometheus' form. Nothing is counted twice: counters are read off `EngineStats` when asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from draftwise.engine.outputs import EngineStats
from draftwise.metrics.histogram import Histogram
from draftwise.metrics.latencies import Latencies

PREFIX = "draftwise:"


class Observed(Protocol):
    """What metrics need of an engine."""

    def stats(self) -> EngineStats: ...
    def observe(self, observer: Any) -> None: ...


class HttpCounts:
    """Answers by route and status."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, int], int] = {}

    def count(self, path: str, status: int) -> None:
        with self._lock:
            self._counts[path, status] = self._counts.get((path, status), 0) + 1

    def items(self) -> list[tuple[tuple[str, int], int]]:
        with self._lock:
            return sorted(self._counts.items())


class Metrics:
    """Metrics of one engine, with vLLM's names under ``draftwise:``. Every sample has the label ``model_name``."""

    def __init__(self, engine: Observed, model_name: str) -> None:
        self.latencies = Latencies()
        self.http = HttpCounts()
        self._engine = engine
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._registry.register(self)
        engine.observe(self.latencies.observe)

    def exposition(self) -> bytes:
        """The text that ``/metrics`` answers."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Nothing to say before `collect`: the registry need not ask for samples when this is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metric families, from one snapshot."""
        stats = self._engine.stats()
        yield from self._requests(stats)
        yield from self._speculation(stats)
        yield from self._time(stats)
        for name, help_text, histogram in self._histograms():
            family = HistogramMetricFamily(PREFIX + name, help_text, labels=["model_name"])
            family.add_metric([self._model_name], histogram.buckets(), histogram.sum)
            yield family

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, help_text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _gauges(self, name: str, help_text: str, labels: list[str], values: Any) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, help_text, labels=["model_name", *labels])
        for extra, value in values:
            family.add_metric([self._model_name, *map(str, extra)], value)
        return family

    def _counter(self, name: str, help_text: str, value: float) -> Metric:
        return self._counters(name, help_text, [], [((), value)])

    def _counters(self, name: str, help_text: str, labels: list[str], values: Any) -> Metric:
        family = CounterMetricFamily(PREFIX + name, help_text, labels=["model_name", *labels])
        for extra, value in values:
            family.add_metric([self._model_name, *map(str, extra)], value)
        return family

    def _requests(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._gauge("num_requests_running", "Requests that take part in steps.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Requests in the queue.", stats.num_waiting)
        used = stats.num_used_blocks / stats.num_blocks
        yield self._gauge("kv_cache_usage_perc", "Share of the K/V cache in use; 1 is all of it.", used)
        yield self._counter(
            "num_preemptions", "Requests that had to give up their cache.", stats.num_preemptions
        )
        yield self._counter(
            "prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.prefix_cache_queries
        )
        yield self._counter("prefix_cache_hits", "Tokens found there.", stats.prefix_cache_hits)
        yield self._counter("prompt_tokens", "Prompt tokens of finished requests.", stats.num_prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", stats.num_generation_tokens)
        reasons = {"stop": 0, "length": 0, "abort": 0, "error": 0, **stats.finish_reasons}
        yield self._counters(
            "request_success",
            "Finished requests by reason; abort and error are among them.",
            ["finished_reason"],
            [((reason,), count) for reason, count in reasons.items()],
        )
        yield self._counters(
            "http_requests",
            "Answers by route and status; 499: the client went away.",
            ["path", "status"],
            self.http.items(),
        )

    def _speculation(self, stats: EngineStats) -> Iterator[Metric]:
        spec = stats.speculation
        yield self._counter("spec_decode_num_drafts", "Proposals verified.", spec.num_drafts)
        yield self._counter("spec_decode_num_draft_tokens", "Draft tokens verified.", spec.num_draft_tokens)
        yield self._counter(
            "spec_decode_num_accepted_tokens", "Draft tokens accepted.", spec.num_accepted_tokens
        )
        yield self._counters(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted by position.",
            ["position"],
            [((i,), count) for i, count in enumerate(spec.num_accepted_tokens_per_pos)],
        )
        yield self._counters(
            "spec_decode_request_steps",
            "Steps of requests by the method that had drafted; none: plain decoding.",
            ["method"],
            [((method,), count) for method, count in sorted(spec.steps_by_method.items())],
        )
        yield self._counters(
            "spec_decode_drafter_failures",
            "Calls of drafters that failed, by what was called; their requests went on without speculation.",
            ["method", "hook"],
            [(tuple(kind.rsplit(".", 1)), count) for kind, count in sorted(stats.drafter_failures.items())],
        )
        groups = stats.control.groups
        yield self._gauges(
            "spec_decode_draft_length",
            "Draft tokens per request that drafts, as the controller has it now; 0: decodes plainly.",
            ["method", "rule"],
            _largest([((g.method, g.rule), g.cap if g.num_drafting else 0) for g in groups]),
        )
        yield self._gauges(
            "spec_decode_estimated_gain",
            "Tokens per second that are expected now, over those of plain decoding.",
            ["method", "rule"],
            _largest([((g.method, g.rule), g.gain) for g in groups if g.gain is not None]),
        )

    def _time(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._counter("engine_steps", "Steps of the engine.", stats.num_steps)
        parts = {
            "forward": stats.forward_time,
            "draft_forward": stats.draft_forward_time,
            "host": max(stats.host_time, 0.0),
        }
        yield self._counters(
            "engine_step_seconds",
            "Time of steps by what it went to: the target, the drafters' models, everything else.",
            ["part"],
            [((part,), seconds) for part, seconds in parts.items()],
        )

    def _histograms(self) -> Iterator[tuple[str, str, Histogram]]:
        lat = self.latencies
        yield "time_to_first_token_seconds", "Arrival to first token.", lat.time_to_first_token
        yield "inter_token_latency_seconds", "Between tokens.", lat.inter_token
        yield "request_time_per_output_token_seconds", "Mean of a request.", lat.per_output_token
        yield "e2e_request_latency_seconds", "Arrival to end.", lat.e2e
        yield "request_queue_time_seconds", "Arrival to first step.", lat.queue
        yield "request_prefill_time_seconds", "First step to first token.", lat.prefill
        yield "request_decode_time_seconds", "First token to end.", lat.decode


def _largest(values: Sequence[tuple[tuple[str, str], float]]) -> list[tuple[tuple[str, str], float]]:
    """One value per pair of labels: requests that differ in their trees alone are groups of their own."""
    found: dict[tuple[str, str], float] = {}
    for labels, value in values:
        found[labels] = max(value, found.get(labels, value))
    return sorted(found.items())
