"""Trees that a model drafts in one call: what it has to know (`TreeDraws`), and proposals of what it found."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from typing import TypeVar

from draftwise.kernels.cpu.book_drafts import ANY_LENGTH, BookTree
from draftwise.propose.base import DraftRow
from draftwise.propose.chains import ChainDraft, ChainKind, chain_kind, kind_of_columns
from draftwise.propose.columns import DraftColumns
from draftwise.propose.trees.growth import TreeTask
from draftwise.sampling.draw import DraftSampleMethod, draws_from_q
from draftwise.sampling.state import SamplingState
from draftwise.types import EMPTY_PROPOSAL, DraftedTree, Proposal, TreeDraws, TreeShape, new_record

D = TypeVar("D", bound=ChainDraft)


def native_draws(tasks: Sequence[TreeTask], method: DraftSampleMethod) -> list[TreeDraws] | None:
    """The inputs of `DecoderModel.draft_trees` to draft these trees as `draft_trees` would, if it can: nothing stands
    between its passes but a choice of fixed children at a temperature. What min_p, top_k and top_p exclude is chosen
    last, and only fills up; penalties are the target's alone, as in `chains.alike`."""
    if not all(_is_plain(task.row, method) for task in tasks):
        return None
    return [_native_draw(task, method) for task in tasks]


def forest_draws(
    rows: Sequence[DraftRow],
    method: DraftSampleMethod,
    max_len: int,
    block_size: int,
    most: int = ANY_LENGTH,
) -> tuple[list[TreeDraws], bool] | None:
    """`native_draws` of rows without a task for each, at most ``most`` levels deep, and whether they need scratch
    blocks. A static tree with room in its request's own blocks needs none. None: not all rows want trees that can be
    drafted so."""
    found: list[TreeDraws] = []
    scratch = False
    tree: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None
    cut = 0, 0
    shape: TreeShape | None = None
    size = 0
    for row in rows:
        speculation, state = row.speculation, row.sampling
        dynamic = speculation.dynamic
        if (
            (speculation.tree is None and dynamic is None)
            or state.steers
            or row.forced
            or row.grammar is not None
        ):
            return None
        known, budget = len(row.token_ids_np), row.budget
        slots = len(row.block_table_np) * block_size
        # as `longest_chain`, whose exceptions are all lengths below 1
        depth = min(budget, row.max_depth, max_len - known + 1, slots - known + 1, most)
        if depth < 1:
            return None
        if dynamic is not None:
            scratch = True
            levels = min(depth, dynamic.depth)
            found.append(_of_state(row, method, None, dynamic.top_k, levels, budget))
            continue
        if (
            shape is None
            or (budget, depth) != cut
            or speculation.tree is not tree
            or speculation.tree_ranks is not ranks
        ):
            tree, ranks, cut = speculation.tree, speculation.tree_ranks, (budget, depth)
            assert tree is not None
            shape = cut_shape(tree, ranks, budget, depth)
            size = len(shape.parents)
        if known + size > slots:
            scratch = True
        if state.is_greedy:
            found.append(new_record(TreeDraws, (1.0, 0.0, 0, 0, shape, 1, 1, 1)))
            continue
        if draws_from_q(state, speculation.rule, method):
            return None
        found.append(_of_state(row, method, shape))
    return found, scratch


def book_tree(columns: DraftColumns, method: DraftSampleMethod) -> BookTree | None:
    """`forest_draws` of requests in columns, which want trees: what native code is told of all of them."""
    speculation, dynamic = columns.speculation, columns.speculation.dynamic
    noise: array[float] | None = None
    if not columns.greedy:
        if dynamic is None and draws_from_q(columns.first_state, speculation.rule, method):
            return None
        if kind_of_columns(columns, method) == "coupled":
            noise = array("f", [state.temperature for state in columns.states()])
    if dynamic is not None:
        return BookTree(top_k=dynamic.top_k, depth=dynamic.depth, noise=noise)
    assert speculation.tree is not None
    return BookTree(speculation.tree, speculation.tree_ranks, noise=noise)


