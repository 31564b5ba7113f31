"""Trees that a model drafts in one call: what it has to know (`TreeDraws`), and proposals of what it found."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from draftwise.names import SHARED
from draftwise.propose.base import DraftRow
from draftwise.propose.chains import chain_kind
from draftwise.propose.trees.growth import TreeTask
from draftwise.sampling.draw import DraftSampleMethod, draws_from_q
from draftwise.sampling.noise import NoiseKey, gumbel
from draftwise.types import EMPTY_PROPOSAL, DraftedTree, Proposal, TreeDraws, TreeShape


def native_draws(
    tasks: Sequence[TreeTask],
    *,
    vocab_size: int,
    method: DraftSampleMethod,
    vocab_map: torch.Tensor | None = None,
) -> list[TreeDraws] | None:
    """What `DecoderModel.draft_trees` needs to draft these trees as `draft_trees` would, if it can: nothing stands
    between its passes but a choice of fixed children at a temperature. What min_p, top_k and top_p exclude is chosen
    last, and only fills up; penalties are the target's alone, as in `chains.alike`.

    ``vocab_size``: the target's."""
    if not all(_is_plain(task.row, method) for task in tasks):
        return None
    return [_native_draw(task, vocab_size, method, vocab_map) for task in tasks]


def _is_plain(row: DraftRow, method: DraftSampleMethod) -> bool:
    if row.sampling.steers or row.grammar is not None:
        return False
    sampled = row.speculation.dynamic is None and draws_from_q(row.sampling, row.speculation.rule, method)
    return not sampled


def _native_draw(
    task: TreeTask, vocab_size: int, method: DraftSampleMethod, vocab_map: torch.Tensor | None
) -> TreeDraws:
    row, speculation = task.row, task.row.speculation
    state, dynamic = row.sampling, speculation.dynamic
    shape = None
    levels = task.depth
    if dynamic is None:
        assert speculation.tree is not None
        shape = _cut_shape(speculation.tree, speculation.tree_ranks, task.nodes, task.depth)
        levels = min(levels, len(shape.parents))
    else:
        levels = min(levels, dynamic.depth)
    scale, noise_scale, noise = 1.0 / state.temperature, 0.0, None
    if chain_kind(row, method) == "coupled":
        # T * (logits / T + g), see `sampling.draw.draft_candidates`
        scale, noise_scale = 1.0, state.temperature
        keys = [
            NoiseKey(state.seed, state.sample_index, SHARED, task.context_len + level)
            for level in range(levels)
        ]
        noise = gumbel(keys, vocab_size, token_ids=vocab_map)
    if dynamic is None:
        return TreeDraws(scale, noise_scale, noise, shape)
    return TreeDraws(scale, noise_scale, noise, None, dynamic.top_k, levels, task.nodes)


@functools.lru_cache(maxsize=256)
def _cut_shape(parents: tuple[int, ...], ranks: tuple[int, ...] | None, nodes: int, depth: int) -> TreeShape:
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


def as_proposal(task: TreeTask, tree: DraftedTree, name: str) -> Proposal:
    """A tree of fixed children behind the task's forced tokens."""
    before = len(task.forced)
    if not before:
        return Proposal(tree.tokens, tree.parents, name) if tree.tokens else EMPTY_PROPOSAL
    parents = (*range(-1, before - 1), *(parent + before for parent in tree.parents))
    return Proposal((*task.forced, *tree.tokens), parents, name)
