"""Profiles: what is measured first, what is written, and what a file says."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftwise.charts import Cells, cells_svg
from draftwise.errors import ConfigError
from draftwise.plan.acceptance import AcceptanceCounts, AcceptanceModel
from draftwise.plan.interpolation import (
    Interpolation,
    Throughput,
    of_profile,
    read_interpolation,
    times_of,
    write_interpolation,
)
from draftwise.plan.operating import OperatingPoint, Sla
from draftwise.plan.profile import Profile
from draftwise.plan.samples import PromptSample, RestSample, Setting, StepSample, quantiles
from draftwise.plan.times import Infeasible, OutOfRange
from draftwise.profile import measure
from draftwise.profile.points import AcceptPoint, PromptPoint, StepPoint, plan_points, telling
from draftwise.profile.report import best_settings, break_even, choices, draw


def made(path: Path | None = None) -> Profile:
    """Of a machine whose steps take 10 ms + 0.1 per row + 0.01 per 1000 keys, and drafts 0.5 ms each."""
    setting = Setting("int8", 40_000, 16, 1000.0)
    setting.prompts += [PromptSample("none", n, (0.010 + n * 1e-4,)) for n in (32, 256, 1024)]
    for n in (1, 4, 16):
        for context in (64, 1024):
            for method, k in (("none", 0), ("eagle3", 1), ("eagle3", 3)):
                target = 0.010 + 1e-4 * n * (1 + k) + 1e-8 * n * context
                setting.steps.append(
                    StepSample(method, k, n, context, n * (1 + k), n * context, target, 5e-4 * k, 9)
                )
    profile = Profile({"cpu": "test"}, "tiny", {"int8": setting})
    counts = AcceptanceCounts([0, 0, 0, 100], [100, 80, 60], [80, 60, 30], 6400)
    profile.accepted = {"code": {"eagle3": {"64": counts}}}
    if path is not None:
        profile.save(path)
    return profile


def test_both_ends_and_the_middle_come_first() -> None:
    assert telling([1, 2, 4, 8, 16]) == [1, 16, 4, 2, 8]
    assert telling([5]) == [5] and telling([2, 1]) == [1, 2]
    assert sorted(telling(range(17))) == list(range(17))


def test_all_points_come_and_the_telling_ones_first() -> None:
    points = plan_points(["eagle3"], [1, 3], [1, 8], [64, 512], [32, 512], ["code"], 10_000, 1024)
    assert {type(p) for p in points[:8]} == {PromptPoint, StepPoint, AcceptPoint}
    assert points.index(StepPoint("none", 0, 1, 64)) < points.index(StepPoint("eagle3", 1, 1, 64))
    assert len(points) == 2 + 2 + 4 * 3 + 2 and len(set(points)) == len(points)
    own = plan_points(["ngram"], [1], [1], [64], [32], [], 3000, 1024, own=["own"])
    assert [p for p in own if isinstance(p, AcceptPoint)] == [AcceptPoint("ngram", "own", None)]
    small = plan_points([], [1], [1, 8], [64, 512], [32], [], 3000, 1024)
    assert StepPoint("none", 0, 8, 512) not in small and StepPoint("none", 0, 1, 512) in small


def test_a_profile_is_the_same_after_it_was_written_and_read(tmp_path: Path) -> None:
    profile = made(tmp_path / "p.json")
    again = Profile.load(tmp_path / "p.json")
    assert again.as_dict() == profile.as_dict()
    assert again.acceptance().survival("eagle3")[:3] == pytest.approx((0.8, 0.6, 0.3))
    again.check_of("tiny", {"cpu": "test"})


def test_times_are_those_measured_and_what_lies_between() -> None:
    times = made().times()
    assert times.target_time(4, 16, 4 * 64) == pytest.approx(0.010 + 1.6e-3 + 2.56e-6, rel=1e-6)
    assert times.target_time(8, 8, 8 * 64) == pytest.approx(0.0108, rel=0.05)
    assert times.draft_time("eagle3", 4, 3) == pytest.approx(1.5e-3, rel=0.02)
    assert times.prompt_time(0, 256, True) == pytest.approx(0.0356)
    assert times.most_drafts == 3
    assert times.outside(4, 4, 256) is None
    assert "measured up to 16" in (times.outside(40, 40, 40) or "")
    assert "context" in (times.outside(1, 1, 9000) or "")


def test_the_report_says_what_fits_or_what_comes_nearest(tmp_path: Path) -> None:
    profile = made()
    ((weights, best),) = best_settings(profile, Sla(itl=0.02), 64, 32)
    assert weights == "int8" and isinstance(best, OperatingPoint) and best.method == "eagle3"
    ((_, none),) = best_settings(profile, Sla(itl=1e-5), 64, 32)
    assert isinstance(none, Infeasible) and isinstance(none.nearest, OperatingPoint)
    double = made()
    double.settings["int8/2"] = replace(double.settings["int8"], devices=2)
    double.save(tmp_path / "double.json")
    assert Profile.load(tmp_path / "double.json").settings["int8/2"].devices == 2
    ((context, row), *_) = break_even(profile, "int8", "eagle3", 3)
    assert context == 64 and dict(row)[1].break_even == pytest.approx(
        (0.0104 + 0.0015) / 0.0101 - 1, rel=0.02
    )
    assert {n for _, n, _ in choices(profile, "int8")} == {1, 4, 16}


def test_charts_are_drawn(tmp_path: Path) -> None:
    files = draw(made(), tmp_path / "charts")
    found = {f.stem: f.read_text() for f in files}
    assert sorted(found) == ["best-int8", "pareto-int8", "prefill-int8", "steps-int8"]
    assert all("<polyline" in text for name, text in found.items() if name != "best-int8")
    # One cell per context and number of requests, in each of two surfaces: K=3 takes 12.1 ms for 1 + 0.8 + 0.6 + 0.3
    # tokens where plain decoding takes 10.1 for one.
    assert found["best-int8"].count('rx="3"') == 2 * 2 * 3
    (best,) = (p for c, n, p in choices(made(), "int8") if (c, n) == (64, 1))
    assert f"eagle3 3: {best.tokens_per_second * 0.0101006:.2f}" in found["best-int8"]
    cells = cells_svg([Cells("t", [1], [1], {(1, 1): (1.0, "w" * 30)})], "", "")
    assert 'width="198"' in cells  # of 30 letters, with some air on both sides


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v.update(version=1), "version 1"),
        (lambda v: v.update(format="x"), "is not a profile"),
        (lambda v: v.pop("settings"), "damaged"),
        (lambda v: v["settings"]["int8"]["steps"][0].update(target=math.nan), "not a time"),
        (lambda v: v["settings"]["int8"]["steps"][0].update(rows=-1), "not a count"),
        (lambda v: v["settings"]["int8"]["steps"][0].update(rows=math.inf), "damaged"),
    ],
)
def test_files_that_are_no_profiles(tmp_path: Path, change: Any, words: str) -> None:
    value = made().as_dict()
    change(value)
    (tmp_path / "p.json").write_text(json.dumps(value))
    with pytest.raises(ConfigError, match=words):
        Profile.load(tmp_path / "p.json")


def test_a_profile_of_another_model_or_machine() -> None:
    with pytest.raises(ConfigError, match="with model 'tiny', not with 'other'"):
        made().check_of("other")
    with pytest.raises(ConfigError, match="another machine"):
        made().check_of("tiny", {"cpu": "other"})
    with pytest.raises(ConfigError, match="'int4' was not measured"):
        made().times("int4")


# --------------------------------------------------------------------------------------- Dynamo's files


def surface() -> Interpolation:
    """9.8 ms at a third of the cache, and 20 ms more from there to a full one: planner.md's example (3000 + 150)."""
    usage, context = np.meshgrid(np.linspace(0, 1, 7), [500.0, 3075.0, 6000.0])
    itl = 9.8 + 20 * (usage - 1 / 3)
    return Interpolation(
        {
            "prefill_isl": np.array([100.0, 1000.0, 3000.0, 6000.0]),
            "prefill_ttft": np.array([20.0, 60.0, 150.0, 320.0]),
            "prefill_thpt_per_gpu": np.array([5e3, 16e3, 20e3, 18e3]),
            "x_kv_usage": usage.ravel(),
            "y_context_length": context.ravel(),
            "z_itl": itl.ravel(),
            "z_thpt_per_gpu": (usage * 1000).ravel(),
            "max_kv_tokens": np.array([400_000.0]),
        }
    )


