"""Drafting trees level by level: shapes, numbering, the choice of nodes, what is fed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.tree_model import ScriptedTreeModel, draft_row
from tests.fakes.word_grammar import cursor_over

from draftwise.config.trees import DynamicTree
from draftwise.names import SHARED
from draftwise.propose.trees.expansion import ScratchBlocks, draft_trees
from draftwise.propose.trees.growth import TreeTask
from draftwise.sampling.noise import NoiseKey, gumbel
from draftwise.sampling.params import SamplingParams
from draftwise.types import Proposal

VOCAB = 9


def table(seed: int, vocab: int = VOCAB, spread: float = 1.5) -> torch.Tensor:
    return torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def draft(
    model: ScriptedTreeModel, *tasks: TreeTask, vocab_map: torch.Tensor | None = None, method: Any = None
) -> list[Proposal]:
    logits = model.root_logits(tasks)
    return draft_trees(
        model, tasks, logits, name="test", vocab_map=vocab_map, method=method or "probabilistic"
    )


def paths(proposal: Proposal) -> list[tuple[int, ...]]:
    out: list[tuple[int, ...]] = []
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        out.append((*(out[parent] if parent >= 0 else ()), token))
    return out


# ------------------------------------------------------------------------------------------------ dynamic


def eagle2(
    logp: torch.Tensor, root: int, top_k: int, depth: int, nodes: int
) -> tuple[list[tuple[int, ...]], int]:
    """The algorithm of the paper as it is written there: expand without looking at what can still win, keep all
    candidates, rerank. Returns the paths of the chosen nodes, best first, and how many nodes were expanded."""
    candidates: list[tuple[float, tuple[int, ...]]] = []
    frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    fed = 0
    for level in range(depth):
        new = []
        for score, path in frontier:
            row = logp[path[-1] if path else root]
            for token in row.topk(top_k).indices.tolist():
                new.append((score + float(row[token]), (*path, token)))
        fed += len(frontier) if level else 0
        candidates += new
        frontier = sorted(new, key=lambda c: -c[0])[:top_k]
    candidates.sort(key=lambda c: -c[0])
    return [path for _, path in candidates[:nodes]], fed


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    top_k=st.integers(1, 8),
    depth=st.integers(1, 7),
    nodes=st.integers(1, 63),
    spread=st.sampled_from([0.3, 1.5, 5.0]),
)
def test_dynamic_trees_are_the_paper_s(seed: int, top_k: int, depth: int, nodes: int, spread: float) -> None:
    model = ScriptedTreeModel(table(seed, spread=spread))
    row = draft_row(VOCAB, tokens=(3,), dynamic=DynamicTree(top_k, depth))
    (proposal,) = draft(model, TreeTask(row, nodes, 63))
    logp = model.table.double().log_softmax(-1)
    wanted, fed = eagle2(logp, 3, top_k, depth, nodes)
    found = paths(proposal)
    # the same nodes, up to ties within rounding; parents first is what `paths` relies on
    assert len(found) == len(wanted) and len(set(found)) == len(found)

    def score(path: tuple[int, ...]) -> float:
        return sum(float(logp[a, b]) for a, b in zip((3, *path), path, strict=False))

    for a, b in zip(found, wanted, strict=True):
        assert score(a) == pytest.approx(score(b), abs=1e-4)
    assert proposal.q is None and proposal.draw == "fixed"
    assert model.num_fed <= fed, "nodes that cannot win are not expanded"
    assert len(model.levels) < depth
    for n in range(len(found)):
        assert {path[:-1] for path in found[:n]} <= {(), *found[:n]}, "any prefix is a tree"


def test_confident_drafter_expands_little() -> None:
    model = ScriptedTreeModel(table(1, spread=30.0))
    row = draft_row(VOCAB, dynamic=DynamicTree(8, 6))
    (proposal,) = draft(model, TreeTask(row, 6, 63))
    assert proposal.is_chain and len(proposal) == 6
    assert model.num_fed <= 12, "of 40: most were beaten by what was there already"


def test_a_depth_limit_and_a_budget_shape_dynamic_trees() -> None:
    model = ScriptedTreeModel(table(5))
    row = draft_row(VOCAB, dynamic=DynamicTree(4, 6))
    (shallow,) = draft(model, TreeTask(row, 20, 2))
    assert max(shallow.depths()) == 2 and len(shallow) == 20
    (one,) = draft(ScriptedTreeModel(table(5)), TreeTask(row, 1, 63))
    assert one.tokens == (int(table(5)[0].argmax()),)


def test_dynamic_children_at_a_temperature() -> None:
    """Rules that keep a draft with probability p(x): q at the temperature; excluded tokens are never children."""
    params = SamplingParams(temperature=0.5, top_k=2)
    model = ScriptedTreeModel(table(2))
    row = draft_row(VOCAB, rule="rejection", params=params, dynamic=DynamicTree(4, 3))
    (proposal,) = draft(model, TreeTask(row, 30, 63))
    assert len(proposal) == 2 + 4 + 8, "two tokens have probability after each node"
    assert proposal.q is None
    q = (model.table / 0.5).log_softmax(-1)
    best = q[0].topk(2).indices.tolist()
    assert {t for t, parent in zip(proposal.tokens, proposal.parents, strict=True) if parent < 0} == set(best)


def test_coupled_dynamic_children_follow_the_shared_noise() -> None:
    model = ScriptedTreeModel(table(7))
    params = SamplingParams(temperature=0.7)
    row = draft_row(VOCAB, tokens=(0, 4), rule="coupled", params=params, seed=99, dynamic=DynamicTree(3, 2))
    (proposal,) = draft(model, TreeTask(row, 12, 63))
    noise = gumbel([NoiseKey(99, 0, SHARED, 2), NoiseKey(99, 0, SHARED, 3)], VOCAB)
    first = (model.table[4] / 0.7 + noise[0]) * 0.7
    children = first.topk(3).indices.tolist()
    level = [(t, float(first.log_softmax(-1)[t])) for t in children]
    wanted = {(t,): s for t, s in level}
    for token, score in level:
        second = ((model.table[token] / 0.7 + noise[1]) * 0.7).log_softmax(-1)
        wanted |= {(token, t): score + float(second[t]) for t in second.topk(3).indices.tolist()}
    ordered = sorted(wanted, key=lambda path: -wanted[path])
    assert paths(proposal) == ordered[: len(proposal)] and len(proposal) == 12


# ------------------------------------------------------------------------------------------------- static

SHAPE = [[0], [1], [3], [0, 0], [0, 2], [1, 0], [0, 0, 0], [0, 2, 1]]


def test_static_trees_take_children_by_rank() -> None:
    model = ScriptedTreeModel(table(11))
    row = draft_row(VOCAB, tokens=(5,), tree=SHAPE)
    (proposal,) = draft(model, TreeTask(row, 63, 63))
    assert proposal.parents == row.speculation.tree
    order = model.table.argsort(dim=-1, descending=True)

    def token(path: list[int]) -> int:
        return int(order[token(path[:-1]) if len(path) > 1 else 5][path[-1]])

    assert proposal.tokens == tuple(token(path) for path in SHAPE)
    assert [sum(len(level.tokens) for level in levels) for levels in model.levels] == [2, 2]
    assert len(model.levels) == 2, "leaves are not fed"


def test_a_static_tree_is_cut_by_budget_and_depth_alone() -> None:
    for nodes in range(1, len(SHAPE) + 1):
        for depth in (1, 2, 3):
            model = ScriptedTreeModel(table(11))
            (whole,) = draft(model, TreeTask(draft_row(VOCAB, tree=SHAPE), 63, 63))
            model = ScriptedTreeModel(table(11))
            (cut,) = draft(model, TreeTask(draft_row(VOCAB, tree=SHAPE), nodes, depth))
            kept = [p for p, d in zip(paths(whole)[:nodes], whole.depths(), strict=False) if d <= depth]
            assert paths(cut) == kept


def test_sampled_children_stand_in_drawing_order() -> None:
    """Ranks [0], [1], [3] are the first three drawn, not the fourth: without replacement the third to be tried has
    the third one's distribution."""
    params = SamplingParams()
    row = draft_row(VOCAB, rule="rejection", params=params, seed=4, tree=SHAPE)
    dense = draft_row(
        VOCAB,
        rule="rejection",
        params=params,
        seed=4,
        tree=[[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0]],
    )
    (sparse,) = draft(ScriptedTreeModel(table(3)), TreeTask(row, 63, 63))
    (same,) = draft(ScriptedTreeModel(table(3)), TreeTask(dense, 63, 63))
    assert sparse.tokens == same.tokens and sparse.parents == same.parents
    assert sparse.draw == "without_replacement" and sparse.q is not None
    q = table(3).softmax(-1)
    for node, parent in enumerate(sparse.parents):
        above = sparse.tokens[parent] if parent >= 0 else 0
        assert torch.equal(sparse.q[sparse.q_rows[node]], q[above])


