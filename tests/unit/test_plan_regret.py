"""The benchmark that compares the planner with fixed settings: its three questions."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def regret() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "plan_regret.py"
    spec = importlib.util.spec_from_file_location("plan_regret", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["plan_regret"] = module
    spec.loader.exec_module(module)
    return module


def test_as_good_as_dear_and_the_goal(regret: Any) -> None:
    point = regret.Point
    others = [point("2", 0.90, 2.0), point("3", 0.98, 3.0), point("4", 0.995, 4.0)]
    won, shown = regret.judged(point("planner", 0.99, 2.0), others, 0.97)
    assert won == {"as good": True, "as dear": True, "goal": True}
    assert [p.rule for p in shown] == ["2", "3", "4"]
    # The same share costs others less; for as many hours others have more; the goal costs less.
    won, _ = regret.judged(point("planner", 0.97, 3.5), others, 0.97)
    assert won == {"as good": False, "as dear": False, "goal": False}
    # As good as the best of the goal is enough, with fewer hours; a smaller share is not.
    assert regret.judged(point("planner", 0.98, 2.5), others, 0.97)[0]["goal"]
    assert not regret.judged(point("planner", 0.979, 2.5), others, 0.97)[0]["goal"]


def test_a_short_load_is_served_by_each_rule(regret: Any) -> None:
    trace = regret.poisson_trace(0.5, 120.0, 100, 20, seed=1)
    for dynamo in (False, True):
        assert regret.planned(trace, 4, dynamo).num_ended == len(trace)
    found = regret.fixed(trace, [3], 1, 3, 0.9)
    assert found[-1].in_sla >= 0.9 and [p.rule for p in found] == [
        f"fixed {n + 1} x K=3" for n in range(len(found))
    ]