def test_9_8_ms_at_33_33_percent_of_the_cache() -> None:
    found = surface().best_throughput(itl=0.010, context=3000 + 150 / 2)
    assert isinstance(found, Throughput)
    assert found.kv_usage == pytest.approx(0.3333, abs=1e-4)
    assert found.itl == pytest.approx(0.0098, abs=2e-5) and found.per_device == pytest.approx(333, abs=2)


def test_what_is_out_of_range_or_infeasible_is_said_and_not_clamped() -> None:
    found = surface()
    assert found.ttft(1000) == pytest.approx(0.060)
    assert isinstance(found.ttft(50), OutOfRange) and isinstance(found.ttft(7000), OutOfRange)
    assert isinstance(found.best_throughput(0.010, 9000), OutOfRange)
    nothing = found.best_throughput(0.001, 3000)
    assert isinstance(nothing, Infeasible) and isinstance(nothing.nearest, Throughput)


def test_dynamos_files_are_written_and_read(tmp_path: Path) -> None:
    profile = made()
    found = of_profile(profile.setting(), profile.times())
    files = write_interpolation(found, tmp_path)
    assert [f.name for f in files] == ["raw_data.npz"] * 2
    again = read_interpolation(tmp_path)
    assert {k: v.tolist() for k, v in again.fields.items()} == {
        k: v.tolist() for k, v in found.fields.items()
    }
    folder = tmp_path / "json"
    for name in ("prefill", "decode"):
        place = folder / f"selected_{name}_interpolation"
        place.mkdir(parents=True)
        fields = {
            k: v.tolist() for k, v in found.fields.items() if (k.startswith("prefill")) == (name == "prefill")
        }
        (place / "raw_data.json").write_text(json.dumps(fields))
    assert read_interpolation(folder).max_kv_tokens == 40_000
    with pytest.raises(ConfigError, match="cannot be read"):
        read_interpolation(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="not numbers"):
        Interpolation({**found.fields, "z_itl": found.fields["z_itl"] * math.nan})


