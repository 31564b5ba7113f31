"""Trees while they are drafted: their nodes, the nodes whose children come next, and the final proposal.

Shapes that the user chose, and those of EAGLE-2 (Li et al., arXiv:2406.16858, section 4), which follow the drafter's
confidence. `expansion.draft_trees` runs the passes between their levels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from draftwise.config.trees import DynamicTree
from draftwise.propose.base import DraftRow
from draftwise.types import EMPTY_PROPOSAL, Proposal


@dataclass(frozen=True, slots=True)
class TreeTask:
    """A tree that is wanted below a request's last known token, or below ``forced`` ones that follow it.

    ``nodes`` and ``depth`` (both >= 1): most nodes and levels below ``forced``.
    """

    row: DraftRow
    nodes: int
    depth: int
    forced: tuple[int, ...] = ()

    @property
    def context_len(self) -> int:
        """Keys before the tree's first node: committed tokens and forced ones."""
        return self.row.num_tokens + len(self.forced)


@dataclass(frozen=True, slots=True)
class TreeLevel:
    """The nodes of one tree that a pass feeds. Fed nodes are numbered in the order in which they are fed: node i of
    this level has number ``start + i`` and its K/V stands at key ``task.context_len + start + i``.

    Example: of a tree (-1, -1, 0, 1) whose nodes all have children, level 1 has tokens of nodes 0 and 1, start 0,
    parents (-1, -1), ancestors (0b01, 0b10); level 2 those of 2 and 3, start 2, parents (0, 1), ancestors
    (0b0101, 0b1010).
    """

    member: int  # which of the tasks
    task: TreeTask
    start: int
    tokens: Sequence[int]  # [m] target ids
    parents: Sequence[int]  # [m] number of each node's parent; -1: the root
    ancestors: Sequence[int]  # [m] bits of the numbers on each node's path, itself included


class GrowingTree(ABC):
    """The part that static and dynamic trees share: nodes, and which of them were fed. ``open``: nodes whose logits
    come next, in
    the order in which they were fed; -1 is the root."""

    def __init__(self, member: int, task: TreeTask) -> None:
        self.member = member
        self.task = task
        self.open: list[int] = [-1]
        self._number: dict[int, int] = {-1: -1}  # node -> number among the fed ones
        self._ancestors: dict[int, int] = {-1: 0}  # node -> bits of the fed ones on its path

    @abstractmethod
    def path(self, node: int) -> tuple[int, ...]:
        """Tokens from the first forced one down to a node (-1: the root)."""

    @abstractmethod
    def next_level(self) -> TreeLevel | None:
        """After the children of all open nodes were drawn: which nodes to feed now; None: the tree is complete."""

    @abstractmethod
    def proposal(self, name: str) -> Proposal:
        """The tree as it is now, behind the forced tokens."""

    def feed(self, nodes: list[int], tokens: Sequence[int], parents: Sequence[int]) -> TreeLevel | None:
        """Open these nodes: the level that feeds them."""
        self.open = nodes
        if not nodes:
            return None
        start = len(self._number) - 1
        numbers, ancestors = self._number, self._ancestors
        for i, (node, parent) in enumerate(zip(nodes, parents, strict=True)):
            numbers[node] = start + i
            ancestors[node] = ancestors[parent] | 1 << (start + i)
        return TreeLevel(
            self.member,
            self.task,
            start,
            tokens,
            [numbers[parent] for parent in parents],
            [ancestors[node] for node in nodes],
        )


