"""Statistical tests run on one thread: their tensors are small, and the machine is shared."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


FEW, MANY = 2_500, 10_000


@pytest.fixture(params=[FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"])
def trials(request: pytest.FixtureRequest) -> int:
    """Of a small world (`world.py`): so few that every run of the tests has time for them; and many, which see half the
    deviation, with the slow tests. The negative controls have the same numbers: wrong rules are caught by few."""
    found: int = request.param
    return found
