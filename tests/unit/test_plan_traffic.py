"""Acceptance and traces: what goes into a simulation besides times."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest

from draftwise.errors import ConfigError
from draftwise.plan.acceptance import AcceptanceCounts, AcceptanceModel, Chances, Draws, conditional, draw
from draftwise.plan.acceptance_files import read_acceptance
from draftwise.plan.traces import SHAPES, make_trace, poisson_trace, read_trace


def test_acceptance_is_drawn_position_by_position() -> None:
    """planner.md's anchors: rates (1, 0, 1) give 2 tokens, (0.7, 0.5, 0.2) a mean of 2.12."""
    rng = random.Random(1)
    assert {draw(AcceptanceModel.constant((1.0, 0.0, 1.0)).survival("model"), 3, rng) for _ in range(99)} == {
        1
    }
    survival = AcceptanceModel.constant((0.7, 0.5, 0.2)).survival("model")
    mean = 1 + sum(draw(survival, 3, rng) for _ in range(200_000)) / 200_000
    assert mean == pytest.approx(2.12, abs=0.01)


def test_positions_beyond_the_last_are_as_good_as_that_one() -> None:
    model = AcceptanceModel.constant((0.5,))
    assert model.survival("model")[:3] == (0.5, 0.25, 0.125)
    assert model.length("model", 2) == 1.75 and model.length("none", 5) == 1.0


def test_shares_become_chances_and_back() -> None:
    assert conditional([0.8, 0.4, 0.1]) == pytest.approx((0.8, 0.5, 0.25))
    assert conditional([0.0, 0.0]) == (0.0, 0.0)


def test_steps_are_counted_by_what_was_proposed() -> None:
    counts = AcceptanceCounts()
    assert counts.chances() is None
    for size, accepted in ((0, 0), (1, 1), (2, 0), (2, 2)):
        counts.add(size, accepted, 100)
    assert (counts.sizes, counts.tried, counts.accepted) == ([1, 1, 2], [3, 1], [2, 1])
    found = counts.chances()
    assert found == Chances((2 / 3, 1.0), (0.75, 0.5), 100.0)
    draws = Draws(found)
    assert draws.proposed(2) == 1.25 and draws.accepted(2) == pytest.approx(0.5 + 0.5 * 2 / 3)
    more = AcceptanceCounts([2], [], [], 50)
    more.merge(counts)
    assert more.sizes == [3, 1, 2] and more.steps == 6 and more.tokens == 450
    assert AcceptanceCounts([5], [], [], 500).chances() == Chances((0.0,), (0.0,), 100.0)


def test_look_ups_that_find_nothing_are_no_drafts() -> None:
    model = AcceptanceModel({"": {"ngram": (0.8, 0.5)}}, {"": {"ngram": (0.25,)}})
    assert model.length("ngram", 2) == pytest.approx(1 + 0.25 * 1.2) and model.proposed("ngram", 2) == 0.5
    assert model.survival("ngram")[:2] == pytest.approx((0.8, 0.4))
    assert model.scaled(0.5).length("ngram", 2) == pytest.approx(1 + 0.25 * (0.4 + 0.2))
    for offers in ((0.5, 0.6), (1.2,), (math.nan,)):
        with pytest.raises(ConfigError, match="acceptance"):
            AcceptanceModel({"": {"ngram": (0.8,)}}, {"": {"ngram": offers}})


def test_the_nearest_length_holds() -> None:
    parts = [Chances((0.2,), (), 400.0), Chances((0.9,), (), 100.0)]
    model = AcceptanceModel({"": {"m": (0.5,)}}, contexts={"": {"m": parts}})
    found = [model.length("m", 1, context=n) for n in (1, 199, 200, 9999)]
    assert found == pytest.approx([1.9, 1.9, 1.2, 1.2]) and model.length("m", 1) == 1.5
    assert model.draws("m", context=50).until == 200.0 and model.draws("m", context=900).until == math.inf
    assert model.scaled(0.5).length("m", 1, context=100) == pytest.approx(1.45)


def test_kinds_of_text_have_chances_of_their_own() -> None:
    model = AcceptanceModel({"": {"ngram": (0.2,)}, "edit": {"ngram": (0.9,)}})
    assert model.length("ngram", 1, "edit") == 1.9 and model.length("ngram", 1, "prose") == 1.2
    with pytest.raises(ConfigError, match="no rates are known for method 'eagle'"):
        model.survival("eagle")


@pytest.mark.parametrize("rates", ["1.5", "0.5,-0.1", "nan", "nowhere.json", ""])
def test_rates_that_are_none(rates: str) -> None:
    with pytest.raises(ConfigError, match="acceptance"):
        read_acceptance(rates)