class StaticTree(GrowingTree):
    """A tree whose shape the user chose: `Speculation.tree`, as far as budget and depth allow. That cut looks at
    nothing that was drawn."""

    def __init__(self, member: int, task: TreeTask, sampled: bool) -> None:
        """``sampled``: children are drawn without replacement, in drawing order; else they are the best, by rank."""
        super().__init__(member, task)
        self.sampled = sampled
        shape, ranks = task.row.speculation.tree, task.row.speculation.tree_ranks
        assert shape is not None
        self._parents = shape[: task.nodes]
        self._children: dict[int, list[int]] = {}  # node -> its children, those by rank
        depths: list[int] = []
        for node, parent in enumerate(self._parents):
            depths.append(1 if parent < 0 else depths[parent] + 1)
            if depths[node] <= task.depth:
                self._children.setdefault(parent, []).append(node)
        self._tokens: dict[int, int] = {}  # node -> token; nodes that could not be drawn are missing
        self._q_row: dict[int, int] = {}  # parent -> its row of q
        self._q: list[torch.Tensor] = []
        if sampled or ranks is None:
            # The children are those drawn first, whatever their ranks: of two drawn without replacement the
            # second does not have the third one's distribution.
            order = {child: i for children in self._children.values() for i, child in enumerate(children)}
            self._ranks = [order.get(node, 0) for node in range(len(self._parents))]
        else:
            self._ranks = list(ranks[: len(self._parents)])

    def count(self, node: int) -> int:
        """Children to draw below a node."""
        return 1 + max(self._ranks[child] for child in self._children[node])

    def node_key(self, node: int) -> int:
        """The node's index in the proposal, for the noise's key (-1: the root)."""
        return node + len(self.task.forced)

    def path(self, node: int) -> tuple[int, ...]:
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self._tokens[node])
            node = self._parents[node]
        return (*self.task.forced, *reversed(tokens))

    def position(self, node: int) -> int:
        """The position of the node's children."""
        depth = 0
        while node >= 0:
            depth += 1
            node = self._parents[node]
        return self.task.context_len + depth

    def take(self, node: int, tokens: Sequence[int], q: torch.Tensor | None) -> None:
        """Children drawn below ``node``, in drawing order; ``q`` [V] if they were sampled."""
        for child in self._children[node]:
            if self._ranks[child] < len(tokens):
                self._tokens[child] = tokens[self._ranks[child]]
        if self.sampled:
            assert q is not None
            self._q_row[node] = len(self._q)
            self._q.append(q)

    def next_level(self) -> TreeLevel | None:
        nodes = [
            child
            for node in self.open
            for child in self._children[node]
            if child in self._children and child in self._tokens
        ]
        return self.feed(nodes, [self._tokens[n] for n in nodes], [self._parents[n] for n in nodes])

    def proposal(self, name: str) -> Proposal:
        """Nodes in the order of the shape, behind the forced ones."""
        forced = self.task.forced
        tokens = list(forced)
        parents = list(range(-1, len(forced) - 1))
        index = {-1: len(forced) - 1}
        q_rows = list(range(len(forced)))
        for node, parent in enumerate(self._parents):
            token = self._tokens.get(node)
            if token is None:
                continue  # and with it those below: they were never drawn
            index[node] = len(tokens)
            tokens.append(token)
            parents.append(index[parent])
            if self.sampled:
                q_rows.append(len(forced) + self._q_row[parent])
        if not tokens:
            return EMPTY_PROPOSAL
        if not self.sampled:
            return Proposal(tuple(tokens), tuple(parents), name)
        q = self._q
        if forced:  # drawn from what has nothing else
            ones = q[0].new_zeros((len(forced), len(q[0])))
            ones[range(len(forced)), list(forced)] = 1.0
            q = [*ones, *q]
        return Proposal(
            tuple(tokens), tuple(parents), name, "without_replacement", torch.stack(q), tuple(q_rows)
        )


class ScoredTree(GrowingTree):
    """EAGLE-2: expand on each level the ``top_k`` nodes of highest score, the sum of log-probabilities along the path,
    by ``top_k`` children; keep all; in the end the best ``nodes`` are the tree.

    Scores fall along paths. So a node is not expanded that ``nodes`` others beat: nothing below it could enter
    the tree. And the best nodes, by score, earlier ones first among equals, come after their parents.
    """

    def __init__(self, member: int, task: TreeTask, limits: DynamicTree) -> None:
        super().__init__(member, task)
        self.width = limits.top_k
        self._levels = min(limits.depth, task.depth)
        self._level = 0
        # of all candidates so far: tokens, parents (-1: the root), scores
        self._tokens_np: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._parents_np: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._scores_np: npt.NDArray[np.float32] = np.empty(0, np.float32)
        self._first = 0  # first candidate of the latest level

    def path(self, node: int) -> tuple[int, ...]:
        tokens: list[int] = []
        while node >= 0:
            tokens.append(int(self._tokens_np[node]))
            node = int(self._parents_np[node])
        return (*self.task.forced, *reversed(tokens))

    @property
    def position(self) -> int:
        """The position of the children of all open nodes."""
        return self.task.context_len + self._level

    def take(self, tokens_np: npt.NDArray[np.int64], logprobs_np: npt.NDArray[np.float32]) -> None:
        """Candidates [open nodes, >= top_k] below all open nodes."""
        k = min(self.width, tokens_np.shape[1])
        parents_np = np.asarray(self.open, np.int64)
        above_np = self._scores_np[parents_np] if self._level else np.zeros(1, np.float32)
        scores_np = (above_np[:, None] + logprobs_np[:, :k]).ravel()
        possible = scores_np > -np.inf
        self._first = len(self._tokens_np)
        self._tokens_np = np.concatenate((self._tokens_np, tokens_np[:, :k].ravel()[possible]))
        self._parents_np = np.concatenate((self._parents_np, np.repeat(parents_np, k)[possible]))
        self._scores_np = np.concatenate((self._scores_np, scores_np[possible]))
        self._level += 1

    def next_level(self) -> TreeLevel | None:
        if self._level == self._levels or not self.open:
            self.open = []
            return None
        scores_np = self._scores_np[self._first :]
        best_np = np.argsort(-scores_np, kind="stable")[: self.width]
        if len(self._scores_np) >= self.task.nodes:
            least = np.partition(self._scores_np, -self.task.nodes)[-self.task.nodes]
            best_np = best_np[scores_np[best_np] > least]
        nodes_np = best_np + self._first
        return self.feed(
            nodes_np.tolist(), self._tokens_np[nodes_np].tolist(), self._parents_np[nodes_np].tolist()
        )

    def proposal(self, name: str) -> Proposal:
        """The best nodes, behind the forced ones; any first n of them are the best n."""
        forced = self.task.forced
        best = np.argsort(-self._scores_np, kind="stable")[: self.task.nodes].tolist()
        index = {-1: len(forced) - 1} | {node: len(forced) + i for i, node in enumerate(best)}
        tokens = (*forced, *self._tokens_np[best].tolist())
        if not tokens:
            return EMPTY_PROPOSAL
        parents = [index[parent] for parent in self._parents_np[best].tolist()]
        return Proposal(tokens, (*range(-1, len(forced) - 1), *parents), name)
