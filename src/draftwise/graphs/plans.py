"""Trees as captured loops see them: which nodes are drawn and fed on which level, and what memory that takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from draftwise.graphs.loop import LoopKind
from draftwise.sampling.noise import signed_word
from draftwise.types import TreeDraws, TreeShape


@dataclass(frozen=True, slots=True)
class TreePlan:
    """The one tree that a drafter's graphs draft: a static ``shape``, or else the best ``nodes`` of ``depth`` levels of
    ``top_k`` nodes with ``top_k`` children each. ``asked``: levels that requests ask for; 0: these. A drafter may have
    fewer."""

    shape: TreeShape | None = None
    top_k: int = 1
    depth: int = 1
    nodes: int = 1
    asked: int = 0

    @property
    def candidates(self) -> int:
        """Nodes that are drawn."""
        if self.shape is not None:
            return len(self.shape.parents)
        return self._candidates(self.depth)

    @property
    def steps(self) -> int:
        """Most drafts of a request."""
        return self.candidates if self.shape is not None else min(self.nodes, self.candidates)

    def _candidates(self, levels: int) -> int:
        """Nodes of a dynamic tree that are drawn on so many levels."""
        return self.top_k + (levels - 1) * self.top_k**2 if levels else 0

    @property
    def opened(self) -> list[int]:
        """Nodes of a static tree below which children are drawn, the root (-1) first, then level by level. Noise of
        draws, and distributions that they are from, stand in this order. Of a dynamic tree: none.

        Example: parents (-1, -1, 0, 1, 3): -1, 0, 1, 3.
        """
        return [] if self.shape is None else opened_nodes(self.shape)

    @property
    def levels(self) -> int:
        """Most tokens of one path."""
        return self.depth if self.shape is None else max(_depths(self.shape))

    @property
    def kinds(self) -> tuple[LoopKind, ...]:
        """How its nodes may be drawn."""
        return ("argmax", "shared") if self.shape is None else ("argmax", "draft", "shared")

    @property
    def reach(self) -> list[int]:
        """Leading candidates that are no deeper than 0, 1, 2, ... levels.

        Example: parents (-1, -1, 0, 1, 3): 0, 2, 4, 5. Two levels, the best three nodes of each: 0, 3, 12.
        """
        if self.shape is None:
            return [self._candidates(level) for level in range(self.depth + 1)]
        depths = _depths(self.shape)
        return [
            next((node for node, depth in enumerate(depths) if depth > level), len(depths))
            for level in range(self.levels + 1)
        ]

    def loop_bytes(self, requests: int) -> int:
        """Bytes on the device of one `TreeLoop` for so many requests, besides what loops share.

        Example: parents (-1, -1, 0) are 3 nodes on 2 levels, of which one is fed, and children are drawn below 2. For
        one request: 8 * (5 + 2) + 8 of its state, 3 * 8 of its drafts, and 8 * (3 + 2 * 2 + 3 + 3 * 3) of the tree's
        layout.
        """
        draws = len(self.opened) or self.depth  # numbers that make noise, of a dynamic tree for each level
        state = requests * (8 * (5 + draws) + 8) + 8 * (self.levels + 1 + 2 * draws)
        drafts = 8 * requests * self.steps
        if self.shape is None:
            found = self.candidates * (requests * (8 + 8 + 4) + 8)  # tokens, parents, scores; depths
            forms = 8 * requests * 3 * (self.steps + 1)
            return state + drafts + found + forms + 8 * (self.depth - 1) * self.top_k
        return state + drafts + 8 * 3 * (len(self.opened) - 1 + self.candidates)

    def takes(self, draws: TreeDraws) -> bool:
        """Whether these draws are of this tree."""
        if draws.shape != self.shape:
            return False
        if self.shape is not None:
            return True
        wanted = min(draws.nodes, self._candidates(draws.depth))
        return draws.top_k == self.top_k and draws.depth <= self.depth and wanted <= self.steps


@dataclass(frozen=True, slots=True)
class Level:
    """Nodes that are fed in one pass: where they stand, and for a static tree which they are.

    Example: of the tree (-1, -1, 0, 1), whose nodes 0 and 1 have children, level 1 feeds both: start 0, masks 1 and 2.
    """

    start: int
    masks: Tensor
    """[n] int64, of their paths; of a dynamic tree, whose paths nobody knows yet, of the nodes themselves."""
    tokens_of: Tensor | None = None  # [n] int64, nodes
    parents: Tensor | None = None  # [n] int64, places in the level before; of level 1: 0


@dataclass(frozen=True, slots=True)
class Children:
    """Static: nodes drawn below the open ones of a level, by place of the parent among them and rank."""

    first: int  # the first open one's place in `TreePlan.opened`
    opened: int  # how many are open
    nodes: Tensor  # [m] int64
    places: Tensor  # [m] int64
    ranks: Tensor  # [m] int64
    most: int  # children that a parent has drawn, those without a node included


class StaticLayout(NamedTuple):
    """A static tree: its levels, and the draws before each and behind the last one. Draw i belongs to `TreePlan.opened`
    i: the token stands ``depths[i]`` places behind its request's first draft, and ``nodes[i]`` is its parent."""

    levels: list[Level]
    children: list[Children]
    depths: Tensor  # [opened] int64
    nodes: Tensor  # [opened] int64