def test_dynamos_files_say_what_steps_take(tmp_path: Path) -> None:
    profile = made()
    write_interpolation(of_profile(profile.setting(), profile.times(), devices=2), tmp_path)
    times, devices = times_of(read_interpolation(tmp_path))
    assert devices == 2 and times.methods == () and times.kv_tokens == 40_000
    wanted = profile.times()
    for requests, context in ((1, 500), (4, 2000), (8, 8000)):
        assert times.target_time(requests, requests, context) == pytest.approx(
            wanted.target_time(requests, requests, context), rel=0.1
        )
    assert times.prompt_time(0, 1000, True) == pytest.approx(wanted.prompt_time(0, 1000, True))
    nothing = read_interpolation(tmp_path)
    nothing.fields["x_kv_usage"] = nothing.fields["x_kv_usage"] * 0
    with pytest.raises(ConfigError, match="no point has tokens in the cache"):
        times_of(nothing)


# --------------------------------------------------------------------------------------- the real engine


def test_the_embedded_model_is_profiled_within_a_budget_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftwise.cli.main import main

    monkeypatch.setattr(measure, "_REPEATS", 1)  # medians of several are tested below
    monkeypatch.setattr(measure, "_REST_OUTPUT", 48)
    file = tmp_path / "profile.json"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "def add(a, b):\n    return a + b\n\n\ndef add("}) + "\n")
    flags = [
        "profile",
        "--output",
        str(file),
        "--methods",
        "ngram",
        "--drafts",
        "2",
        "--concurrency",
        "1",
        "2",
    ]
    flags += [
        "--contexts",
        "40",
        "--prompts",
        str(prompts),
        "--num-kv-blocks",
        "64",
        "--max-model-len",
        "200",
        "--rounds",
        "2",
    ]
    assert main([*flags, "--budget", "0.0001"]) == 0
    first = Profile.load(file)
    assert first.left > 0 and sum(len(s.steps) for s in first.settings.values()) == 0
    assert main(flags) == 0
    whole = Profile.load(file)
    (setting,) = whole.settings.values()
    assert whole.left == 0 and {(s.method, s.drafts, s.requests) for s in setting.steps} >= {
        ("none", 0, 1),
        ("none", 0, 2),
        ("ngram", 2, 2),
    }
    ((name, counts),) = whole.accepted["own"]["ngram"].items()
    assert name in ("16", "32") and counts.steps > 10 and setting.kv_tokens == 64 * 16
    assert sum(counts.tried) >= sum(counts.accepted) and counts.sizes[0] < counts.steps
    assert all(len(s.widths) == s.steps for s in setting.steps)
    assert all(s.target > 0 for s in setting.steps) and len(setting.prefill) >= 3
    # Every size was visited twice; a third time is asked for below.
    assert {s.rounds for s in setting.steps} == {2} == {p.rounds for p in setting.prompts}
    assert all(len(s.targets) == s.steps for s in setting.steps) and setting.readings("ngram")
    assert setting.rest is not None and setting.rest.rounds == 2 and all(setting.rest.factors)
    before = whole.as_dict()
    assert main(flags) == 0
    again = Profile.load(file).as_dict()
    assert again["settings"] == before["settings"] and again["accepted"] == before["accepted"]
    assert main([*flags[:-1], "3"]) == 0
    assert {s.rounds for s in Profile.load(file).setting().steps} == {3}
    assert main(["profile", "--output", str(file), "--model", "/somewhere/else"]) == 2
    assert AcceptanceModel({"": {}}).methods == ()
    assert (
        main(
            [
                "simulate",
                "--profile",
                str(file),
                "--rate",
                "2",
                "--duration",
                "5",
                "--isl",
                "40",
                "--osl",
                "20",
            ]
        )
        == 0
    )


