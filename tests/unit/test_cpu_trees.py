"""A tree in one native call: the same as level by level, whatever stands beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.tiny import VOCAB, save_llama
from tests.fakes.tree_model import draft_row
from tests.native import native_or_skip

from draftwise.config.trees import DynamicTree
from draftwise.kernels.cpu.ops import NativeOps
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kv.storage import KVStorage
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.loader import load_model
from draftwise.models.recorded import RecordedDecoder
from draftwise.propose.trees.expansion import TreeModel, draft_trees
from draftwise.propose.trees.growth import TreeLevel, TreeTask
from draftwise.propose.trees.native import as_proposal, native_draws
from draftwise.sampling.params import SamplingParams
from draftwise.types import DraftedTree, IntArray, Proposal, TreeDraws

CPU = torch.device("cpu")
BLOCK = 4
TREE = [[0], [1], [3], [0, 0], [0, 2], [3, 0], [0, 0, 0], [0, 0, 0, 1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_llama(tmp_path_factory.mktemp("model"), seed=3)


def load(folder: str, dtype: torch.dtype = torch.float32, threads: int = 2) -> RecordedDecoder:
    ops = NativeOps(native_or_skip(), ThreadPool(native_or_skip(), threads), dtype)
    model = load_model(folder, dtype=dtype, device=CPU, ops=ops)
    assert isinstance(model, RecordedDecoder)
    return model


class LevelByLevel(TreeModel):
    def __init__(self, model: RecordedDecoder, kv: KVStorage, tables: Sequence[IntArray]) -> None:
        self.model, self.kv, self.tables = model, kv, tables

    def expand(self, levels: Sequence[TreeLevel]) -> torch.Tensor:
        inputs = [
            RowInput(
                level.tokens,
                level.task.context_len,
                self.tables[level.member],
                ancestors=level.ancestors,
                tree_start=level.start,
            )
            for level in levels
        ]
        return self.model.forward_logits(build_step_input(inputs, BLOCK, CPU), self.kv)[1]


def requests() -> list[Any]:
    """Rows of several kinds; texts of 1 to 31 tokens."""
    rng = np.random.default_rng(4)
    warm = SamplingParams(temperature=0.8)
    kinds: list[dict[str, Any]] = [
        {"dynamic": DynamicTree(4, 5)},
        {"tree": TREE},
        {"dynamic": DynamicTree(3, 4), "rule": "coupled", "params": warm, "seed": 5},
        {"tree": TREE, "rule": "coupled", "params": warm, "seed": 6},
        {"dynamic": DynamicTree(10, 7)},
        {"dynamic": DynamicTree(63, 2), "rule": "rejection", "params": warm},
        {"tree": [[0]]},
        {"dynamic": DynamicTree(1, 63), "rule": "block", "params": warm},
    ]
    lengths = [9, 1, 16, 31, 12, 5, 8, 2]
    return [
        draft_row(VOCAB, rid=i, tokens=rng.integers(3, VOCAB, n).tolist(), **kind)
        for i, (n, kind) in enumerate(zip(lengths, kinds, strict=True))
    ]


def draft_both(
    model: RecordedDecoder, rows: Sequence[Any], nodes: int
) -> tuple[list[Proposal], list[Proposal]]:
    """At once, and level by level; texts are read in the same pass as the roots."""
    blocks = 32
    tables = [np.arange(i * blocks, (i + 1) * blocks, dtype=np.int32) for i in range(len(rows))]
    tasks = [TreeTask(row, nodes, 63) for row in rows]
    inputs = [RowInput(row.token_ids_np, 0, table) for row, table in zip(rows, tables, strict=True)]
    batch = build_step_input(inputs, BLOCK, CPU)
    last = (batch.attention.query_start_np[1:] - 1).tolist()
    draws = native_draws(tasks, "probabilistic")
    assert draws is not None
    kv = KVStorage(model.kv_layout(), blocks * len(rows), BLOCK, model.dtype, CPU)
    trees = model.draft_trees(batch, kv, last, draws)
    assert trees is not None
    at_once = [as_proposal(task, tree, "test") for task, tree in zip(tasks, trees, strict=True)]
    kv = KVStorage(model.kv_layout(), blocks * len(rows), BLOCK, model.dtype, CPU)
    logits = model.forward_logits(batch, kv, last)[1]
    return at_once, draft_trees(LevelByLevel(model, kv, tables), tasks, logits, name="test")


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("nodes", [63, 15, 1])
@torch.inference_mode()
def test_one_call_equals_level_by_level(folder: str, dtype: torch.dtype, nodes: int) -> None:
    model = load(folder, dtype)
    rows = requests()
    at_once, by_level = draft_both(model, rows, nodes)
    for i, (one, other) in enumerate(zip(at_once, by_level, strict=True)):
        assert one.tokens == other.tokens and one.parents == other.parents, i
    for i, row in enumerate(rows):  # alone, from a table that is a row of nothing else
        assert draft_both(model, [row], nodes)[0][0].tokens == at_once[i].tokens
    if nodes == 63:
        sizes = [len(proposal) for proposal in at_once]
        assert sizes == [63, 8, 30, 8, 63, 63, 1, 63]


def test_a_tree_stands_below_the_forced_tokens() -> None:
    """Forced 9, 8; below them a tree 5 -> 7 and 6: the tree's root is the second forced token."""
    task = TreeTask(draft_row(VOCAB, rid=0, tokens=[3, 4]), 3, 2, forced=(9, 8))
    proposal = as_proposal(task, DraftedTree((5, 6, 7), (-1, -1, 0)), "test")
    assert proposal.tokens == (9, 8, 5, 6, 7)
    assert proposal.parents == (-1, 0, 1, 1, 2)


@torch.inference_mode()
def test_logits_that_are_no_numbers_give_no_tree(folder: str) -> None:
    model = load(folder)
    kv = KVStorage(model.kv_layout(), 8, BLOCK, model.dtype, CPU)
    for layer in range(2):
        for tensor in kv.layer(layer):
            tensor.fill_(float("nan"))
    batch = build_step_input([RowInput([5], 7, np.arange(8, dtype=np.int32))], BLOCK, CPU)
    trees = model.draft_trees(batch, kv, None, [TreeDraws(top_k=4, depth=3, nodes=9)])
    assert trees is not None and list(trees) == [DraftedTree((), ())]