def opened_nodes(shape: TreeShape) -> list[int]:
    """`TreePlan.opened`."""
    below = _below(shape)
    found = [-1]
    for node in found:  # it grows
        found += [child for child in below[node] if child in below]
    return found


def distribution_rows(shape: TreeShape) -> list[int]:
    """The row of `TreePlan.opened` that each node's parent is: siblings are drawn from one distribution.

    Example: parents (-1, -1, 0, 1, 3): 0, 0, 1, 2, 3.
    """
    rows = {node: row for row, node in enumerate(opened_nodes(shape))}
    return [rows[parent] for parent in shape.parents]


def lay_out(shape: TreeShape, kind: LoopKind, device: torch.device) -> StaticLayout:
    """The tree in the order in which a loop draws it. Children that are drawn from a distribution (kind "draft") are
    those drawn first, whatever their ranks: see `StaticTree`."""
    below = _below(shape)
    order = {child: rank for children in below.values() for rank, child in enumerate(children)}
    levels: list[Level] = []
    found: list[Children] = []
    depths: list[int] = []
    masks = {-1: 0}
    opened, first, depth = [-1], 0, 0
    while opened:
        depths += [depth] * len(opened)
        drawn = [child for node in opened for child in below[node]]
        ranks = [order[child] if kind == "draft" else shape.ranks[child] for child in drawn]
        places = [opened.index(shape.parents[child]) for child in drawn]
        nodes, at, rank = (torch.tensor(part, device=device) for part in (drawn, places, ranks))
        found.append(Children(first, len(opened), nodes, at, rank, 1 + max(ranks)))
        following = [child for child in drawn if child in below]
        first += len(opened)
        fed = first - 1  # all but the root are fed when they are opened
        if following:
            for i, node in enumerate(following):
                masks[node] = masks[shape.parents[node]] | 1 << (fed + i)
            parents = [opened.index(shape.parents[node]) for node in following]
            lists = ([signed_word(masks[node]) for node in following], following, parents)
            levels.append(Level(fed, *(torch.tensor(part, device=device) for part in lists)))
        opened, depth = following, depth + 1
    every = opened_nodes(shape)
    return StaticLayout(
        levels, found, torch.tensor(depths, device=device), torch.tensor(every, device=device)
    )


def _below(shape: TreeShape) -> dict[int, list[int]]:
    """The children of every node that has some."""
    below: dict[int, list[int]] = {}
    for node, parent in enumerate(shape.parents):
        below.setdefault(parent, []).append(node)
    return below


def _depths(shape: TreeShape) -> list[int]:
    """The level of each node, from 1 on."""
    depths: list[int] = []
    for parent in shape.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths
