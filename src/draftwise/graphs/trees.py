"""Trees of fixed children as one captured graph: a pass per level, with the choice of nodes between them on the device.

The shapes and the choices are those of `propose.trees.growth`, which has the words: a static tree whose nodes are
tokens of given ranks, or EAGLE-2's (arXiv:2406.16858), which feeds the likeliest nodes of a level, by the product along
their paths. What is verified of the latter is chosen on the host, from all candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwise.graphs.backend import Graph, GraphBackend
from draftwise.graphs.buffers import Need, PassBuffers, Shape
from draftwise.graphs.loop import Drafter, LoopKind, LoopMemory, LoopSeats
from draftwise.names import SHARED
from draftwise.sampling.noise import gumbel_of_keys, row_key, signed_word
from draftwise.sampling.rows import top_rows
from draftwise.types import AttentionBatch, DraftedTree, StaticRows, StepInput, TreeDraws, TreeShape


@dataclass(frozen=True, slots=True)
class TreePlan:
    """The one tree that a drafter's graphs draft: a static ``shape``, or else ``depth`` levels of ``top_k`` nodes with
    ``top_k`` children each."""

    shape: TreeShape | None = None
    top_k: int = 1
    depth: int = 1

    @property
    def candidates(self) -> int:
        """Nodes that are drawn."""
        if self.shape is not None:
            return len(self.shape.parents)
        return self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def depths(self) -> list[int]:
        """The level of each node of a static tree, from 1 on."""
        assert self.shape is not None
        depths: list[int] = []
        for parent in self.shape.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    @property
    def levels(self) -> int:
        """Most tokens of one path."""
        return self.depth if self.shape is None else max(self.depths)

    @property
    def kinds(self) -> tuple[LoopKind, ...]:
        """How its nodes may be drawn."""
        return ("argmax",) if self.shape is None else ("argmax", "shared")

    def loop_bytes(self, requests: int) -> int:
        """Bytes on the device of one `TreeLoop` for so many requests, besides what loops share.

        Example: parents (-1, -1, 0) are 3 nodes on 2 levels, of which one is fed. For one request: 8 * (4 + 2) + 4 of
        its state, 3 * 20 of its nodes, and 8 * (4 + 3 * 3 + 3) of the tree's layout.
        """
        state = requests * (8 * (4 + self.levels) + 4)
        nodes = requests * self.candidates * (8 + 8 + 4)  # tokens, parents, scores
        if self.shape is None:
            return state + nodes + 8 * (self.depth - 1) * self.top_k
        fed = len({parent for parent in self.shape.parents if parent >= 0})
        return state + nodes + 8 * (4 * fed + 3 * self.candidates + self.levels + 1)

    def takes(self, draws: TreeDraws) -> bool:
        """Whether these draws are of this tree."""
        if draws.shape != self.shape:
            return False
        return self.shape is not None or (draws.top_k == self.top_k and draws.depth <= self.depth)


@dataclass(slots=True)
class _Level:
    """Nodes that are fed in one pass: where they stand, and for a static tree which they are.

    Example: of the tree (-1, -1, 0, 1), whose nodes 0 and 1 have children, level 1 feeds both: start 0, bits 1 and 2.
    """

    start: int
    bits: Tensor  # [n] int64, of the fed nodes' own places
    masks: Tensor | None = None  # [n] int64, of their paths; None: they depend on what is drawn
    tokens_of: Tensor | None = None  # [n] int64, nodes
    parents: Tensor | None = None  # [n] int64, places in the level before; of level 1: 0


@dataclass(slots=True)
class _Children:
    """Static: nodes drawn below the open ones of a level, by place of the parent among them and rank."""

    nodes: Tensor  # [m] int64
    places: Tensor  # [m] int64
    ranks: Tensor  # [m] int64
    most: int  # children that a parent has drawn, those without a node included


class TreeLoop:
    """A tree below every request of a pass; see `loop.ChainLoop`, whose life it has."""

    def __init__(
        self,
        shape: Shape,
        plan: TreePlan,
        kind: LoopKind,
        drafter: Drafter,
        rows: PassBuffers,
        memory: LoopMemory,
        spare_slot: int,
        backend: GraphBackend,
    ) -> None:
        """``rows``: of the first pass."""
        self.shape, self.plan, self.kind = shape, plan, kind
        self.drafter, self.rows = drafter, rows
        self._features = None if memory.features is None else memory.features[: shape.size]  # [R * N, F]
        self._counters = memory.counters
        self._spare_slot = spare_slot
        requests, device = shape.requests, backend.device
        sizes = [requests, requests, requests, requests, requests * plan.levels]
        self._host = backend.host_buffer(sum(sizes))
        self._device = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        host = [part.numpy() for part in torch.split(self._host, sizes)]
        parts = torch.split(self._device, sizes)
        self._last_np, self._start_np, self._length_np = host[:3]
        self._scale_np = host[3].view(np.float64)
        self._noise_np = host[4].reshape(requests, plan.levels)
        self._last, self._start, self._length = parts[:3]  # [R] int64
        self._scale = parts[3].view(torch.float64)  # [R]
        self._noise = parts[4].view(requests, plan.levels)  # int64 keys of each level
        size = (requests, plan.candidates)
        self._tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self._parents = torch.zeros(size, dtype=torch.int64, device=device)
        self._scores = torch.zeros(size, dtype=torch.float32, device=device)
        self._ones = torch.ones(requests, dtype=torch.int32, device=device)
        self._levels: list[_Level] = []
        self._children: list[_Children] = []
        if plan.shape is not None:
            self._lay_out(plan.shape, device)
        else:
            for level in range(plan.depth - 1):
                places = torch.arange(level * plan.top_k, (level + 1) * plan.top_k, device=device)
                self._levels.append(_Level(level * plan.top_k, torch.ones_like(places) << places))
        self._reach = torch.tensor(_reach(plan), device=device)
        self._graph: Graph | None = None

    def _lay_out(self, shape: TreeShape, device: torch.device) -> None:
        """The levels of a static tree."""
        below: dict[int, list[int]] = {}
        for node, parent in enumerate(shape.parents):
            below.setdefault(parent, []).append(node)
        opened, fed = [-1], 0
        masks = {-1: 0}
        while opened:
            drawn = [child for node in opened for child in below[node]]
            places = [opened.index(shape.parents[child]) for child in drawn]
            ranks = [shape.ranks[child] for child in drawn]
            nodes, at, rank = (torch.tensor(part, device=device) for part in (drawn, places, ranks))
            self._children.append(_Children(nodes, at, rank, 1 + max(ranks)))
            following = [child for child in drawn if child in below]
            if following:
                for i, node in enumerate(following):
                    masks[node] = masks[shape.parents[node]] | 1 << (fed + i)
                own = [1 << (fed + i) for i in range(len(following))]
                parents = [opened.index(shape.parents[node]) for node in following]
                lists = (own, [masks[node] for node in following], following, parents)
                bits, paths, inner, above = (
                    torch.tensor([x - (1 << 64) if x >> 63 == 1 else x for x in part], device=device)
                    for part in lists
                )
                self._levels.append(_Level(fed, bits, paths, inner, above))
                fed += len(following)
            opened = following

    def capture(self, backend: GraphBackend) -> None:
        """Capture it, with rows that only fill up."""
        self.rows.clear()
        self._host.zero_()
        self._device.copy_(self._host)
        self._graph, _ = backend.capture(self._run)

    def takes(self, need: Need, draws: Sequence[TreeDraws]) -> bool:
        """Whether it can draft for requests with this need."""
        noisy = self.kind == "shared"
        return self.rows.fits(need) and all(
            self.plan.takes(one) and bool(one.noise_scale) == noisy for one in draws
        )

    @property
    def steps(self) -> int:
        """Drafts of a request."""
        return self.plan.candidates

    @property
    def seats(self) -> LoopSeats:
        """Of a static tree, as `ChainLoop.seats`."""
        return LoopSeats(
            self._last,
            self._start,
            self._length,
            self._scale,
            self._noise,
            self._features,
            self._tokens,
            None,
            self._reach,
        )

    def replay(self) -> None:
        """Draft for what the device has filled in."""
        assert self._graph is not None, "capture comes first"
        self._graph.replay()

    def run(self, batch: StepInput, features: Tensor | None, draws: Sequence[TreeDraws]) -> list[DraftedTree]:
        """As `DecoderModel.draft_trees`; the loop must take it."""
        assert self._graph is not None, "capture comes first"
        starts = batch.attention.query_start_np
        counts = np.diff(starts)
        count, total = len(counts), int(starts[-1])
        self.rows.fill(batch)
        if self._features is not None:
            assert features is not None
            self._features.index_copy_(0, self.rows.place[:total], features)
        self._last_np[:] = np.arange(self.shape.requests) * self.shape.rows
        self._last_np[:count] += counts - 1
        self._start_np[:] = self._length_np[:] = 0
        self._start_np[:count] = batch.attention.context_len_np + counts
        self._length_np[:count] = self.steps
        self._scale_np[:count] = [one.scale for one in draws]
        if self.kind == "shared":
            self._take_noise(draws)
        self._device.copy_(self._host, non_blocking=True)
        self._graph.replay()
        tokens_np = self._tokens[:count].cpu().numpy()
        shape = self.plan.shape
        if shape is not None:
            return [DraftedTree(tuple(row), shape.parents) for row in tokens_np.tolist()]
        parents_np, scores_np = self._parents[:count].cpu().numpy(), self._scores[:count].cpu().numpy()
        k = self.plan.top_k
        return [
            _best(tokens_np[r], parents_np[r], scores_np[r], k + (one.depth - 1) * k * k, one.nodes)
            for r, one in enumerate(draws)
        ]

    def _take_noise(self, draws: Sequence[TreeDraws]) -> None:
        for r, one in enumerate(draws):
            self._scale_np[r] = one.scale / one.noise_scale  # the order of the sums is the same
            for level in range(self.plan.levels):
                word = row_key(one.seed, one.sample_index, SHARED, int(self._start_np[r]) + level, -1, 0)
                self._noise_np[r, level] = signed_word(word)

    # ----------------------------------------------------------------------------------- what is captured

    def _run(self) -> None:
        self.rows.batch.attention.cache.clear()  # of another run; it would be missing in a replay
        if self.drafter.advance is None:
            assert self._features is not None
            for level, logits in enumerate(self.drafter.logits(self._features)):
                self._draw(level, logits)
            return
        hidden, features = self._advance(self.rows.batch, self._features)
        hidden = hidden.index_select(0, self._last)
        if features is not None:
            features = features.index_select(0, self._last)
        if self.plan.shape is not None:
            self._run_static(hidden, features)
        else:
            self._run_dynamic(hidden, features)

    def _run_static(self, hidden: Tensor, features: Tensor | None) -> None:
        requests = self.shape.requests
        for i, level in enumerate(self._levels):
            self._draw(i, self.drafter.logits(hidden))
            assert level.masks is not None and level.tokens_of is not None and level.parents is not None
            tokens = self._tokens.index_select(1, level.tokens_of)
            masks = level.masks.expand(requests, -1)
            if features is not None:
                wide = features.view(requests, -1, features.shape[1])
                features = wide.index_select(1, level.parents).flatten(0, 1)
            hidden, features = self._advance(self._batch(i, level, tokens, masks), features)
        self._draw(len(self._levels), self.drafter.logits(hidden))

    def _advance(self, batch: StepInput, features: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert self.drafter.advance is not None
        return self.drafter.advance(batch, features)

    def _draw(self, level: int, logits: Tensor) -> None:
        """The nodes of a static level, from ``logits`` [R * open, Vd] behind their parents, or [R, Vd] behind all of
        them."""
        children = self._children[level]
        places = children.places if self.drafter.advance is not None else 0
        ids = self._ids(top_rows(self._noisy(logits, level), children.most).indices)
        drawn = ids.view(self.shape.requests, -1, children.most)[:, places, children.ranks]  # [R, m]
        self._tokens.index_copy_(1, children.nodes, drawn)

    def _noisy(self, logits: Tensor, level: int) -> Tensor:
        """``logits`` [R * open, Vd] with the noise of a level, if any is read."""
        if self.kind != "shared":
            return logits
        wide = logits.view(self.shape.requests, -1, logits.shape[1])
        noise = gumbel_of_keys(self._noise[:, level], self._counters)
        return (wide * self._scale.float()[:, None, None] + noise[:, None]).flatten(0, 1)

    def _run_dynamic(self, hidden: Tensor, features: Tensor | None) -> None:
        requests, k = self.shape.requests, self.plan.top_k
        scores, ids = self._best_children(hidden, 1)
        self._keep(0, scores, ids, torch.full_like(ids, -1))
        tokens, place = ids, torch.arange(k, device=ids.device).expand(requests, k)
        if features is not None:
            features = features[:, None].expand(-1, k, -1).flatten(0, 1)
        masks = torch.zeros_like(ids)
        first = 0  # candidate of the latest level
        for i, level in enumerate(self._levels):
            masks = masks | level.bits
            hidden, features = self._advance(self._batch(i, level, tokens, masks), features)
            below, ids = self._best_children(hidden, k)
            totals = (scores[:, :, None] + below.view(requests, k, k)).flatten(1)
            parents = (first + place)[:, :, None].expand(requests, k, k).flatten(1)
            first = k + i * k * k
            candidates = ids.view(requests, k * k)
            self._keep(first, totals, candidates, parents)
            if i + 1 < len(self._levels):
                scores, place = totals.topk(k)  # [R, k]
                tokens = candidates.gather(1, place)
                above = place // k
                masks = masks.gather(1, above)
                if features is not None:
                    size = features.shape[1]
                    wide = features.view(requests, k, size)
                    features = wide.gather(1, above[:, :, None].expand(-1, -1, size)).flatten(0, 1)

    def _best_children(self, hidden: Tensor, each: int) -> tuple[Tensor, Tensor]:
        """``hidden`` [R * each, H] -> log-probabilities and target ids of the best tokens, [R * each, top_k]."""
        scale = self._scale.float()[:, None].expand(-1, each).reshape(-1, 1)
        best = top_rows(self.drafter.logits(hidden) * scale, self.plan.top_k, totals=True)
        assert best.log_totals is not None
        # float32 may round a sum of exponentials below its largest term
        return (best.values - best.log_totals[:, None]).clamp_(max=0.0), self._ids(best.indices)

    def _keep(self, first: int, scores: Tensor, tokens: Tensor, parents: Tensor) -> None:
        stop = first + tokens.shape[1]
        self._scores[:, first:stop].copy_(scores)
        self._tokens[:, first:stop].copy_(tokens)
        self._parents[:, first:stop].copy_(parents)

    def _ids(self, drawn: Tensor) -> Tensor:
        ids = self.drafter.target_ids
        return drawn if ids is None else ids[drawn]

    def _batch(self, depth: int, level: _Level, tokens: Tensor, masks: Tensor) -> StepInput:
        """The pass that feeds ``tokens`` [R, n], nodes of depth ``depth`` + 1, at keys start + level.start + i."""
        drafter, first = self.drafter, self.rows.batch.attention
        static = first.static
        assert static is not None
        requests, n = tokens.shape
        keys = self._start[:, None] + torch.arange(level.start, level.start + n, device=tokens.device)
        at = self._start + depth + drafter.position_offset
        positions = at.clamp(0, drafter.max_position)[:, None].expand(requests, n)
        size = first.block_size
        pages = (keys // size).clamp(max=static.tables.shape[1] - 1)
        slots = static.tables.gather(1, pages).long() * size + keys % size
        # a fed node has no higher number among the fed ones than among all
        counts = keys - self._start[:, None] < self._length[:, None]
        stored = counts & (at <= drafter.max_position)[:, None]
        return StepInput(
            token_ids=tokens.flatten(),
            positions=positions.flatten().contiguous(),  # of one request: one number, n times
            slots=slots.masked_fill(~stored, self._spare_slot).flatten(),
            attention=AttentionBatch(
                query_start_np=np.arange(0, requests * n + 1, n, dtype=np.int32),
                context_len_np=np.zeros(requests, np.int32),
                is_tree_np=np.ones(requests, np.bool_),
                block_tables_np=np.zeros((requests, 1), np.int32),
                ancestors_np=None,
                block_size=size,
                static=StaticRows(
                    rows=n,
                    max_keys=static.max_keys + 64,
                    context=self._start.to(torch.int32),
                    first_key=static.first_key,
                    is_tree=self._ones,
                    tables=static.tables,
                    ancestors=masks.flatten(),
                ),
            ),
        )


def _reach(plan: TreePlan) -> list[int]:
    """Leading nodes of a static tree that are no deeper than 0, 1, 2, ... levels.

    Example: parents (-1, -1, 0, 1, 3): 0, 2, 4, 5.
    """
    if plan.shape is None:
        return []
    depths = plan.depths
    return [
        next((node for node, depth in enumerate(depths) if depth > level), len(depths))
        for level in range(plan.levels + 1)
    ]


def _best(
    tokens_np: npt.NDArray[np.int64],
    parents_np: npt.NDArray[np.int64],
    scores_np: npt.NDArray[np.float32],
    candidates: int,
    nodes: int,
) -> DraftedTree:
    """The best ``nodes`` of the first so many candidates, best first, earlier ones first among equals: so that parents
    come before their children."""
    best = np.argsort(-scores_np[:candidates], kind="stable")[:nodes].tolist()
    index = {-1: -1} | {node: i for i, node in enumerate(best)}
    parents = tuple(index[parent] for parent in parents_np[best].tolist())
    return DraftedTree(tuple(tokens_np[best].tolist()), parents)
