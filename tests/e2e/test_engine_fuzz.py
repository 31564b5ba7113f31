"""Random engines and random batches: every request gets what it gets alone, decoded plainly, and nothing is left over.

A case is a function of its seed. A failure names it; to run it again:

    DRAFTWISE_FUZZ_SEEDS=17 pytest -n 0 tests/e2e/test_engine_fuzz.py -k seeds

``DRAFTWISE_FUZZ_SEEDS`` takes several, and ranges: ``17,400-450``. What cases are made of: docs/guides/fuzzing.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.fakes.fuzz.cases import make_case
from tests.fakes.fuzz.check import References, check_case, check_run
from tests.fakes.fuzz.drive import run_case
from tests.fakes.fuzz.faults import LATER, SOON
from tests.fakes.fuzz.world import make_world

VARIABLE = "DRAFTWISE_FUZZ_SEEDS"
ALWAYS = 20
"""Cases of every run: about 10 seconds. Planted faults show in the first six."""
SLOW = 1200
"""Cases of runs with the slow tests: minutes."""
PER_TEST = 10


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[References]:
    made = References(make_world(tmp_path_factory.mktemp("fuzz")))
    yield made
    made.close()


def chosen_seeds() -> list[int]:
    """What the environment names."""
    seeds: list[int] = []
    for part in filter(None, os.environ.get(VARIABLE, "").split(",")):
        first, _, last = part.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    return seeds


def check(seeds: range | list[int], references: References) -> None:
    torch.set_num_threads(1)
    for seed in seeds:
        case = make_case(seed, references.world)
        try:
            check_case(case, references)
        except BaseException as error:
            error.add_note(
                f"seed {seed} ({case.kernels}, {case.drive}, ahead {case.ahead}); again: "
                f"{VARIABLE}={seed} pytest -n 0 tests/e2e/test_engine_fuzz.py -k seeds\n{case.options}"
            )
            raise


def test_seeds_by_name(references: References) -> None:
    seeds = chosen_seeds()
    if not seeds:
        pytest.skip(f"{VARIABLE} names seeds")
    check(seeds, references)


@pytest.mark.parametrize("first", range(0, ALWAYS, PER_TEST))
def test_each_request_gets_what_it_gets_alone(references: References, first: int) -> None:
    check(range(first, first + PER_TEST), references)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(ALWAYS, SLOW, PER_TEST))
def test_many_more(references: References, first: int) -> None:
    check(range(first, first + PER_TEST), references)


def is_found(fault: Callable[[pytest.MonkeyPatch], None], seeds: range, references: References) -> bool:
    """Whether the cases of some seeds show a fault that is planted in the engine, not in the references."""
    torch.set_num_threads(1)
    for seed in seeds:
        case = make_case(seed, references.world)
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            try:
                run = run_case(case, references.world)
            except Exception:
                return True
        try:
            check_run(case, run, references)
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("fault", SOON, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(
    references: References, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    assert is_found(fault, range(ALWAYS), references)


@pytest.mark.slow
@pytest.mark.parametrize("fault", LATER, ids=lambda fault: fault.__name__)
def test_a_rarer_planted_fault_is_found(
    references: References, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    assert is_found(fault, range(400), references)