def test_nodes_that_cannot_be_drawn_are_missing_with_all_below() -> None:
    params = SamplingParams(top_k=2)
    for rule in ("rejection", "coupled"):
        row = draft_row(VOCAB, rule=rule, params=params, seed=4, tree=[[0], [1], [2], [2, 0], [1, 0]])
        (proposal,) = draft(ScriptedTreeModel(table(3)), TreeTask(row, 63, 63))
        assert proposal.parents == (-1, -1, 1)


# ------------------------------------------------------------------------------------------------ together


def test_trees_of_different_shapes_share_their_passes() -> None:
    """Each request's tree is what it would be alone; a level is one pass for all."""
    params = SamplingParams()
    rows = [
        draft_row(VOCAB, rid=0, tokens=(1,), tree=SHAPE),
        draft_row(VOCAB, rid=1, tokens=(2,), dynamic=DynamicTree(3, 5)),
        draft_row(
            VOCAB, rid=2, tokens=(3,), rule="rejection", params=params, seed=1, tree=[[0], [1], [0, 0]]
        ),
        draft_row(
            VOCAB, rid=3, tokens=(4,), rule="coupled", params=params, seed=2, dynamic=DynamicTree(2, 3)
        ),
        draft_row(VOCAB, rid=4, tokens=(5,), tree=[[0]]),
        draft_row(VOCAB, rid=5, tokens=(6,), rule="block", params=params, seed=3, dynamic=DynamicTree(4, 2)),
    ]
    tasks = [TreeTask(row, 14, 9) for row in rows]
    model = ScriptedTreeModel(table(6))
    together = draft(model, *tasks)
    alone = []
    passes = []
    for task in tasks:
        single = ScriptedTreeModel(table(6))
        alone += draft(single, task)
        passes.append(len(single.levels))
    for one, other in zip(together, alone, strict=True):
        assert one.tokens == other.tokens and one.parents == other.parents and one.draw == other.draw
        assert (one.q is None) == (other.q is None)
        if one.q is not None and other.q is not None:
            assert torch.equal(one.q, other.q)
    assert len(model.levels) == max(passes)


