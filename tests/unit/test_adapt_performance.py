"""Times of steps are learned from steps: robustly, and for sizes that were never seen."""

from __future__ import annotations

import itertools
import json
import math
import random

import pytest

from draftwise.adapt.controller import StepShape
from draftwise.adapt.performance import PerformanceModel, bucket


def target(requests: int, rows: int, context: int = 0) -> float:
    """Seconds: weights are read once, then arithmetic takes over."""
    return 1e-3 * (1 + 0.01 * requests + 0.02 * rows + 0.05 * max(rows - 8, 0) + context / 50_000)


def learn(model: PerformanceModel, requests: int, rows: int, times: int = 5, factor: float = 1.0) -> None:
    shape = StepShape(requests=requests, rows=rows, context=100 * requests)
    for _ in range(times):
        model.observe_target(shape, target(requests, rows, 100 * requests) * factor)


def test_sizes_that_are_treated_alike() -> None:
    assert [bucket(n) for n in (0, 1, 8, 15, 16, 17, 18, 32, 64)] == [0, 1, 8, 15, 16, 16, 17, 24, 32]
    assert all(bucket(n) <= bucket(n + 1) <= bucket(n) + 1 for n in range(5000))


def test_nothing_is_known_at_first() -> None:
    model = PerformanceModel()
    assert model.target_time(1, 1, 0) == 0
    assert model.draft_time("model", 1, 4) == 0
    assert model.prompt_time(100) == 0


def test_a_measured_size_is_a_median() -> None:
    model = PerformanceModel()
    learn(model, 4, 4)
    shape = StepShape(requests=4, rows=4, context=400)
    for slow in (10, 50, 100):  # a neighbour took the core
        model.observe_target(shape, slow)
    assert model.target_time(4, 4, 400) == pytest.approx(target(4, 4, 400))


def test_sizes_in_between_are_interpolated() -> None:
    model = PerformanceModel()
    for requests in (1, 2, 4, 8, 16, 64):
        for per in (1, 3, 5):
            learn(model, requests, requests * per)
    for requests, rows in ((1, 2), (4, 8), (8, 16), (16, 32), (64, 128)):
        guess = model.target_time(requests, rows, 100 * requests)
        assert guess == pytest.approx(target(requests, rows, 100 * requests), rel=0.15)
    # A batch size that never ran, between two that did.
    assert model.target_time(32, 32, 3200) == pytest.approx(target(32, 32, 3200), rel=0.25)


@pytest.mark.parametrize("seed", range(20))
def test_times_without_any_sense_are_survived(seed: int) -> None:
    """A machine that is busy beyond all measure, and a clock that stands still: guesses are numbers all the same. (The
    fit gives sizes a time of 0 here, which once ended the engine with a division by it.)"""
    rng = random.Random(seed)
    model = PerformanceModel()
    for _ in range(200):
        requests, nodes, lag = rng.choice([1, 2, 4, 8]), rng.choice([0, 1, 2, 4]), rng.choice([0, 0, 1, 64])
        shape = StepShape(requests=requests, rows=requests * (1 + nodes), context=rng.choice([0, 100, 9000]))
        model.observe_target(shape, 10 ** rng.uniform(-7, -1) * nodes)
        model.observe_draft("m", requests, nodes, lag, False, 10 ** rng.uniform(-7, -1) * requests * nodes)
        for time in (model.draft_time("m", 3, 2, lag), model.target_time(3, 9, 500)):
            assert 0 < time < math.inf


def test_more_rows_never_cost_less() -> None:
    rng = random.Random(1)
    model = PerformanceModel()
    for rows in (1, 2, 5):
        for _ in range(9):
            learn(model, 1, rows, 1, rng.uniform(0.9, 1.1))
    times = [model.target_time(1, rows, 100) for rows in range(9, 64)]
    assert all(a <= b * 1.0001 for a, b in itertools.pairwise(times))


def test_a_machine_that_slows_down_changes_no_comparison() -> None:
    model = PerformanceModel()
    learn(model, 1, 1, 9)
    learn(model, 1, 5, 9)
    before = model.target_time(1, 5, 100) / model.target_time(1, 1, 100)
    learn(model, 1, 5, 60, factor=2.0)  # only this size runs while the machine is slow
    assert model.target_time(1, 5, 100) == pytest.approx(2 * target(1, 5, 100), rel=0.01)
    after = model.target_time(1, 5, 100) / model.target_time(1, 1, 100)
    assert after == pytest.approx(before, rel=0.01)


def test_drafting_and_catching_up() -> None:
    model = PerformanceModel()
    for nodes in (2, 4):
        for _ in range(5):
            model.observe_draft("model", 1, nodes, 0, False, 1e-4 * nodes)
    assert model.draft_time("model", 1, 3) == pytest.approx(3e-4, rel=0.1)
    assert model.draft_time("model", 1, 0) == model.draft_time("model", 0, 4) == 0
    assert model.draft_time("other", 1, 4) == 0
    for _ in range(5):
        model.observe_draft("model", 1, 4, 500, False, 9e-4)
    assert model.draft_time("model", 1, 4, 500) == pytest.approx(9e-4)
    assert model.draft_time("model", 1, 4, 0) == pytest.approx(4e-4)


