"""What the benchmarks compute, on an engine that does as it is told; and the statistics commands print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from draftwise.bench.accept import accept
from draftwise.bench.latency import latency
from draftwise.bench.measure import Series, measure, rotated, speculation_of
from draftwise.bench.plot import draw_accept
from draftwise.bench.throughput import throughput
from draftwise.bench.workloads import WORKLOADS, Workload, make_workload
from draftwise.cli.report import output_as_dict, statistics_line
from draftwise.cli.tables import table
from draftwise.engine.outputs import (
    CompletionOutput,
    EngineStats,
    RequestMetrics,
    RequestOutput,
    SpeculationMetrics,
)
from draftwise.errors import ConfigError
from draftwise.sampling.params import SamplingParams

DRAFTED = SpeculationMetrics(
    num_drafts=2,
    num_draft_tokens=6,
    num_accepted_tokens=3,
    num_accepted_tokens_per_pos=(2, 1, 0),
    steps_by_method={"ngram": 2},
)


def output_of(tokens: Sequence[int], speculation: SpeculationMetrics) -> RequestOutput:
    return RequestOutput(
        request_id="0",
        prompt="p",
        prompt_token_ids=(1, 2),
        outputs=(CompletionOutput(0, "text", tuple(tokens), "length"),),
        finished=True,
        metrics=RequestMetrics(arrival_time=0.0, ttft=0.02, itl=0.01, e2e=0.1, speculation=speculation),
    )


@dataclass
class FakeLLM:
    """Repeats the prompt's first token; method "ngram" goes wrong at temperature 0 for prompts that begin with 13."""

    calls: list[tuple[str, int, float, int]] = field(
        default_factory=list
    )  # method, first prompt, temperature, n
    steps: int = 0
    resets: int = 0
    forgotten: int = 0
    ignore_eos: bool = True  # what requests are expected to say

    def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return True

    def reset_drafters(self) -> None:
        self.forgotten += 1

    def stats(self) -> EngineStats:
        zero = dict.fromkeys(EngineStats.__slots__, 0)
        times = {
            "step_time": 0.005 * self.steps,
            "forward_time": 0.003 * self.steps,
            "draft_time": 0.002 * self.steps,
        }
        return EngineStats(
            **{
                **zero,
                "num_steps": self.steps,
                "draft_forward_time": 0.001 * self.steps,
                **times,
                "speculation": DRAFTED,
            }  # type: ignore[arg-type]
        )

    def generate(
        self, prompts: Sequence[dict[str, Any]], params: SamplingParams, use_tqdm: bool
    ) -> list[RequestOutput]:
        assert params.speculation is not None and params.ignore_eos is self.ignore_eos and use_tqdm is False
        method = params.speculation["method"]
        assert params.max_tokens is not None
        firsts = [prompt["prompt_token_ids"][0] for prompt in prompts]
        self.calls.append((method, firsts[0], params.temperature, len(prompts)))
        self.steps += 10
        speculation = SpeculationMetrics() if method == "none" else DRAFTED
        wrong = {13} if method == "ngram" else set()
        return [
            output_of([0 if first in wrong else first] * params.max_tokens, speculation) for first in firsts
        ]


def test_measure_reads_differences() -> None:
    llm = FakeLLM(steps=100)
    params = SamplingParams(max_tokens=4, ignore_eos=True, speculation={"method": "ngram"})
    sample = measure(llm, [(7, 8), (9,)], params)  # type: ignore[arg-type]
    assert (sample.tokens, sample.num_steps, llm.resets, llm.forgotten) == (8, 10, 1, 1)
    assert sample.token_ids == ((7,) * 4, (9,) * 4)
    assert sample.host_time == pytest.approx(0.010)  # 10 steps of 5 ms, 4 ms of them in forward passes
    assert sample.draft_time == pytest.approx(0.020)
    assert (sample.num_drafts, sample.num_accepted_tokens, sample.accepted_per_pos) == (4, 6, (4, 2, 0))


def test_series() -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True, speculation={"method": "ngram"})
    series = Series("ngram", 0.0, [measure(FakeLLM(), [(7,)], params) for _ in range(3)])  # type: ignore[arg-type]
    assert series.mean_acceptance_length == 2.5
    assert series.acceptance_per_position == (1.0, 0.5, 0.0)
    assert series.tokens_per_step == pytest.approx(0.4)
    assert series.per_step("host_time") == pytest.approx(0.001)
    assert Series("none", 0.0).mean_acceptance_length is None


def test_latency_alternates_and_compares() -> None:
    llm, labels = FakeLLM(), []
    rows = latency(
        llm,  # type: ignore[arg-type]
        [(12, 1), (13, 1)],
        methods=["ngram", "draft_model"],
        temperatures=(0.0, 0.8),
        output_tokens=4,
        rounds=2,
        advance=labels.append,
    )
    assert [(r.temperature, r.method) for r in rows] == [
        (t, m) for t in (0.0, 0.8) for m in ("none", "ngram", "draft_model")
    ]
    assert [r.num_samples for r in rows] == [4] * 6
    assert [r.equal_prompts for r in rows] == [4, 2, 4, None, None, None]
    assert [r.equal_tokens for r in rows] == [True, False, True, None, None, None]
    assert rows[0].speedup is None and rows[1].speedup is not None
    assert rows[0].mean_acceptance_length is None and rows[1].mean_acceptance_length == 2.5
    assert len(labels) == 2 * 2 * 2 * 3
    cold = [call for call in llm.calls if call[2] == 0.0][3:]  # the first three warmed up
    assert [m for m, *_ in cold[:6]] == ["none", "ngram", "draft_model", "ngram", "draft_model", "none"]