@pytest.mark.parametrize("shape", ["static", "dynamic"])
@pytest.mark.parametrize("rule", ["greedy", "rejection"])
def test_forced_tokens_come_first(shape: str, rule: str) -> None:
    params = SamplingParams(temperature=0.0 if rule == "greedy" else 1.0)
    kind: dict[str, Any] = (
        {"tree": [[0], [1], [0, 0]]} if shape == "static" else {"dynamic": DynamicTree(2, 2)}
    )
    row = draft_row(VOCAB, rule=rule, params=params, forced=(7, 2), **kind)
    task = TreeTask(row, 3, 5, row.forced)
    assert task.context_len == 3
    (proposal,) = draft(ScriptedTreeModel(table(8)), task)
    assert proposal.tokens[:2] == (7, 2) and proposal.parents[:3] == (-1, 0, 1)
    assert len(proposal) == 5 and min(proposal.parents[2:]) == 1
    if proposal.q is not None:
        assert proposal.q[proposal.q_rows[0]].argmax() == 7 and float(proposal.q[0, 7]) == 1.0
        assert torch.equal(proposal.q[proposal.q_rows[2]], table(8).softmax(-1)[2])
    else:
        assert shape == "dynamic" or rule == "greedy"


@pytest.mark.parametrize("kind", [{"tree": SHAPE}, {"dynamic": DynamicTree(3, 3)}], ids=["static", "dynamic"])
@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection"])
def test_a_reduced_vocabulary_drafts_target_ids(kind: dict[str, Any], rule: str) -> None:
    """The drafter's columns stand for target tokens 1, 4, 5, 8; fed tokens and the tree are target ids."""
    vocab_map = torch.tensor([1, 4, 5, 8])
    full = table(12)
    model = ScriptedTreeModel(full[:, vocab_map])
    row = draft_row(VOCAB, rule=rule, seed=5, **kind)
    (proposal,) = draft(model, TreeTask(row, 20, 9), vocab_map=vocab_map)
    assert set(proposal.tokens) <= set(vocab_map.tolist())
    inner = full.clone()
    inner[:, [t for t in range(VOCAB) if t not in vocab_map.tolist()]] = -math.inf
    (wanted,) = draft(ScriptedTreeModel(inner), TreeTask(row, 20, 9))
    assert proposal.tokens == wanted.tokens and proposal.parents == wanted.parents
    if proposal.q is not None:
        assert wanted.q is not None
        torch.testing.assert_close(proposal.q, wanted.q)


