"""Drafting trees level by level: one forward pass per level for all requests, static and dynamic trees side by side.

A drafter that can read its own drafts becomes a `TreeModel`; `draft_trees` asks it for logits and decides what the
nodes are. Dynamic trees: Li et al., *EAGLE-2* (arXiv:2406.16858), section 4. See docs/algorithms/trees.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from draftwise.kernels.cpu.book_drafts import Scratch
from draftwise.names import MAX_FED_NODES
from draftwise.propose.base import DraftRow
from draftwise.propose.trees.growth import GrowingTree, ScoredTree, StaticTree, TreeLevel, TreeTask
from draftwise.sampling.draw import DraftSampleMethod, draft_candidates, draft_children, draws_from_q
from draftwise.sampling.logits import LogitsRow
from draftwise.structured.cursor import Cursor, mask_drafts
from draftwise.types import IntArray, Proposal

SCRATCH_REQUESTS = 16
"""Requests whose trees are expanded together; more take turns. Each has scratch blocks for `MAX_FED_NODES` nodes."""


def is_tree(row: DraftRow) -> bool:
    """Whether the request wants a tree, static or dynamic, and not a chain."""
    return row.speculation.tree is not None or row.speculation.dynamic is not None


class TreeModel(ABC):
    """The interface of a drafter for expansion."""

    @abstractmethod
    def expand(self, levels: Sequence[TreeLevel]) -> torch.Tensor:
        """Feed the nodes of a level, of several requests: raw logits behind each node [sum of m, Vd] float32, requests
        in the order given. Levels of a request come in rising order; one that is missing has no more nodes."""


class ScratchBlocks:
    """Blocks of a drafter's own storage behind those of the cache, for nodes that are expanded and not verified.

    A request's slots reserved ahead have room for the nodes that are verified; what exceeds them goes into scratch
    blocks, which follow the request's own blocks in its table while it drafts.

    Example: block size 4, 10 tokens in blocks (7, 2, 5), scratch blocks (90, 91): the tree's first node has key 10, in
    block 5; the third key 12, the first of block 90.

    Request number i of those that draft together has blocks ``first + i * each`` and on. Requests in seats on the
    device draft all at once, between others' drafts: they share out the same blocks, see `seats`.
    """

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int, fed: int = 0) -> None:
        """``num_blocks``: of the cache; ``max_num_seqs``: requests that may draft at once; ``fed``: nodes that captured
        loops feed of each of them, see `Captures.fed`."""
        self.first = num_blocks
        self.each = -(-MAX_FED_NODES // block_size)
        self.num_requests = min(SCRATCH_REQUESTS, max_num_seqs)
        size = -(-fed // block_size)
        self.seats = [
            range(first, first + size)
            for first in range(num_blocks, num_blocks + size * max_num_seqs, max(size, 1))
        ]
        """Blocks of each request that may have a seat; none, if nothing was captured that needs them."""
        own = self.each * self.num_requests
        self.count = max(own, size * max_num_seqs)
        self._own_np = np.arange(num_blocks, num_blocks + own, dtype=np.int32).reshape(-1, self.each)

    def table(self, member: int, block_table_np: IntArray) -> IntArray:
        """The request's blocks, then scratch ones: [blocks + scratch]. ``member``: its number among those that draft
        together, below ``num_requests``."""
        return np.concatenate((block_table_np, self._own_np[member]))

    def of_books(self) -> Scratch:
        """The same blocks, for native code."""
        return Scratch(self.first, self.each, self.num_requests)


def draft_trees(
    model: TreeModel,
    tasks: Sequence[TreeTask],
    logits: torch.Tensor,
    *,
    name: str,
    method: DraftSampleMethod = "probabilistic",
    vocab_map: torch.Tensor | None = None,
) -> list[Proposal]:
    """Draft one tree per task.

    Static trees: a node's children are the first of a sample without replacement where the request's rule looks
    at q, else its best tokens by rank. Dynamic trees: fixed children, chosen by the product of the drafter's
    probabilities along the path.

    Args:
        model: runs the passes; all nodes of a level, of all requests, in one.
        tasks: R of them.
        logits: [R, Vd] float, raw, behind each task's forced tokens (or last committed one).
        name: the method, for the proposals.
        method: "greedy" takes the drafter's most likely tokens whatever the temperature.
        vocab_map: int64 [Vd], the target's id of each of the drafter's tokens; None: the same.

    Returns:
        One proposal per task, at most ``len(forced) + nodes`` nodes.
    """
    static: list[StaticTree] = []
    dynamic: list[ScoredTree] = []
    for member, task in enumerate(tasks):
        speculation = task.row.speculation
        if speculation.dynamic is not None:
            dynamic.append(ScoredTree(member, task, speculation.dynamic))
        else:
            static.append(StaticTree(member, task, draws_from_q(task.row.sampling, speculation.rule, method)))
    if static and dynamic:
        logits = logits[[tree.member for tree in (*static, *dynamic)]]
    while True:
        rows = _logits_rows([*static, *dynamic], logits, vocab_map)
        split = sum(len(tree.open) for tree in static)
        if split:
            _draw_static(static, logits[:split], rows[:split], method, vocab_map)
        if split < len(rows):
            _draw_dynamic(dynamic, logits[split:], rows[split:], method, vocab_map)
        levels = [level for tree in (*static, *dynamic) if (level := tree.next_level()) is not None]
        if not levels:
            break
        logits = model.expand(levels)
    proposals = {tree.member: tree.proposal(name) for tree in (*static, *dynamic)}
    return [proposals[member] for member in range(len(tasks))]


def _logits_rows(
    trees: Sequence[GrowingTree], logits: torch.Tensor, vocab_map: torch.Tensor | None
) -> list[LogitsRow]:
    """The rows of all open nodes for `sampling.draw`. Grammar masks are applied to ``logits`` at once
    where its columns are the target's tokens, else left to the rows."""
    out: list[LogitsRow] = []
    cursors: list[Cursor | None] = []
    paths: list[tuple[int, ...]] = []
    for tree in trees:
        row = tree.task.row
        grammar = row.grammar
        for node in tree.open:
            path = tree.path(node) if grammar is not None or row.sampling.needs_history else ()
            mask = None
            if grammar is not None and vocab_map is not None:
                mask = grammar.mask(path, logits.device)
            out.append(LogitsRow(row.sampling, path, row.token_ids_np, mask))
            cursors.append(grammar)
            paths.append(path)
    if vocab_map is None:
        mask_drafts(logits, cursors, paths)
    return out


