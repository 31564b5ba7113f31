"""How a GPU's memory is divided, by numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from tests.fakes.tiny import save_llama

from draftwise.engine.gpu_memory import plan_gpu
from draftwise.errors import ConfigError
from draftwise.graphs.backend import Rerun
from draftwise.graphs.buffers import PassBuffers, Shape, Tables
from draftwise.graphs.capture import Captures
from draftwise.graphs.loop import Drafter, LoopMemory
from draftwise.graphs.memory import MemoryNeeds, plan_memory
from draftwise.graphs.plans import TreePlan
from draftwise.graphs.trees import TreeLoop
from draftwise.kv.storage import KVStorage
from draftwise.models.loader import load_model
from draftwise.types import StepInput, TreeShape

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


def test_a_gpu_is_measured_and_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a device whose allocator is made up: 5 MB more at the peak of the one pass that is run."""
    model = load_model(save_llama(tmp_path, seed=3), dtype=torch.float32, device=torch.device("cpu"))
    passes: list[tuple[int, int]] = []
    forward = model.forward_logits

    def counted(batch: StepInput, kv: KVStorage, rows: Sequence[int] | None = None) -> object:
        assert rows is not None
        passes.append((len(batch.token_ids), len(rows)))
        return forward(batch, kv, rows)

    monkeypatch.setattr(model, "forward_logits", counted)
    answers = {
        "synchronize": None,
        "reset_peak_memory_stats": None,
        "empty_cache": None,
        "memory_allocated": 10**6,
        "max_memory_allocated": 6 * 10**6,
        "mem_get_info": (60 * 10**6, 100 * 10**6),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, answer=answer: answer)
    plan = plan_gpu(
        model,
        utilization=0.9,
        rows=100,
        logit_rows=20,
        block_size=16,
        block_bytes=10**5,
        fixed=10**6,
        drafter_bytes=10**6,
        num_graphs=2,
        most_blocks=1000,
    )
    assert passes == [(100, 20)]
    # 90 - 40 used - 5 - 1 - 1 - (5 + 2 * 4 MiB) for graphs - 100 / 64
    left = 90 * 10**6 - 52 * 10**6 - 2 * (4 << 20) - 100 * 10**6 // 64
    assert plan.num_blocks == left // 10**5


def _device_bytes(kept: Iterable[object], host: torch.Tensor | None = None) -> int:
    """Bytes of all tensors among ``kept``, each storage once, without ``host``."""
    storages = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for one in kept
        if isinstance(one, torch.Tensor) and one.numel()
    }
    if host is not None:
        del storages[host.untyped_storage().data_ptr()]
    return sum(storages.values())


@pytest.mark.parametrize(
    "plan",
    [
        TreePlan(TreeShape((-1, -1, 0, 1, 3), (0, 1, 0, 0, 0))),
        TreePlan(TreeShape((-1, -1, -1), (0, 1, 2))),
        TreePlan(top_k=3, depth=4, nodes=9),
        TreePlan(top_k=2, depth=1, nodes=6),
    ],
    ids=["static", "one level", "dynamic", "one dynamic level"],
)
def test_the_plan_counts_what_loops_of_trees_keep(plan: TreePlan) -> None:
    """Every tensor that the loops make, of all sizes and kinds."""
    captures = Captures((), (Shape(1, 2, 40), Shape(3, 4, 40)), tree=plan)
    backend = Rerun(torch.device("cpu"))
    drafter = Drafter(None, torch.clone, vocab_size=23, max_position=39, feature_size=5)
    memory = LoopMemory(captures.loops, captures.steps, drafter, backend.device, captures.draws)
    shared = [memory.tokens, memory.q, memory.counters, memory.features]
    taken = _device_bytes(shared)
    for shape in captures.loops:
        rows = PassBuffers(shape, Tables(3, 40, 4, 0, backend))
        for kind in plan.kinds:
            loop = TreeLoop(plan, kind, drafter, rows, memory)
            own = vars(loop) | loop.seats._asdict()
            own = {n: x for n, x in own.items() if n not in ("features", "_counters", "q", "bias")}
            parts = [getattr(x, f.name) for x in (*loop._levels, *loop._children) for f in fields(x)]
            taken += _device_bytes([*own.values(), *own.get("_found", ()), *parts], loop._host)
    assert captures.loop_bytes(23, 5 * 4) == taken


def test_the_plan_counts_what_goes_into_the_layers_of_a_head() -> None:
    """Loops of 2 and 3 requests with 4 and 2 rows: 2 x 3 vectors that are carried, 10 and 12 rows of layers 1 and 2."""
    captures = Captures((), (Shape(2, 4, 40), Shape(3, 2, 40)), steps=3)
    device = torch.device("cpu")
    drafter = Drafter(None, torch.clone, 23, max_position=39, feature_size=5, deeper=(lambda *x: x,) * 2)  # type: ignore[arg-type,return-value]
    memory = LoopMemory(captures.loops, 3, drafter, device, 3)
    assert [len(part) for part in memory.deeper] == [6, 10, 12]
    kept = [memory.tokens, memory.q, memory.counters, memory.features, *memory.deeper]
    assert captures.loop_bytes(23, 5 * 4, depths=3) == _device_bytes(kept)