def test_output_of_bench_accept_is_read(tmp_path: Path) -> None:
    rows = [
        {"method": "ngram", "workload": "code", "acceptance_per_position": [0.5, 0.25], "num_drafts": 100},
        {
            "method": "ngram",
            "workload": "copy",
            "acceptance_per_position": [0.9, 0.9],
            "num_drafts": 300,
            "mean_acceptance_length": 2.8,
            "tokens_per_step": 1.9,
        },
    ]
    file = tmp_path / "accept.json"
    file.write_text(json.dumps({"benchmark": "accept", "results": rows}))
    model = read_acceptance(str(file))
    assert model.rates["code"]["ngram"] == pytest.approx((0.5, 0.5))
    assert model.survival("ngram")[:2] == pytest.approx((0.8, 0.7375))  # weighted by drafts
    # Half of the steps of the second found nothing: 300 drafts in 600 steps, and 100 in 100.
    assert model.length("ngram", 2, "copy") == pytest.approx(1.9)
    assert model.proposed("ngram", 1) == pytest.approx(400 / 700)


def test_four_forms_of_traces_say_the_same(tmp_path: Path) -> None:
    forms = {
        "own.csv": "time,isl,osl\n0.0,100,10\n1.5,200,20\n",
        "own.jsonl": '{"time": 0, "isl": 100, "osl": 10}\n\n{"time": 1.5, "isl": 200, "osl": 20}\n',
        "mooncake.jsonl": '{"timestamp": 0, "input_length": 100, "output_length": 10, "hash_ids": [1]}\n'
        '{"timestamp": 1500, "input_length": 200, "output_length": 20, "hash_ids": [1, 2]}\n',
        "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,100,10\n"
        "2023-11-16 18:15:48.1805900,200,20\n",
    }
    for name, text in forms.items():
        (tmp_path / name).write_text(text)
        trace = read_trace(tmp_path / name)
        assert trace.times_np.tolist() == pytest.approx([0.0, 1.5]), name
        assert (trace.isl_np.tolist(), trace.osl_np.tolist()) == ([100, 200], [10, 20]), name
    assert read_trace(tmp_path / "mooncake.jsonl").blocks == [[1], [1, 2]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("time,isl,osl\n", "no request"),
        ("time,isl,osl\nnan,1,1\n", "no finite time"),
        ("time,isl,osl\n0,-5,1\n", "input length -5"),
        ("time,isl,osl\n0,1.5,1\n", "line 2"),
        ("time,isl,osl\n0," + 200_000 * "9" + ",1\n", "field limit"),
        ('{"time": 0, "isl": 1' + 400 * "0" + ', "osl": 1}', "line 1"),
        ('{"time": ' + 100_000 * "[", "line 1 is not a JSON object"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1e400]}', "line 1"),
        ("time,isl,osl\n0,1\n", "line 2"),
        ("a,b\n1,2\n", "expected columns"),
        ('{"time": 0}\n', "expected columns"),
        ('{"time": 0, "isl": 1, "osl": 1}\nhello\n', "line 2 is not a JSON object"),
    ],
)
def test_traces_that_are_none(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_trace(file)


def test_requests_are_sorted_with_all_that_belongs_to_them() -> None:
    trace = make_trace([3.0, 1.0], [30, 10], [3, 1], kinds=["late", "early"], blocks=[[3], [1]])
    assert (trace.isl_np.tolist(), trace.kinds, trace.blocks) == ([10, 30], ["early", "late"], [[1], [3]])


def test_times_of_the_clock_begin_at_zero() -> None:
    assert make_trace([1.7e9 + 5, 1.7e9], [1, 2], [1, 1]).times_np.tolist() == [0.0, 5.0]
    assert make_trace([-3.0, 1.0], [1, 2], [1, 1]).times_np.tolist() == [0.0, 4.0]
    with pytest.raises(ConfigError, match="days long"):
        make_trace([0.0, 1e18], [1, 1], [1, 1])


@pytest.mark.parametrize("shape", SHAPES)
def test_made_up_loads_have_the_rate_that_was_asked_for(shape: str) -> None:
    trace = poisson_trace(50, 200, 100, 10, shape=shape, spread=0.5, seed=3)
    assert len(trace) == pytest.approx(10_000, rel=0.05)
    assert (np.diff(trace.times_np) >= 0).all() and trace.times_np[0] >= 0 and trace.seconds <= 200
    assert trace.isl_np.mean() == pytest.approx(100, rel=0.05)
    assert (
        poisson_trace(50, 200, 100, 10, shape=shape, spread=0.5, seed=3).times_np.tolist()
        == trace.times_np.tolist()
    )


def test_a_tenfold_load_ends_ten_times_as_high_as_it_began() -> None:
    times_np = poisson_trace(100, 1000, 10, 10, shape="tenfold").times_np
    assert (times_np > 800).sum() / (times_np < 200).sum() == pytest.approx(10, rel=0.1)


def test_a_thinned_trace() -> None:
    trace = poisson_trace(100, 100, 10, 10)
    assert len(trace.thinned(0.1, 0)) == pytest.approx(len(trace) / 10, rel=0.15)
    assert trace.faster(2).seconds == pytest.approx(trace.seconds / 2)
    with pytest.raises(ConfigError):
        trace.thinned(0.0, 0)