def _draw_static(
    trees: Sequence[StaticTree],
    logits: torch.Tensor,
    rows: Sequence[LogitsRow],
    method: DraftSampleMethod,
    vocab_map: torch.Tensor | None,
) -> None:
    """Draw the children of static trees' open nodes."""
    members = [(tree, node) for tree in trees for node in tree.open]
    children = draft_children(
        logits,
        rows,
        rules=[tree.task.row.speculation.rule for tree, _ in members],
        positions=[tree.position(node) for tree, node in members],
        parents=[tree.node_key(node) for tree, node in members],
        bases=[tree.task.row.num_tokens for tree, _ in members],
        counts=[tree.count(node) for tree, node in members],
        method=method,
        vocab_map=vocab_map,
    )
    for i, ((tree, node), tokens) in enumerate(zip(members, children.tokens, strict=True)):
        tree.take(node, tokens, None if children.q is None else children.q[i])


def _draw_dynamic(
    trees: Sequence[ScoredTree],
    logits: torch.Tensor,
    rows: Sequence[LogitsRow],
    method: DraftSampleMethod,
    vocab_map: torch.Tensor | None,
) -> None:
    """Find the candidates below dynamic trees' open nodes."""
    owners = [tree for tree in trees for _ in tree.open]
    found = draft_candidates(
        logits,
        rows,
        rules=[tree.task.row.speculation.rule for tree in owners],
        positions=[tree.position for tree in owners],
        width=max(tree.width for tree in owners),
        method=method,
        vocab_map=vocab_map,
    )
    first = 0
    for tree in trees:
        end = first + len(tree.open)
        if end > first:
            tree.take(found.tokens_np[first:end], found.logprobs_np[first:end])
        first = end