def test_throughput_takes_turns_through_the_prompts() -> None:
    llm = FakeLLM()
    prompts = [(100 + i, 1) for i in range(8)]
    rows = throughput(
        llm, prompts, methods=["none", "ngram"], concurrencies=(1, 4), output_tokens=4, rounds=3  # type: ignore[arg-type]
    )  # fmt: skip
    assert [(r.concurrency, r.method) for r in rows] == [(1, "none"), (1, "ngram"), (4, "none"), (4, "ngram")]
    assert rows[0].scaling == 1 and rows[0].speedup is None and rows[3].speedup is not None
    assert {n for _, _, _, n in llm.calls[2:]} == {1, 4}
    assert {first for m, first, _, n in llm.calls[2:] if n == 1} == {100, 101, 102}


def test_accept() -> None:
    rows = accept(FakeLLM(), [Workload("code", ((5,), (6,)))], methods=["ngram"], output_tokens=4)  # type: ignore[arg-type]
    (row,) = rows
    assert (row.mean_acceptance_length, row.num_drafts, row.num_draft_tokens) == (2.5, 4, 12)
    assert row.draft_time_per_step == pytest.approx(0.002)
    assert row.as_dict()["acceptance_per_position"] == (1.0, 0.5, 0.0)
    assert row.speedup > 0


def test_accept_takes_turns_with_plain_decoding_and_draws(tmp_path: Path) -> None:
    llm = FakeLLM()
    workloads = [Workload("code", ((5,), (6,))), Workload("edit <1>", ((7,), (8,)))]
    rows = accept(llm, workloads, methods=["suffix", "suffix/tree"], output_tokens=4)  # type: ignore[arg-type]
    assert [(r.workload, r.method) for r in rows] == [
        (w.name, m) for w in workloads for m in ("suffix", "suffix/tree")
    ]
    assert [method for method, *_ in llm.calls[:6]] == [
        "none",
        "suffix",
        "suffix",
        "suffix",
        "suffix",
        "none",
    ]
    assert speculation_of("suffix/tree") == {"method": "suffix", "speculative_dynamic_tree": True}
    draw_accept(rows, tmp_path / "plot.svg")
    drawing = ElementTree.fromstring((tmp_path / "plot.svg").read_text())
    bars = [e for e in drawing if e.tag.endswith("rect") and len(e)]
    assert len(bars) == 2 * len(rows) and all(float(e.attrib["height"]) > 0 for e in bars)
    # a method and its trees share a colour, and differ in its strength
    assert len({e.attrib["fill"] for e in bars}) == 1
    assert len([e for e in bars if "fill-opacity" in e.attrib]) == len(bars) // 2
    for name, message in (("plot.gif", "ends in .svg or .png"), ("no/plot.svg", "there is no folder")):
        with pytest.raises(ConfigError, match=message):
            draw_accept(rows, tmp_path / name)


def test_rotation() -> None:
    assert [rotated("abc", i)[0] for i in range(4)] == ["a", "b", "c", "a"]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_workloads(name: str) -> None:
    from draftwise.config.embedded import embedded_path
    from draftwise.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(embedded_path("target")))
    workload = make_workload(name, tokenizer, 3, 64, seed=1)
    assert len(workload.prompts) == 3 and len(set(workload.prompts)) == 3
    assert all(48 <= len(p) <= 64 and all(0 <= t < len(tokenizer) for t in p) for p in workload.prompts)
    assert make_workload(name, tokenizer, 3, 64, seed=1) == workload
    assert make_workload(name, tokenizer, 3, 64, seed=2) != workload
    if name == "edit":
        assert all("new_" in tokenizer.decode(list(p)) for p in workload.prompts)
    if name == "copy":
        for prompt in workload.prompts:
            assert prompt[-8:] == prompt[:8]


def test_workloads_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="unknown workload"):
        make_workload("poems", None, 1, 64)


def test_statistics_line() -> None:
    line = statistics_line([output_of(range(10), DRAFTED)], 0.1)
    assert (
        line == "10 tokens in 0.10 s (100 tokens/s, first after 20 ms), mean acceptance length 2.50 (ngram)"
    )
    assert statistics_line([output_of(range(10), SpeculationMetrics())], 0.1).endswith("no speculation")


def test_output_as_dict_is_json() -> None:
    import json

    facts = json.loads(json.dumps(output_as_dict(output_of([1, 2], DRAFTED))))
    assert facts["outputs"][0]["token_ids"] == [1, 2]
    assert facts["metrics"]["speculation"]["num_accepted_tokens_per_pos"] == [2, 1, 0]


def test_a_table_of_the_widest_numbers_fits_a_terminal() -> None:
    columns = [
        "temp",
        "<method",
        "tokens\nper s",
        "speed\n-up",
        "accept.\nlength",
        "first\ntoken",
        "per\ntoken",
    ]
    cells = ["0.85", "parallel_drafting", "123456", "12.34x", "12.34", "12345.67 ms", "123.45 ms"]
    lines = table(
        "a title that is longer than a terminal is wide " * 3, columns, ["over them", cells]
    ).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1].split() == [*cells[:5], "12345.67", "ms", "123.45", "ms"] and lines[-2] == "over them"
