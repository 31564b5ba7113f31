"""Random engines whose steps stay on a pretended device, and random batches: every request gets what it gets alone,
decoded plainly on the CPU.

What cases are made of: `tests.fakes.fuzz.seated`. To run others, or one again:

    DRAFTWISE_SEATS_SEEDS=17,400-450 pytest -n 0 tests/e2e/test_seats_fuzz.py -k seeds
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch

from draftwise.engine import device
from tests.fakes.fuzz.cases import Case
from tests.fakes.fuzz.check import References, check_run
from tests.fakes.fuzz.drive import run_case
from tests.fakes.fuzz.faults import SEATED as FAULTS
from tests.fakes.fuzz.seated import SEATED, TREES, make_seated_case, pretended_device
from tests.fakes.fuzz.world import make_world

VARIABLE = "DRAFTWISE_SEATS_SEEDS"
ALWAYS = (0, 1, 5, 7, 12, 14, 15)
"""Cases of every run: few that have, together, steps in seats of most kinds, all rules and features of requests; among
them those in which planted faults show."""
SLOW = 680
AHEAD = 59
"""A case in which early exit drafts ahead of the blocks of a plan, under adaptive control."""
CLEAN = frozenset({*ALWAYS, AHEAD})
"""Cases that every run sees without faults; those with the slow tests see all."""


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[References]:
    made = References(make_world(tmp_path_factory.mktemp("fuzz")))
    yield made
    made.close()


def case_of(seed: int, references: References) -> Case:
    case = make_seated_case(seed, references.world)
    if seed == AHEAD:
        case.options["speculation_control"] = "adaptive"
    return case


def check(seeds: Iterable[int], references: References) -> Counter[str]:
    """Rows of steps in seats, see `pretended_device`."""
    torch.set_num_threads(1)
    seated: Counter[str] = Counter()
    for seed in seeds:
        case = case_of(seed, references)
        try:
            with pretended_device() as counts:
                run = run_case(case, references.world)
            check_run(case, run, references)
        except BaseException as error:
            error.add_note(
                f"seed {seed}; again: {VARIABLE}={seed} pytest -n 0 tests/e2e/test_seats_fuzz.py -k seeds\n"
                f"{case.options}"
            )
            raise
        seated += counts
    return seated


def chosen_seeds() -> list[int]:
    """What the environment names."""
    seeds: list[int] = []
    for part in filter(None, os.environ.get(VARIABLE, "").split(",")):
        first, _, last = part.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    return seeds


def test_seeds_by_name(references: References) -> None:
    seeds = chosen_seeds()
    if not seeds:
        pytest.skip(f"{VARIABLE} names seeds")
    check(seeds, references)


def test_each_request_gets_what_it_gets_alone(references: References) -> None:
    """And steps really were in seats: plainly and with drafts, with all features of requests and rules."""
    seated = check(ALWAYS, references)
    assert seated["launches"] > 200 and seated["accepted"] > 100, seated
    assert seated["none chain"] > 50
    kinds = {kind for kind in seated if kind.endswith((" chain", " tree", " growing", " masks"))}
    assert sum(seated[kind] for kind in kinds) - seated["none chain"] > 200, seated
    assert len(kinds) >= 7 and "hybrid chain" in kinds, seated
    wanted = (
        "greedy",
        "coupled",
        "rejection",
        "block",
        "tempered",
        "truncated",
        "penalised",
        "biased",
        "logprobs",
    )
    assert all(seated[name] for name in wanted), seated


@pytest.mark.slow
def test_many_more(references: References) -> None:
    """Every method as a chain, and as a tree where it drafts trees, had steps in seats."""
    seated = check((seed for seed in range(SLOW) if seed not in ALWAYS), references)
    kinds = [f"{method} chain" for method in ("none", "hybrid", *SEATED)]
    kinds += [f"{method} {shape}" for method in TREES for shape in ("tree", "growing")]
    kinds += ["draft_model masks", "eagle3 masks", "hybrid masks", "hybrid growing", "dflash chain"]
    assert all(seated[kind] > 40 for kind in kinds), seated


def test_drafts_ahead_of_the_blocks_of_a_plan_harm_nobody(
    references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Early exit drafts into the target's storage before a plan gives the blocks: not into block 0, which is
    another's."""
    nothing_is_timed(monkeypatch)
    assert check([AHEAD], references)["early_exit tree"]


def nothing_is_timed(patch: pytest.MonkeyPatch) -> None:
    """For `AHEAD`: control that knows the times of passes at once does not come to draft ahead of a plan."""
    patch.setattr(device, "pass_times", lambda *_: ())


@pytest.mark.parametrize(
    ("fault", "seed"),
    [
        pytest.param(fault, seed, id=fault.__name__, marks=[] if seed in CLEAN else pytest.mark.slow)
        for fault, seed in FAULTS.items()
    ],
)
def test_a_planted_fault_is_found(
    references: References, fault: Callable[[pytest.MonkeyPatch], None], seed: int
) -> None:
    """The engine raises, or somebody does not get what it gets alone. Tests above show the case without the fault."""
    torch.set_num_threads(1)
    case = case_of(seed, references)
    with pytest.MonkeyPatch.context() as patch, pretended_device():
        fault(patch)
        if seed == AHEAD:
            nothing_is_timed(patch)
        try:
            run = run_case(case, references.world)
        except Exception:
            return
    with pytest.raises(AssertionError):
        check_run(case, run, references)