def by_passes(drafts: Sequence[D], method: DraftSampleMethod) -> list[list[D]]:
    """Those whose trees can be drafted in one call (`native_draws`), and the others: who drafts beside whom changes no
    draft."""
    groups: tuple[list[D], list[D]] = ([], [])
    for draft in drafts:
        groups[not _is_plain(draft.row, method)].append(draft)
    return [group for group in groups if group]


def _is_plain(row: DraftRow, method: DraftSampleMethod) -> bool:
    if row.sampling.steers or row.grammar is not None:
        return False
    sampled = row.speculation.dynamic is None and draws_from_q(row.sampling, row.speculation.rule, method)
    return not sampled


def _native_draw(task: TreeTask, method: DraftSampleMethod) -> TreeDraws:
    dynamic = task.row.speculation.dynamic
    if dynamic is not None:
        levels = min(task.depth, dynamic.depth)
        return _of_state(task.row, method, None, dynamic.top_k, levels, task.nodes)
    speculation = task.row.speculation
    assert speculation.tree is not None
    return _of_state(
        task.row, method, cut_shape(speculation.tree, speculation.tree_ranks, task.nodes, task.depth)
    )


def _of_state(
    row: DraftRow,
    method: DraftSampleMethod,
    shape: TreeShape | None,
    top_k: int = 1,
    depth: int = 1,
    nodes: int = 1,
) -> TreeDraws:
    """With the request's temperature, and its noise where it reads some."""
    return _draws(row.sampling, chain_kind(row, method), shape, top_k, depth, nodes)


def _draws(
    state: SamplingState | None,
    kind: ChainKind,
    shape: TreeShape | None,
    top_k: int = 1,
    depth: int = 1,
    nodes: int = 1,
) -> TreeDraws:
    """``state``: None: at temperature 1, without noise."""
    drawn = 1.0, 0.0, 0, 0
    if state is not None and kind == "coupled":
        # T * (logits / T + g), see `sampling.draw.draft_candidates`
        drawn = 1.0, state.temperature, state.seed, state.sample_index
    elif state is not None:
        drawn = 1.0 / state.temperature, 0.0, 0, 0
    return new_record(TreeDraws, (*drawn, shape, top_k, depth, nodes))


@functools.lru_cache(maxsize=256)
def cut_shape(parents: tuple[int, ...], ranks: tuple[int, ...] | None, nodes: int, depth: int) -> TreeShape:
    """The first ``nodes`` nodes of a static tree, without those that are too deep.

    Example: parents (-1, 0, 1, -1, 3), five nodes, depth 2: (-1, 0, -1, 2).
    """
    index = {-1: -1}
    depths = {-1: 0}
    kept_parents: list[int] = []
    kept_ranks: list[int] = []
    for node, parent in enumerate(parents[:nodes]):
        depths[node] = depths[parent] + 1
        if depths[node] > depth:
            continue
        index[node] = len(kept_parents)
        kept_ranks.append(ranks[node] if ranks is not None else kept_parents.count(index[parent]))
        kept_parents.append(index[parent])
    return TreeShape(tuple(kept_parents), tuple(kept_ranks))


def tree_proposals(trees: Sequence[DraftedTree], name: str) -> list[Proposal]:
    """Trees of fixed children, behind no forced tokens."""
    return [Proposal(tokens, parents, name) if tokens else EMPTY_PROPOSAL for tokens, parents in trees]


def as_proposal(task: TreeTask, tree: DraftedTree, name: str) -> Proposal:
    """A tree of fixed children behind the task's forced tokens."""
    before = len(task.forced)
    if not before:
        return tree_proposals([tree], name)[0]
    parents = (*range(-1, before - 1), *(parent + before for parent in tree.parents))
    return Proposal((*task.forced, *tree.tokens), parents, name)
