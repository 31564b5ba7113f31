"""How a GPU's memory is divided, by numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftwise.errors import ConfigError
from draftwise.graphs.memory import MemoryNeeds, plan_memory

GB = 10**9
NEEDS = MemoryNeeds(
    used=16 * GB,
    activations=GB,
    logits=GB // 2,
    drafts=GB // 4,
    graphs=2 * GB,
    fixed=GB // 4,
    block=2 * 10**6,
)


def test_the_cache_gets_what_is_left() -> None:
    plan = plan_memory(80 * GB, 0.9, NEEDS, 10**9)
    # 72 - 16 - 1 - 0.5 - 0.25 - 2 - 0.25 - 1.25 (slack) = 50.75
    assert plan.limit == 72 * GB
    assert plan.num_blocks == 50_750_000_000 // NEEDS.block
    assert plan.planned <= plan.limit < plan.planned + NEEDS.block
    assert plan.cache == plan.num_blocks * NEEDS.block


def test_no_more_than_is_useful() -> None:
    plan = plan_memory(80 * GB, 0.9, NEEDS, 1000)
    assert plan.num_blocks == 1000 and plan.planned < plan.limit


@pytest.mark.parametrize("utilization", [0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("total", [24 * GB, 80 * GB, 141 * GB])
def test_a_plan_keeps_its_limit(total: int, utilization: float) -> None:
    try:
        plan = plan_memory(total, utilization, NEEDS, 10**9)
    except ConfigError:
        assert total * utilization < 22 * GB + total // 64
        return
    assert plan.planned <= int(total * utilization)


def test_more_of_anything_leaves_less() -> None:
    before = plan_memory(80 * GB, 0.9, NEEDS, 10**9).num_blocks
    for name in ("used", "activations", "logits", "drafts", "graphs", "fixed", "block"):
        more = replace(NEEDS, **{name: getattr(NEEDS, name) + GB})
        if name == "block":
            more = replace(NEEDS, block=2 * NEEDS.block)
        assert plan_memory(80 * GB, 0.9, more, 10**9).num_blocks < before, name


def test_no_room_says_what_takes_it() -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization: 0.1 .*used 15258 MiB.*max_num_seqs"):
        plan_memory(80 * GB, 0.1, NEEDS, 10**9)