# ------------------------------------------------------------------------------ visits, scatter, drafters


def test_visits_that_lie_apart_are_one_size_and_its_median() -> None:
    setting = Setting("auto", 1000, 16, 1.0)
    for targets in ((0.002,) * 3, (0.009, 0.008), (0.002, 0.002)):
        middle = sorted(targets)[len(targets) // 2]
        setting.add_step(
            StepSample("none", 0, 1, 64, 1, 70, middle, 0.0, len(targets), 1, targets, (0.0,) * len(targets))
        )
    (sample,) = setting.steps
    assert (sample.target, sample.steps, sample.rounds) == (0.002, 7, 3)
    assert max(setting.step_factors()) == pytest.approx(4.5) and min(setting.step_factors()) == 1.0
    setting.add_prompt(PromptSample("eagle3", 64, (0.010, 0.012, 0.030), (0.001, 0.003, 0.002), (-0.1,)))
    setting.add_prompt(PromptSample("eagle3", 64, (0.012,), (0.002,)))
    assert setting.readings("eagle3") == [(64, 0.002)] and setting.prefill == [] and setting.behind == 0.0
    assert len(setting.prompts) == 1 and setting.prompts[0].rounds == 2


def test_what_a_rest_costs_is_kept_and_never_less_than_nothing(tmp_path: Path) -> None:
    profile = made()
    setting = profile.setting()
    assert setting.rest_factors == () == tuple(profile.times().rests)
    setting.add_rest(RestSample(0.4, ((1.3,), (1.1,), (1.2,), (0.9,))))
    setting.add_rest(RestSample(0.4, ((1.5, 1.4), (1.2, 1.1), (0.8, 1.3), (0.9, 0.9))))
    # Medians; later steps are no slower than the ones before them, and a rest makes nothing quicker.
    assert setting.rest_factors == ((0.0, 1.4), (0.05, 1.1), (0.15, 1.1), (0.4, 1.0))
    profile.save(tmp_path / "p.json")
    again = Profile.load(tmp_path / "p.json")
    assert again.setting().rest == setting.rest and again.times().pause == 0.4
    assert tuple(again.times().rests) == setting.rest_factors
    value = profile.as_dict()
    value["settings"]["int8"]["rest"]["factors"] = [[1.0]]
    (tmp_path / "p.json").write_text(json.dumps(value))
    with pytest.raises(ConfigError, match="1 parts after a pause"):
        Profile.load(tmp_path / "p.json")
    del value["settings"]["int8"]["rest"]  # as it was written before
    (tmp_path / "p.json").write_text(json.dumps(value))
    assert Profile.load(tmp_path / "p.json").setting().rest is None


def test_quantiles_have_the_mean_of_all_values() -> None:
    assert quantiles([9, 1, 5, 2, 4, 3], 3) == (1.5, 3.5, 7.0)
    assert quantiles([3, 1]) == (1, 3)
    values = [1.0 + (i % 97) / 50 for i in range(970)]
    assert sum(quantiles(values, 10)) / 10 == pytest.approx(sum(values) / 970)


def test_times_are_means_and_single_steps_scatter_around_them() -> None:
    profile = made()
    setting = profile.settings["int8"]
    quiet = profile.times()
    slow = (0.02, 0.02, 0.02, 0.06)
    setting.steps[0] = replace(setting.steps[0], targets=slow, draftings=(0.0,) * 4)
    setting.add_prompt(PromptSample("none", 500, (0.06, 0.06, 0.06, 0.18), behind=(0.004,)))
    setting.add_prompt(PromptSample("eagle3", 100, (0.02,), (0.003,)))
    setting.add_prompt(PromptSample("eagle3", 1000, (0.12,), (0.021,)))
    times = profile.times()
    assert times.target_time(4, 16, 256) == pytest.approx(1.5 * quiet.target_time(4, 16, 256))
    assert times.prompt_time(0, 256, True) == pytest.approx(1.5 * quiet.prompt_time(0, 256, True))
    assert times.step_factors == pytest.approx((2 / 3, 2 / 3, 2 / 3, 2)) == times.prompt_factors
    assert times.reading_time("eagle3", 0, 550) == pytest.approx(1.5 * 0.012)
    assert times.behind == 0.004 and times.reading_time("ngram", 0, 550) == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v["settings"]["int8"]["prompts"][0].update(seconds=[]), "without a time"),
        (lambda v: v["settings"]["int8"]["prompts"][0].update(behind=[math.nan]), "not a time"),
        (lambda v: v["settings"]["int8"]["steps"][0].update(targets=[-1]), "not a time"),
        (lambda v: v["settings"]["int8"]["steps"][0].update(widths=[1]), "without their rows"),
        (
            lambda v: v["accepted"]["code"]["eagle3"]["64"].update(accepted=[101, 60, 30]),
            "more drafts accepted",
        ),
        (lambda v: v["accepted"]["code"]["eagle3"]["64"].update(sizes=[1, 0, 0, 2]), "more drafts tried"),
    ],
)
def test_measurements_that_are_none(tmp_path: Path, change: Any, words: str) -> None:
    value = made().as_dict()
    change(value)
    (tmp_path / "p.json").write_text(json.dumps(value))
    with pytest.raises(ConfigError, match=words):
        Profile.load(tmp_path / "p.json")


