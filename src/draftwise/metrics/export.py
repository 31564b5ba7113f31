"""The engine's books in Prometheus' form. Nothing is counted twice: counters are read off `EngineStats` when asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Protocol, runtime_checkable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from draftwise.engine.outputs import EngineStats
from draftwise.metrics.books import Books
from draftwise.metrics.histogram import Histogram
from draftwise.metrics.latencies import Latencies

PREFIX = "draftwise"
"""Before the colon of every name, unless another is asked for: "vllm" suits dashboards and scalers made for vLLM."""


class Observed(Protocol):
    """The engine as metrics see it."""

    def stats(self) -> EngineStats: ...
    def observe(self, observer: Any) -> None: ...


@runtime_checkable
class Several(Protocol):
    """Several engines that answer as one."""

    def books(self) -> list[Books]:
        """The books of each present engine."""
        ...


class Source(Protocol):
    """Another source of metrics, such as a planner: (name, what it is, "gauge" or "counter", labels, value)."""

    def samples(self) -> Iterable[tuple[str, str, str, Mapping[str, str], float]]: ...


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
    """Metrics with vLLM's names under ``draftwise:``, or under another prefix. Every sample has the label
    ``model_name``; those of one of several engines have the label ``replica``, too."""

    def __init__(self, engine: Observed | Several, model_name: str, prefix: str = PREFIX) -> None:
        """``prefix``: before the colon of every name."""
        self._prefix = f"{prefix}:"
        self.latencies = Latencies()
        self.http = HttpCounts()
        self._engine = engine
        self._model_name = model_name
        self._sources: tuple[Source, ...] = ()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        if not isinstance(engine, Several):
            engine.observe(self.latencies.observe)

    def exposition(self) -> bytes:
        """The text that ``/metrics`` answers."""
        return generate_latest(self._registry)

    def add(self, source: Source) -> None:
        """Tell its numbers, too. They are its own: no other name of them may be in use here."""
        self._sources = (*self._sources, source)

    def describe(self) -> list[Metric]:
        """Nothing to say before `collect`: the registry need not ask for samples when this is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metric families, from one snapshot."""
        if isinstance(self._engine, Several):
            books = self._engine.books()
        else:
            books = [Books(None, self._engine.stats(), self.latencies.histograms())]
        several = isinstance(self._engine, Several)
        yield from _Families(self._prefix, self._model_name, books, several).all(self.http)
        for source in self._sources:
            yield from _families_of(source, self._model_name, self._prefix)


class SourceMetrics:
    """The numbers of one source, by themselves."""

    def __init__(self, source: Source, model_name: str, prefix: str = PREFIX) -> None:
        """See `Metrics`."""
        self._source, self._model_name, self._prefix = source, model_name, f"{prefix}:"
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def describe(self) -> list[Metric]:
        """As that of `Metrics`."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metric families."""
        return _families_of(self._source, self._model_name, self._prefix)

    def exposition(self) -> bytes:
        """A part of the text that ``/metrics`` answers."""
        return generate_latest(self._registry)


def _families_of(source: Source, model_name: str, prefix: str) -> Iterator[Metric]:
    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
    for name, help_text, kind, labels, value in source.samples():
        if name not in families:
            made = GaugeMetricFamily if kind == "gauge" else CounterMetricFamily
            families[name] = made(prefix + name, help_text, labels=["model_name", *labels])
        families[name].add_metric([model_name, *labels.values()], value)
    yield from families.values()


