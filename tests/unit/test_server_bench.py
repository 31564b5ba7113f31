"""What ``bench serve`` computes."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from draftwise.bench.http_client import HttpError, Target
from draftwise.bench.serve import Record, arrivals, bench_serve, distribution, parse_counters, report
from draftwise.cli.bench_serve import parse_sla
from draftwise.cli.errors import UsageError
from draftwise.errors import ConfigError


def test_percentiles_are_values_that_occurred() -> None:
    found = distribution([4.0, 1.0, 3.0, 2.0])
    assert found is not None
    assert found.mean == 2.5 and found.percentiles == {50: 2.0, 90: 4.0, 95: 4.0, 99: 4.0}
    assert distribution([]) is None


def test_arrivals() -> None:
    times = arrivals(2000, 10.0, seed=1)
    assert times[0] == 0.0 and times == sorted(times) and times == arrivals(2000, 10.0, seed=1)
    assert 180 < times[-1] < 220  # 200 s +- 4.5 standard deviations
    gaps = [b - a for a, b in pairwise(times)]
    assert 0.08 < (sum((g - 0.1) ** 2 for g in gaps) / len(gaps)) ** 0.5 < 0.12  # as long as their mean
    assert arrivals(3, float("inf"), 0) == [0.0, 0.0, 0.0]


def test_report_counts_goodput_and_failures() -> None:
    fast = Record(ttft=0.1, e2e=1.1, tokens=11, prompt_tokens=5, gaps=[0.1] * 10)
    slow = Record(ttft=0.5, e2e=1.1, tokens=11, prompt_tokens=5, gaps=[0.3, 0.3])
    failed = Record(error="HTTP 429")
    found = report([fast, slow, failed], 2.0, {"ttft": 0.2, "itl": 0.2}, None)
    assert (found.num_requests, found.num_failed, found.errors) == (3, 1, {"HTTP 429": 1})
    assert found.request_rate == 1.0 and found.token_rate == 11.0 and found.prompt_tokens == 10
    assert found.goodput == 0.5 and found.attainment == pytest.approx(1 / 3)
    assert fast.tpot == pytest.approx(0.1) and found.as_dict()["ttft"]["p99"] == 0.5


def test_counters_of_this_and_of_other_servers() -> None:
    text = (
        "# HELP x y\n"
        'draftwise:spec_decode_num_drafts_total{model_name="m"} 4.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 2.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="1"} 3.0\n'
        'vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9\n'
    )
    assert parse_counters(text) == {"drafts": 4.0, "per_pos/1": 5.0}


def test_targets_and_limits() -> None:
    assert Target.parse("http://a:1/v1/") == Target("a", 1, "", False)
    assert Target.parse("https://a/x/v1", "k") == Target("a", 443, "/x", True, "k")
    for url in ("ftp://a", "http://", "http://a:x"):
        with pytest.raises(ConfigError, match="url"):
            Target.parse(url)
    assert parse_sla(["ttft:200", "e2e:1500"]) == {"ttft": 0.2, "e2e": 1.5}
    for wrong in ("ttft", "ttft:x", "ttft:-1", "foo:1"):
        with pytest.raises(UsageError, match="goodput"):
            parse_sla([wrong])


def test_no_server_is_said_so() -> None:
    with pytest.raises(HttpError, match="no answer"):
        asyncio.run(bench_serve(Target("127.0.0.1", 9, "", False), [{}], concurrency=1))
