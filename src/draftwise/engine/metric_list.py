"""`LLM.get_metrics`: the engine's totals as objects, in the shape that vLLM's programs read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from draftwise.engine.outputs import EngineStats


@dataclass(frozen=True, slots=True)
class Metric:
    """``name`` with its prefix, such as "vllm:num_requests_running", and ``labels``."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A number that only grows."""

    value: int = 0


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A number that goes up and down."""

    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """A counter per position."""

    values: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """A class for programs that test the kind of a metric. `LLM.get_metrics` returns no histograms: times are in the
    server's ``/metrics`` and in every output's ``metrics``."""

    count: int = 0
    sum: float = 0.0
    buckets: Mapping[str, int] = field(default_factory=dict)


def metric_list(stats: EngineStats, labels: Mapping[str, str], prefix: str) -> list[Metric]:
    """The engine's counters now. ``prefix``: written before every name, "vllm:" or "draftwise:"."""
    s = stats.speculation
    counters = {
        "spec_decode_num_drafts": s.num_drafts,
        "spec_decode_num_draft_tokens": s.num_draft_tokens,
        "spec_decode_num_accepted_tokens": s.num_accepted_tokens,
        "num_preemptions": stats.num_preemptions,
        "prefix_cache_queries": stats.prefix_cache_queries,
        "prefix_cache_hits": stats.prefix_cache_hits,
        "prompt_tokens": stats.num_prompt_tokens,
        "generation_tokens": stats.num_generation_tokens,
    }
    gauges = {
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
        "kv_cache_usage_perc": stats.num_used_blocks / max(stats.num_blocks, 1),
    }
    found: list[Metric] = [Gauge(prefix + name, labels, float(value)) for name, value in gauges.items()]
    found += [Counter(prefix + name, labels, value) for name, value in counters.items()]
    positions = tuple(s.num_accepted_tokens_per_pos)
    found.append(Vector(f"{prefix}spec_decode_num_accepted_tokens_per_pos", labels, positions))
    found += [
        Counter(f"{prefix}request_success", {**labels, "finished_reason": reason}, count)
        for reason, count in stats.finish_reasons.items()
    ]
    return found
