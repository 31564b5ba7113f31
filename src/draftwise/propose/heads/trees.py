"""The passes between the levels of a tree that a head drafts."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from draftwise.models.inputs import RowInput, build_step_input
from draftwise.names import MAX_FED_NODES
from draftwise.propose.heads.passes import HeadDraft, HeadPasses
from draftwise.propose.trees.expansion import ScratchBlocks, TreeModel
from draftwise.propose.trees.growth import TreeLevel

_PLACES = 1 + MAX_FED_NODES  # of the features of a request's root and fed nodes


class RootedTrees(TreeModel):
    """The trees of some requests, from their roots on."""

    @abstractmethod
    def roots(self) -> Tensor:
        """Read what is missing of known tokens, and forced ones: logits [R, Vd] behind them."""


class HeadTrees(RootedTrees):
    """The trees of some requests that are expanded together; made anew each time.

    A head with several depths reads level l with number min(l, depths - 1), as a chain's draft l is read. The first
    time at a depth it has seen nothing of the tree: known tokens that are missing are caught up, and all nodes fed so
    far are fed again. Behind forced tokens, and where fewer tokens are known than there are depths, all levels are read
    with the first one.

    Example: two depths. Depth 0 reads the root: nodes 0 and 1. Depth 1 reads known rows, then level 1, both nodes with
    what depth 0 gave for the root: nodes 2 and 3 below node 0. Depth 1 reads level 2, with what it gave for node 0.
    """

    def __init__(self, passes: HeadPasses, scratch: ScratchBlocks, drafts: Sequence[HeadDraft]) -> None:
        self._passes = passes
        self._drafts = drafts
        self._tables = [
            scratch.table(i, draft.row.block_table_np) for i, draft in enumerate(drafts)
        ]  # [blocks + scratch] each
        self._fed: list[list[tuple[int, int, int]]] = [
            [] for _ in drafts
        ]  # token, parent, ancestors, by number
        last = passes.head.num_depths - 1
        self._deep = [
            last > 0 and not d.tokens and d.row.num_tokens > d.state.tracks[last].first_key for d in drafts
        ]
        self._nodes: Tensor  # [requests, 1 + fed nodes, F] what the newest pass gave for root and nodes

    def roots(self) -> Tensor:
        drafts = self._drafts
        logits, features = self._passes.catch_up(drafts)
        self._nodes = features.new_empty((len(drafts), _PLACES, features.shape[1]))
        self._nodes[:, 0] = features
        for step in range(1, 1 + max(len(draft.tokens) for draft in drafts)):
            forced = [i for i, draft in enumerate(drafts) if len(draft.tokens) >= step]
            members = [drafts[i] for i in forced]
            logits[forced], self._nodes[forced, 0] = self._passes.advance(
                members, self._nodes[forced, 0], step, deeper=False
            )
        return logits

    def expand(self, levels: Sequence[TreeLevel]) -> Tensor:
        groups: dict[int, list[int]] = {}  # depth -> levels that it reads
        for i, level in enumerate(levels):
            self._fed[level.member] += zip(level.tokens, level.parents, level.ancestors, strict=True)
            groups.setdefault(self._depth(level), []).append(i)
        parts = {depth: self._read([levels[i] for i in members], depth) for depth, members in groups.items()}
        if len(parts) == 1:
            return next(iter(parts.values()))
        rows: list[Tensor | None] = [None] * len(levels)
        for depth, members in groups.items():
            first = 0
            for i in members:
                count = len(levels[i].tokens)
                rows[i] = parts[depth][first : first + count]
                first += count
        return torch.cat([row for row in rows if row is not None])

    def _depth(self, level: TreeLevel) -> int:
        number = level.ancestors[0].bit_count()  # 1 below the root
        return min(number, self._passes.head.num_depths - 1) if self._deep[level.member] else 0

    def _read(self, levels: Sequence[TreeLevel], depth: int) -> Tensor:
        """One pass: logits of the nodes of these levels, [sum of m, Vd]."""
        nodes = self._nodes
        start = time.perf_counter()
        fresh = [depth > 0 and level.ancestors[0].bit_count() == depth for level in levels]
        numbers = [  # of the nodes to feed: all of them the first time at a depth
            range(0 if anew else level.start, len(self._fed[level.member]))
            for level, anew in zip(levels, fresh, strict=True)
        ]
        inputs: list[RowInput] = []
        parents: list[int] = []
        places: list[int] = []
        wanted: list[int] = []  # rows of the pass
        for level, own in zip(levels, numbers, strict=True):
            fed = self._fed[level.member]
            # Rows of `nodes` as one matrix. Example: with places for 4 nodes behind each root, node 2 of member 1 is in
            # row 1 * (1 + 4) + 1 + 2 = 8.
            first = level.member * _PLACES + 1
            wanted += range(len(places) + level.start - own.start, len(places) + len(own))
            places += [first + number for number in own]
            parents += [first + fed[number][1] for number in own]
            inputs.append(
                RowInput(
                    [fed[number][0] for number in own],
                    level.task.context_len,
                    self._tables[level.member],
                    ancestors=[fed[number][2] for number in own],
                    tree_start=own.start,
                    first_key=self._drafts[level.member].state.tracks[depth].first_key,
                )
            )
        flat = nodes.view(-1, nodes.shape[-1])
        features = flat.index_select(0, torch.tensor(parents, device=nodes.device))
        self._passes.add_time(start)
        members = [level.member for level, anew in zip(levels, fresh, strict=True) if anew]
        if members:  # what the depth before gave for the roots has been read
            nodes[members, 0] = self._passes.catch_up_deeper([self._drafts[i] for i in members], depth)
        start = time.perf_counter()
        head = self._passes.head
        batch = build_step_input(inputs, self._passes.block_size, head.device, position_offset=-1)
        rows = wanted if len(wanted) < len(places) else None
        output, logits = head.forward_logits(batch, features, self._passes.kv, rows, depth)
        flat.index_copy_(0, torch.tensor(places, device=nodes.device), output.features)
        self._passes.add_time(start)
        return logits