@pytest.mark.parametrize("kind", [{"tree": SHAPE}, {"dynamic": DynamicTree(3, 3)}], ids=["static", "dynamic"])
@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection"])
@pytest.mark.parametrize("mapped", [False, True])
def test_children_are_drawn_under_the_grammar(kind: dict[str, Any], rule: str, mapped: bool) -> None:
    words = ((1, 2, 3), (1, 4, 3), (2, 2, 3), (5, 6, 7), (1, 2, 5))
    row = draft_row(VOCAB, rule=rule, seed=6, grammar=cursor_over(words, VOCAB), **kind)
    vocab_map = torch.arange(VOCAB) if mapped else None
    (proposal,) = draft(ScriptedTreeModel(table(13)), TreeTask(row, 20, 3), vocab_map=vocab_map)
    assert len(proposal) >= 4
    for path in paths(proposal):
        assert any(word[: len(path)] == path for word in words)


def test_greedy_draft_method_ignores_the_temperature() -> None:
    params = SamplingParams(temperature=0.8)
    row = draft_row(VOCAB, rule="rejection", params=params, seed=1, tree=SHAPE)
    (proposal,) = draft(ScriptedTreeModel(table(3)), TreeTask(row, 63, 63), method="greedy")
    (greedy,) = draft(ScriptedTreeModel(table(3)), TreeTask(draft_row(VOCAB, tree=SHAPE), 63, 63))
    assert proposal.tokens == greedy.tokens and proposal.q is None


# ------------------------------------------------------------------------------------------------- scratch


def test_scratch_blocks_follow_the_request_s_own() -> None:
    scratch = ScratchBlocks(num_blocks=90, block_size=16, max_num_seqs=3)
    assert (scratch.num_requests, scratch.count) == (3, 12)
    own_np = np.array([7, 2, 5], np.int32)
    assert scratch.table(0, own_np).tolist() == [7, 2, 5, 90, 91, 92, 93]
    assert scratch.table(2, own_np).tolist() == [7, 2, 5, 98, 99, 100, 101]
    assert ScratchBlocks(10, 4, 1000).count == 16 * 16
    # 64 fed nodes fit wherever the committed tokens end
    for tokens in (1, 15, 16, 17):
        blocks = len(scratch.table(0, np.arange(-(-tokens // 16), dtype=np.int32)))
        assert blocks * 16 >= tokens + 64
