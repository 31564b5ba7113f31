"""What ``bench serve`` computes."""

from __future__ import annotations

import asyncio
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest

from draftwise.bench.http_client import HttpError, Target
from draftwise.bench.plot_serve import LoadPoint, draw_serve, serve_svg
from draftwise.bench.serve import Record, arrivals, bench_serve, distribution, parse_counters, report
from draftwise.charts import check_svg, ticks
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


def test_ticks_are_round_and_reach_the_top() -> None:
    assert ticks(7.3) == [0, 2, 4, 6, 8] and ticks(5) == [0, 1, 2, 3, 4, 5] and ticks(0) == [0, 1]
    for most in (0.0003, 0.9, 1.0, 11.0, 49.0, 51.0, 12345.0):
        found = ticks(most)
        assert len(found) <= 6 and found[-2] < most <= found[-1] * (1 + 1e-9)


def _load(rate: float, ttft: float, sla: dict[str, float]) -> LoadPoint:
    records = [Record(ttft=ttft * i, e2e=1.0 + ttft * i, tokens=11, gaps=[0.1] * 10) for i in (1, 2, 3)]
    return LoadPoint(rate, report(records, 3 / min(rate, 8), sla, None))


def test_the_plot_shows_what_was_measured(tmp_path: Path) -> None:
    points = [
        _load(1, 0.1, {"ttft": 0.25}),
        _load(4, 0.2, {"ttft": 0.25}),
        _load(float("inf"), 0.4, {"ttft": 0.25}),
    ]
    path = tmp_path / "a.svg"
    draw_serve(points, path, "requests per second sent", ["model <m> at http://x", "64 requests"])
    root = ET.fromstring(path.read_text())
    space = "{http://www.w3.org/2000/svg}"
    titles = [t.text for t in root.iter(f"{space}title")]
    assert len(titles) == 3 * 3 * 3 + 2 * 3  # three times with three percentiles, two rates; three loads
    assert "p50: 200 at 1" in titles and "p99: 600 at 4" in titles, "milliseconds over load"
    assert "within SLA: 0.6667 at 1" in titles and "within SLA: 0 at 7" in titles, "inf: one step beyond 4"
    words = [t.text for t in root.iter(f"{space}text")]
    assert "all at once" in words and words.count("requests per second sent") == 4
    assert words[:2] == ["model <m> at http://x", "64 requests"]
    dashed = [line for line in root.iter(f"{space}line") if "stroke-dasharray" in line.attrib]
    assert "SLA 250 ms" in words and len(dashed) == 1, "of the time that the SLA limits"
    assert float(dashed[0].attrib["y1"]) == float(dashed[0].attrib["y2"])
    places = [float(c.attrib["cy"]) for c in root.iter(f"{space}circle")]
    assert all(0 <= y <= float(root.attrib["height"]) for y in places)


def test_a_plot_of_what_failed_is_still_a_plot(tmp_path: Path) -> None:
    failed = LoadPoint(2.0, report([Record(error="HTTP 503")], 1.0, {}, None))
    assert "<circle" in serve_svg([failed], "clients") and "p50" not in serve_svg([failed], "clients")
    for wrong in (tmp_path / "a.png", tmp_path / "no" / "a.svg"):
        with pytest.raises(ConfigError, match="--plot"):
            check_svg(wrong)