class _Families:
    """The families of one snapshot. What a family has of an engine is a function of its books."""

    def __init__(self, prefix: str, model_name: str, books: Sequence[Books], several: bool) -> None:
        """``several``: samples say of which replica they are."""
        self._prefix = prefix
        self._books = books
        self._names = ["model_name", "replica"] if several else ["model_name"]
        self._labels = [[model_name, one.replica or ""] if several else [model_name] for one in books]
        self._model_name = model_name

    def all(self, http: HttpCounts) -> Iterator[Metric]:
        """Everything."""
        yield from self._requests()
        counts = CounterMetricFamily(
            self._prefix + "http_requests",
            "Answers by route and status; 499: the client went away.",
            labels=["model_name", "path", "status"],
        )
        for (path, status), count in http.items():
            counts.add_metric([self._model_name, path, str(status)], count)
        yield counts
        yield from self._speculation()
        yield from self._time()
        for name, field, help_text in _HISTOGRAMS:
            family = HistogramMetricFamily(self._prefix + name, help_text, labels=self._names)
            for labels, one in zip(self._labels, self._books, strict=True):
                histogram: Histogram = getattr(one.latencies, field)
                family.add_metric(labels, histogram.buckets(), histogram.sum)
            yield family

    def _gauge(self, name: str, help_text: str, of: Callable[[EngineStats], float]) -> Metric:
        return self._gauges(name, help_text, [], lambda stats: [((), of(stats))])

    def _gauges(self, name: str, help_text: str, labels: list[str], of: _Samples) -> Metric:
        return self._filled(
            GaugeMetricFamily(self._prefix + name, help_text, labels=[*self._names, *labels]), of
        )

    def _counter(self, name: str, help_text: str, of: Callable[[EngineStats], float]) -> Metric:
        return self._counters(name, help_text, [], lambda stats: [((), of(stats))])

    def _counters(self, name: str, help_text: str, labels: list[str], of: _Samples) -> Metric:
        return self._filled(
            CounterMetricFamily(self._prefix + name, help_text, labels=[*self._names, *labels]), of
        )

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, of: _Samples) -> Metric:
        for labels, one in zip(self._labels, self._books, strict=True):
            for extra, value in of(one.stats):
                family.add_metric([*labels, *map(str, extra)], value)
        return family

    def _requests(self) -> Iterator[Metric]:
        yield self._gauge(
            "num_requests_running", "Requests that take part in steps.", lambda s: s.num_running
        )
        yield self._gauge("num_requests_waiting", "Requests in the queue.", lambda s: s.num_waiting)
        yield self._gauge(
            "kv_cache_usage_perc",
            "Share of the K/V cache in use; 1 is all of it.",
            lambda s: s.num_used_blocks / s.num_blocks,
        )
        # What a number's labels say: vLLM's names, for gateways that choose a server by its cache and adapters.
        yield self._gauges(
            "cache_config_info",
            "Size of the K/V cache, wherever it is: blocks, and tokens of each.",
            ["block_size", "num_gpu_blocks"],
            lambda s: [((s.block_size, s.num_blocks), 1)],
        )
        yield self._gauges(
            "lora_requests_info",
            "Adapters of requests that run and that wait, separated by commas; the value is the time.",
            ["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
            lambda s: (
                []
                if s.adapters is None
                else [
                    (
                        (s.adapters.most, ",".join(s.adapters.running), ",".join(s.adapters.waiting)),
                        time.time(),
                    )
                ]
            ),
        )
        for name, field, help_text in _COUNTERS:
            yield self._counter(name, help_text, attrgetter(field))
        reasons = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        yield self._counters(
            "request_success",
            "Finished requests by reason; abort and error are among them.",
            ["finished_reason"],
            lambda s: [((reason,), count) for reason, count in {**reasons, **s.finish_reasons}.items()],
        )

    def _speculation(self) -> Iterator[Metric]:
        for name, field, help_text in _SPECULATION:
            yield self._counter(name, help_text, attrgetter(f"speculation.{field}"))
        yield self._counters(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted by position.",
            ["position"],
            lambda s: [((i,), count) for i, count in enumerate(s.speculation.num_accepted_tokens_per_pos)],
        )
        yield self._counters(
            "spec_decode_request_steps",
            "Steps of requests by the method that had drafted; none: plain decoding.",
            ["method"],
            lambda s: [((method,), n) for method, n in sorted(s.speculation.steps_by_method.items())],
        )
        yield self._counters(
            "spec_decode_drafter_failures",
            "Calls of drafters that failed, by what was called; their requests went on without speculation.",
            ["method", "hook"],
            lambda s: [(tuple(kind.rsplit(".", 1)), n) for kind, n in sorted(s.drafter_failures.items())],
        )
        yield self._gauges(
            "spec_decode_draft_length",
            "Draft tokens per request that drafts, as the controller has it now; 0: decodes plainly.",
            ["method", "rule"],
            lambda s: _largest(
                [((g.method, g.rule), g.cap if g.num_drafting else 0) for g in s.control.groups]
            ),
        )
        yield self._gauges(
            "spec_decode_estimated_gain",
            "Tokens per second that are expected now, over those of plain decoding.",
            ["method", "rule"],
            lambda s: _largest(
                [((g.method, g.rule), g.gain) for g in s.control.groups if g.gain is not None]
            ),
        )

    def _time(self) -> Iterator[Metric]:
        yield self._counter("engine_steps", "Steps of the engine.", lambda s: s.num_steps)
        yield self._counters(
            "engine_step_seconds",
            "Time of steps by what it went to: the target, the drafters' models, everything else.",
            ["part"],
            lambda s: [
                (("forward",), s.forward_time),
                (("draft_forward",), s.draft_forward_time),
                (("host",), max(s.host_time, 0.0)),
            ],
        )


_Samples = Callable[[EngineStats], Iterable[tuple[tuple[Any, ...], float]]]
"""Labels besides those that all have, and values."""
_COUNTERS = (
    ("num_preemptions", "num_preemptions", "Requests that had to give up their cache."),
    ("prefix_cache_queries", "prefix_cache_queries", "Tokens looked up in the prefix cache."),
    ("prefix_cache_hits", "prefix_cache_hits", "Tokens found there."),
    ("prompt_tokens", "num_prompt_tokens", "Prompt tokens of finished requests."),
    ("generation_tokens", "num_generation_tokens", "Tokens generated."),
)
_SPECULATION = (
    ("spec_decode_num_drafts", "num_drafts", "Proposals verified."),
    ("spec_decode_num_draft_tokens", "num_draft_tokens", "Draft tokens verified."),
    ("spec_decode_num_accepted_tokens", "num_accepted_tokens", "Draft tokens accepted."),
)
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "time_to_first_token", "Arrival to first token."),
    ("inter_token_latency_seconds", "inter_token", "Between tokens."),
    ("request_time_per_output_token_seconds", "per_output_token", "Mean of a request."),
    ("e2e_request_latency_seconds", "e2e", "Arrival to end."),
    ("request_queue_time_seconds", "queue", "Arrival to first step."),
    ("request_prefill_time_seconds", "prefill", "First step to first token."),
    ("request_decode_time_seconds", "decode", "First token to end."),
)


def _largest(values: Sequence[tuple[tuple[str, str], float]]) -> list[tuple[tuple[str, str], float]]:
    """One value per pair of labels: requests that differ in their trees alone are groups of their own."""
    found: dict[tuple[str, str], float] = {}
    for labels, value in values:
        found[labels] = max(value, found.get(labels, value))
    return sorted(found.items())