def test_prompts_are_told_apart() -> None:
    model = PerformanceModel()
    learn(model, 2, 2)
    alone = target(2, 2, 200)
    for _ in range(5):
        model.observe_target(StepShape(requests=2, rows=2, prompt_rows=100, context=200), alone + 0.002)
    assert model.prompt_time(50) == pytest.approx(0.001)
    assert model.target_time(2, 2, 200) == pytest.approx(alone)


def test_greedy_and_sampled_steps_are_kept_apart() -> None:
    model = PerformanceModel()
    learn(model, 1, 1)
    for _ in range(5):
        model.observe_target(StepShape(requests=1, rows=1, context=100, sampled=True), 0.005)
    assert model.target_time(1, 1, 100) == pytest.approx(target(1, 1, 100))
    assert model.target_time(1, 1, 100, sampled=True) == pytest.approx(0.005)


def test_what_was_learned_can_be_kept() -> None:
    model = PerformanceModel()
    for rows in (1, 3, 5):
        learn(model, 1, rows)
        model.observe_draft("a:b", 1, rows, 0, True, 1e-3 * rows)
    again = PerformanceModel.from_dict(json.loads(json.dumps(model.as_dict())))
    for rows in (1, 2, 3, 4, 5):
        assert again.target_time(1, rows, 100) == pytest.approx(model.target_time(1, rows, 100), rel=0.02)
        assert again.draft_time("a:b", 1, rows, sampled=True) == pytest.approx(
            model.draft_time("a:b", 1, rows, sampled=True), rel=0.1
        )


def test_growing_contexts_are_not_taken_for_a_slower_machine() -> None:
    """Plain steps are measured once while the contexts grow, then drafting steps of other requests over the same
    contexts again and again: what a plain step takes stays known."""

    def seconds(requests: int, rows: int, mean: int) -> float:
        return 1e-3 * (0.4 + 0.08 * rows + 0.00022 * requests * mean + 0.00008 * rows * mean)

    model = PerformanceModel()

    def step(requests: int, rows: int, mean: int) -> None:
        shape = StepShape(requests=requests, rows=rows, context=requests * mean)
        model.observe_target(shape, seconds(requests, rows, mean))

    for mean in range(128, 256):
        step(16, 16, mean)
    for _ in range(4):
        for rows in (32, 48, 64):
            for mean in range(128, 256, 2):
                step(16, rows, mean)
        for requests in (8, 4, 2):  # some end before others
            for mean in range(200, 212, 2):
                step(requests, 3 * requests, mean)
    for mean in (130, 160, 200, 250):
        for rows in (16, 32, 48, 80):
            assert model.target_time(16, rows, 16 * mean) == pytest.approx(seconds(16, rows, mean), rel=0.12)


def test_the_first_steps_of_a_size_do_not_say_what_it_takes() -> None:
    """They meet cold caches, or a busy moment: what such a step is said to take is what was believed of it before, and
    from the third one on the median."""
    model = PerformanceModel()
    learn(model, 1, 1)
    learn(model, 1, 2)
    wild = StepShape(requests=1, rows=6, context=100)
    answers = [model.observe_target(wild, 0.02) for _ in range(3)]
    assert answers[0] < 2 * target(1, 6, 100) and answers[1] < 0.02
    assert answers[2] == pytest.approx(0.02, rel=0.1)


def test_what_look_ups_take_says_nothing_of_the_machine() -> None:
    """2 us or 20 are nothing to a step; as news of the machine they made plain steps seem three times as long."""
    model = PerformanceModel()
    learn(model, 16, 16, 9)
    before = model.target_time(16, 16, 1600)
    for i in range(40):
        model.observe_draft("look-up", 16, 4, 0, False, 2e-6 if i < 10 else 2e-5)
        if i % 4 == 0:
            learn(model, 16, 40, 1)
    assert model.target_time(16, 16, 1600) == pytest.approx(before, rel=0.05)
    learn(model, 16, 16, 9, factor=2.0)  # a machine that is slower does show
    assert model.target_time(16, 40, 1600) == pytest.approx(2 * target(16, 40, 1600), rel=0.1)


def test_of_many_sizes_those_stay_that_are_in_use_or_were_taught() -> None:
    model = PerformanceModel()
    model.teach_target(64, 64, 6400, 0.004)
    usual = StepShape(requests=1, rows=1, context=100)
    for i in range(1000):
        model.observe_target(usual, 0.002)
        requests, rows, mean = 100 << i % 10, 1 + i % 7, 128 << i % 9  # 630 sizes
        model.observe_target(
            StepShape(requests=requests, rows=requests * rows, context=requests * mean), 0.005
        )
    assert model.times_measured(1, 1, 100) > 900
    assert model.times_measured(64, 64, 6400) >= 3
