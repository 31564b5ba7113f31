"""Histograms, the log line, and what Prometheus reads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from draftwise.adapt.controller import ControlStats, GroupControl
from draftwise.engine.outputs import AdapterStats, EngineStats, SpeculationMetrics
from draftwise.metrics import Histogram, Latencies, Metrics, statistics_line
from draftwise.sampling.params import SamplingParams
from draftwise.sched.request import Request, RequestUpdate
from draftwise.types import Speculation


def stats(**given: Any) -> EngineStats:
    zero: dict[str, Any] = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
    own: dict[str, Any] = {"num_blocks": 10, "block_size": 16, "finish_reasons": {}, "drafter_failures": {}}
    own["adapters"] = None
    own["speculation"] = SpeculationMetrics()
    return EngineStats(**{**zero, **own, "control": ControlStats(), **given})


class Engine:
    def __init__(self, now: EngineStats) -> None:
        self.now = now

    def stats(self) -> EngineStats:
        return self.now

    def observe(self, observer: Any) -> None:
        self.observer = observer


def families(metrics: Metrics) -> dict[str, Any]:
    return {f.name: f for f in text_string_to_metric_families(metrics.exposition().decode())}


def test_histogram_buckets() -> None:
    histogram = Histogram((1.0, 2.0))
    for value, times in ((0.5, 1), (2.0, 3), (9.0, 1)):
        histogram.observe(value, times)
    assert histogram.buckets() == [("1.0", 1.0), ("2.0", 4.0), ("+Inf", 5.0)] and histogram.sum == 15.5


def request(rid: int = 1) -> Request:
    made = Request(
        rid,
        np.array([1, 2], np.int32),
        SamplingParams(),
        Speculation(),
        max_total=20,
        seed=0,
        arrival_time=10.0,
    )
    made.scheduled_time = 11.0
    return made


def step(latencies: Latencies, of: Request, new: int, now: float, finish: str | None = None) -> None:
    if new:
        of.num_tokens += new
        of.last_token_time = now
        of.first_token_time = of.first_token_time or now
    if finish is not None:
        of.finish_reason, of.finished_time = finish, now
    latencies.observe([RequestUpdate(of, new, finish is not None)])


def test_latencies_of_a_request() -> None:
    latencies, made = Latencies(), request()
    step(latencies, made, 0, 12.0)  # a chunk of the prompt
    step(latencies, made, 1, 13.0)
    step(latencies, made, 4, 15.0)  # four tokens after two seconds: half a second each
    step(latencies, made, 1, 16.0, "length")
    assert latencies.time_to_first_token.sum == 3.0
    assert (latencies.inter_token.sum, sum(latencies.inter_token.counts)) == (3.0, 5)
    assert (latencies.queue.sum, latencies.prefill.sum, latencies.decode.sum) == (1.0, 2.0, 3.0)
    assert latencies.e2e.sum == 6.0 and latencies.per_output_token.sum == 3.0 / 5
    assert latencies._last == {}


def test_cancelled_requests_leave_nothing_behind() -> None:
    latencies = Latencies()
    waiting, running = request(1), request(2)
    step(latencies, running, 1, 13.0)
    step(latencies, running, 0, 14.0, "abort")
    step(latencies, waiting, 0, 14.0, "abort")
    assert latencies._last == {} and sum(latencies.e2e.counts) == 0


SPEC = SpeculationMetrics(2, 6, 3, (2, 1, 0), {"ngram": 2, "none": 1})


def test_failures_of_drafters() -> None:
    """A drafter's name may have dots, what it was asked has none."""
    found = families(Metrics(Engine(stats(drafter_failures={"my.own.Drafter.propose": 3})), "m"))
    [sample] = found["draftwise:spec_decode_drafter_failures"].samples
    assert sample.value == 3 and sample.labels["method"] == "my.own.Drafter"
    assert sample.labels["hook"] == "propose"


def test_names_of_another_prefix() -> None:
    """Those of vLLM, say, which its dashboards and scalers read."""
    own, others = (families(Metrics(Engine(stats()), "m", *given)) for given in ((), ("vllm",)))
    assert {name.replace("draftwise:", "vllm:") for name in own} == set(others)
    assert "vllm:num_requests_waiting" in others


