"""Probes go on while they succeed and something pays for them."""

from __future__ import annotations

import pytest

from draftwise.adapt.choice import Drafter, Group, Prices
from draftwise.adapt.controller import StepShape
from draftwise.adapt.explore import Explorer
from draftwise.adapt.performance import PerformanceModel

K = 4


def after_success(requests: int, funds: float, row: float) -> tuple[bool, Drafter, Explorer, float]:
    """A probe of two nodes among ``requests`` has succeeded; a row more takes ``row`` of a plain step. Whether it goes
    on, its request, the account, and what a plain step takes."""
    model = PerformanceModel()
    plain = 0.002
    for more in range(K + 1):
        for _ in range(9):
            shape = StepShape(requests=requests, rows=requests + more, context=100 * requests)
            model.observe_target(shape, plain * (1 + row * more))
    explorer = Explorer(model, 0.004, 4.0)
    explorer.spend(-funds * plain)
    drafter = Drafter(Group("model", "greedy", False), K, K, 0, probe=2)
    prices = Prices(requests, 100 * requests, False, plain)
    return explorer.take_outcome(drafter, 2, 2, prices), drafter, explorer, plain


@pytest.mark.parametrize(
    ("requests", "funds", "row", "goes_on"),
    [
        (16, 2.0, 0.1, True),  # saved up
        (16, -1.0, 0.1, False),  # two tokens of sixteen are an eighth of a step, four rows two fifths
        (16, -1.0, 0.02, True),
        (1, -1.0, 0.1, True),  # two plain steps gained, for two fifths
        (1, -1.0, 0.6, False),
    ],
)
def test_a_probe_that_succeeds_goes_on_where_that_is_paid(
    requests: int, funds: float, row: float, goes_on: bool
) -> None:
    answer, drafter, explorer, plain = after_success(requests, funds, row)
    assert answer == goes_on
    assert (drafter.probe, drafter.streak) == ((K, 1) if goes_on else (0, 0))
    spent = K * row if goes_on else 0.0
    assert explorer.funds / plain == pytest.approx(funds + 2 / requests - spent, abs=0.02)