# ------------------------------------------------------------------------ look-ups, and lengths of the context


def test_steps_that_verified_more_took_longer() -> None:
    """A look-up finds something in two of five steps: its times are those of 1 and of 5 rows, not of their mean."""
    profile = made()
    setting = profile.settings["int8"]
    setting.steps.append(
        StepSample(
            "ngram", 4, 1, 300, 3, 300, 0.011, 1e-5, 5, 1,
            (0.011, 0.030, 0.011, 0.030, 0.011), (1e-5,) * 5, (1, 5, 1, 5, 1),
        )
    )  # fmt: skip
    assert setting.steps[-1].by_rows() == [(1, 0.011), (5, 0.030)]
    assert setting.steps[-1].factors() == pytest.approx([1, 1, 1])  # both kinds alike; two steps say nothing
    times = profile.times()
    assert times.target_time(1, 5, 300) == pytest.approx(0.030, rel=0.02)
    assert times.target_time(1, 1, 300) == pytest.approx(0.011, rel=0.1)


def test_acceptance_by_length_is_in_the_file_and_chooses_the_drafts() -> None:
    """Drafts that are accepted behind short prompts only: with long ones plain decoding is best."""
    profile = made()
    profile.accepted = {
        "code": {
            "eagle3": {
                "64": AcceptanceCounts([0, 0, 0, 100], [100, 90, 80], [90, 80, 70], 6400),
                "1024": AcceptanceCounts([0, 0, 0, 100], [100, 2, 0], [2, 0, 0], 102_400),
            }
        }
    }
    found = {(c, n): point.method for c, n, point in choices(profile, "int8")}
    assert found[64, 1] == "eagle3" and found[1024, 1] == "none"
    acceptance = profile.acceptance()
    assert acceptance.length("eagle3", 3, context=64) == pytest.approx(1 + 0.9 + 0.8 + 0.7)
    assert acceptance.length("eagle3", 3, "code", 4096) == pytest.approx(1.02)
    assert acceptance.length("eagle3", 1) == pytest.approx(1 + 92 / 200)
    few = AcceptanceCounts([0, 0, 0, 9], [9, 2, 0], [2, 0, 0], 9 * 1024)
    profile.accepted["code"]["eagle3"]["1024"] = few  # too few to say anything of that length alone
    assert profile.acceptance().contexts == {"": {}}
    rows = dict(break_even(profile, "int8", "eagle3", 3))
    assert set(rows) == {64, 1024} and rows[64][0][1].accepted_length > 2
    profile.accepted = {}
    assert break_even(profile, "int8", "eagle3", 3)[0][1][0][1].accepted_length == 1.0