def test_what_gateways_read() -> None:
    adapters = AdapterStats(2, ("go", "sql"), ("rust",))
    for given, wanted in (
        (None, []),
        (adapters, [{"max_lora": "2", "running_lora_adapters": "go,sql", "waiting_lora_adapters": "rust"}]),
        (AdapterStats(2), [{"max_lora": "2", "running_lora_adapters": "", "waiting_lora_adapters": ""}]),
    ):
        found = families(Metrics(Engine(stats(adapters=given)), "m", "vllm"))
        samples = found["vllm:lora_requests_info"].samples
        assert [sample.labels for sample in samples] == [{"model_name": "m", **labels} for labels in wanted]
        assert all(sample.value > 1.7e9 for sample in samples)  # seconds
        [cache] = found["vllm:cache_config_info"].samples
        assert (
            cache.labels == {"model_name": "m", "block_size": "16", "num_gpu_blocks": "10"}
            and cache.value == 1
        )


def test_names_and_values() -> None:
    now = stats(
        speculation=SPEC,
        num_used_blocks=5,
        num_generation_tokens=7,
        finish_reasons={"stop": 2},
        num_preemptions=1,
    )
    metrics = Metrics(Engine(now), "m")
    metrics.http.count("/health", 200)
    found = families(metrics)
    names = {name.removeprefix("draftwise:") for name in found}
    assert names >= {
        "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos", "time_to_first_token_seconds", "inter_token_latency_seconds",
        "request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
        "request_prefill_time_seconds", "request_decode_time_seconds", "kv_cache_usage_perc", "num_preemptions",
        "num_requests_running", "num_requests_waiting", "prefix_cache_queries", "prefix_cache_hits", "prompt_tokens",
        "generation_tokens", "request_success",
    }  # fmt: skip
    positions = found["draftwise:spec_decode_num_accepted_tokens_per_pos"].samples
    assert {s.labels["position"]: s.value for s in positions} == {"0": 2.0, "1": 1.0, "2": 0.0}
    assert found["draftwise:kv_cache_usage_perc"].samples[0].value == 0.5
    assert found["draftwise:num_preemptions"].samples[0].name == "draftwise:num_preemptions_total"
    reasons = {s.labels["finished_reason"]: s.value for s in found["draftwise:request_success"].samples}
    assert reasons == {"stop": 2.0, "length": 0.0, "abort": 0.0, "error": 0.0}
    assert all(s.labels["model_name"] == "m" for f in found.values() for s in f.samples)


def test_log_line() -> None:
    before = stats(speculation=SpeculationMetrics(1, 3, 1, (1,)))
    now = stats(num_running=2, num_generation_tokens=100, num_used_blocks=3, speculation=SPEC)
    assert statistics_line(before, now, 10.0) == (
        "running 2, waiting 0, KV cache 30 %; generated 10 tokens/s; mean acceptance length 3.00, accepted 0/s of "
        "0/s drafted (67 %), per position 1.00 1.00 0.00"
    )
    assert statistics_line(now, now, 10.0) is not None and statistics_line(before, before, 10.0) is None


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    """Every name in its queries is in /metrics, and so is every label it sums by."""
    file = Path(__file__).parents[2] / "docs/grafana/draftwise.json"
    dashboard = json.loads(file.read_text())
    metrics = Metrics(Engine(stats(speculation=SPEC)), "m")
    metrics.http.count("/health", 200)
    samples: dict[str, set[str]] = {}
    for family in families(metrics).values():
        for sample in family.samples:
            samples.setdefault(sample.name, set()).update(sample.labels)
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(queries) >= 12
    for query in queries:
        names = re.findall(r"draftwise:\w+", query)
        assert names, query
        for name in names:
            assert name in samples, name
        for labels, name in re.findall(r"by \(([^)]*)\) \([^)]*?(draftwise:\w+)", query):
            assert {part.strip() for part in labels.split(",")} <= samples[name], query


def test_what_the_controller_decided_is_shown() -> None:
    groups = (
        GroupControl("draft_model", "greedy", 3, 2, 4, 1.5, 2.1),
        GroupControl("draft_model", "greedy", 1, 1, 6, 1.5, 3.0),  # with a tree
        GroupControl("ngram", "rejection", 2, 0, 5, None, None),
    )
    found = families(Metrics(Engine(stats(control=ControlStats("adaptive", groups))), "m"))
    lengths = {s.labels["method"]: s.value for s in found["draftwise:spec_decode_draft_length"].samples}
    assert lengths == {"draft_model": 6, "ngram": 0}
    gains = {s.labels["method"]: s.value for s in found["draftwise:spec_decode_estimated_gain"].samples}
    assert gains == {"draft_model": 1.5}
