"""Trees of fixed children as one captured graph: a pass per level, with the choice of nodes between them on the device.

The shapes and the choices are those of `propose.trees.growth`, which has the words: a static tree whose nodes are
tokens of given ranks, or EAGLE-2's (arXiv:2406.16858), which feeds the likeliest nodes of a level, by the product along
their paths, and in the end keeps the likeliest of all candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftwise.graphs.buffers import Need, PassBuffers
from draftwise.graphs.loop import Drafter, DraftLoop, LoopKind, LoopMemory
from draftwise.graphs.plans import Children, Level, TreePlan, lay_out
from draftwise.names import SHARED
from draftwise.sampling.draw import raise_tail
from draftwise.sampling.noise import gumbel_of_keys, row_key, signed_word
from draftwise.sampling.rows import top_rows
from draftwise.types import DraftedTree, StepInput, TreeDraws


class Candidates(NamedTuple):
    """All nodes of dynamic trees that were drawn, C of a request, level by level."""

    tokens: Tensor  # [R, C] int64
    parents: Tensor  # [R, C] int64, candidates; -1: the root
    scores: Tensor  # [R, C] float32, log-probabilities of their paths
    depths: Tensor  # [C] int64, from 1 on
    levels: int

    def keep(self, first: int, scores: Tensor, tokens: Tensor, parents: Tensor) -> None:
        """Take in a level, [R, n] each."""
        stop = first + tokens.shape[1]
        self.scores[:, first:stop].copy_(scores)
        self.tokens[:, first:stop].copy_(tokens)
        self.parents[:, first:stop].copy_(parents)

    def choose(self, count: Tensor, tokens: Tensor, form: Tensor) -> None:
        """The best nodes of the first ``count`` [R] candidates, best first, earlier ones first among equals: so that
        parents come before their children, and any first n of them are a tree.

        Args:
            count: see above.
            tokens: [R, n] int64, written.
            form: [R, 3, n + 1] int64, written: depths, ancestors and parents of the root and these, as
                `seats.memory.form_of` has them. Behind the first ``count`` nothing has a meaning.

        Example: candidates 5 and 7 below the root, 2 and 3 below 5, of scores -1, -3, -1.5, -4: 5, 2, 7, 3, whose
        parents are -1, 0, -1, 0 and whose ancestors, with the root's 1, are 3, 7, 9, 19.
        """
        requests, nodes = tokens.shape
        every = self.scores.shape[1]
        place = torch.arange(every, device=count.device)
        scores = self.scores.masked_fill(place >= count[:, None], float("-inf"))
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, :nodes]
        tokens.copy_(self.tokens.gather(1, order))
        row = torch.arange(1, nodes + 1, device=count.device)
        rows = torch.zeros((requests, every + 1), dtype=torch.int64, device=count.device)  # the root's: 0
        rows.scatter_(1, order + 1, row.expand(requests, -1))
        above = rows.gather(1, self.parents.gather(1, order) + 1)  # [R, n] rows of parents
        form[:, 0, 1:].copy_(self.depths[order])
        form[:, 2, 1:].copy_(above - 1)
        masks = torch.ones_like(form[:, 1])
        own = torch.ones_like(row) << row
        for _ in range(self.levels):  # after l of them, those of nodes on l levels are whole
            masks[:, 1:].copy_(masks.gather(1, above) | own)
        form[:, 1].copy_(masks)


class TreeLoop(DraftLoop):
    """A tree below every request of a pass."""

    def __init__(
        self, plan: TreePlan, kind: LoopKind, drafter: Drafter, rows: PassBuffers, memory: LoopMemory
    ) -> None:
        """See `DraftLoop`."""
        self.plan = plan
        requests, device = rows.shape.requests, memory.counters.device
        self._every: tuple[Tensor, Tensor | None]  # while it is captured, see `_in_one_pass`
        self._levels: list[Level] = []
        self._children: list[Children] = []
        reach = torch.tensor(plan.reach, device=device)
        form = None
        if plan.shape is not None:
            self._levels, self._children, depths, nodes = lay_out(plan.shape, kind, device)
        else:
            size = (requests, plan.candidates)
            self._found = Candidates(
                torch.zeros(size, dtype=torch.int64, device=device),
                torch.zeros(size, dtype=torch.int64, device=device),
                torch.zeros(size, dtype=torch.float32, device=device),
                torch.arange(1, plan.depth + 1, device=device).repeat_interleave(reach.diff()),
                plan.depth,
            )
            form = torch.zeros((requests, 3, plan.steps + 1), dtype=torch.int64, device=device)
            depths = torch.arange(plan.depth, device=device)
            nodes = torch.full_like(depths, -1)
            for level in range(plan.depth - 1):
                places = torch.arange(level * plan.top_k, (level + 1) * plan.top_k, device=device)
                self._levels.append(Level(level * plan.top_k, torch.ones_like(places) << places))
        tokens = torch.zeros((requests, plan.steps), dtype=torch.int64, device=device)
        super().__init__(kind, drafter, rows, memory, tokens, reach, depths, nodes, form)

    def takes(self, need: Need, draws: Sequence[TreeDraws]) -> bool:
        """Whether it can draft for requests with this need. `TreeDraws` says nothing of children drawn from q: such
        loops are for seats alone."""
        noisy = self.kind == "shared"
        return (
            not self.at_once
            and self.kind != "draft"
            and self.rows.fits(need)
            and all(self.plan.takes(one) and bool(one.noise_scale) == noisy for one in draws)
        )

    def run(self, batch: StepInput, features: Tensor | None, draws: Sequence[TreeDraws]) -> list[DraftedTree]:
        """As `DecoderModel.draft_trees`; the loop must take it."""
        count = self._fill(batch, features, self.steps)
        self._scale_np[:count] = [one.scale for one in draws]
        shape, reach = self.plan.shape, self.plan.reach
        if shape is None:
            self._length_np[:count] = [reach[one.depth] for one in draws]
        if self.kind == "shared":
            self._take_noise(draws)
        self._draft()
        tokens = self.seats.tokens[:count].tolist()
        if shape is not None:
            return [DraftedTree(tuple(row), shape.parents) for row in tokens]
        assert self.seats.form is not None
        parents = self.seats.form[:count, 2, 1:].tolist()
        sizes = [min(one.nodes, reach[one.depth]) for one in draws]
        return [
            DraftedTree(tuple(own[:size]), tuple(above[:size]))
            for own, above, size in zip(tokens, parents, sizes, strict=True)
        ]

    def _take_noise(self, draws: Sequence[TreeDraws]) -> None:
        places = [(c.first, c.opened) for c in self._children] or [
            (level, 1) for level in range(self.plan.depth)
        ]
        for r, one in enumerate(draws):
            self._scale_np[r] = one.scale / one.noise_scale  # the order of the sums is the same
            for depth, (first, count) in enumerate(places):
                word = row_key(one.seed, one.sample_index, SHARED, int(self._start_np[r]) + depth, -1, 0)
                self._noise_np[r, first : first + count] = signed_word(word)

    # ----------------------------------------------------------------------------------- what is captured

    def _run(self) -> None:
        self.rows.batch.attention.cache.clear()  # of another run; it would be missing in a replay
        state: Tensor | None
        if self.at_once:
            self._every = self._in_one_pass()
            last = self.rows.batch.token_ids.index_select(0, self.seats.last)
            logits, state = self._corrected(0, last[:, None], None)
        else:
            hidden, state = self._advance(self.rows.batch, self.seats.features)
            logits = self.drafter.logits(hidden.index_select(0, self.seats.last))
            if state is not None:
                state = state.index_select(0, self.seats.last)
        if self.plan.shape is not None:
            self._run_static(logits, state)
        else:
            self._run_dynamic(logits, state)

    def _run_static(self, logits: Tensor, state: Tensor | None) -> None:
        requests = self.shape.requests
        for i, level in enumerate(self._levels):
            self._draw(i, logits)
            assert level.tokens_of is not None and level.parents is not None
            tokens = self.seats.tokens.index_select(1, level.tokens_of)
            if state is not None:
                wide = state.view(requests, -1, state.shape[1])
                state = wide.index_select(1, level.parents).flatten(0, 1)
            logits, state = self._behind(i, tokens, level.masks.expand(requests, -1), state)
        self._draw(len(self._levels), logits)

    def _behind(
        self, fed: int, tokens: Tensor, masks: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """What the children of ``tokens`` [R, n], nodes of a level that is fed, are drawn from.

        Args:
            fed: number of the level, from 0 on.
            masks: [R, n] int64, the nodes' paths.
            state: [R * n, F] what their parents gave: features, or the state of a correction.

        Returns:
            Logits [R * n, Vd], or [R, Vd] behind all of them; and what these nodes give.
        """
        if self.at_once:
            return self._corrected(fed + 1, tokens, state)
        hidden, state = self._advance(self._batch(fed, self._levels[fed], tokens, masks), state)
        return self.drafter.logits(hidden), state

    def _corrected(self, level: int, before: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """As `_behind`, from what one pass gave for the drafts of a level, behind the tokens ``before`` [R, n]."""
        (logits, hidden), block, nodes = self._every, self.drafter.block, before.shape[1]
        if block is None or block.correct is None:
            return logits[level], None
        assert hidden is not None
        own, states = (x[level][:, None].repeat(1, nodes, 1).flatten(0, 1) for x in (logits, hidden))
        return block.correct(own, before.flatten(), states, state, level)

    def _draw(self, level: int, logits: Tensor) -> None:
        """The nodes of a static level, from ``logits`` [R * open, Vd] behind their parents, or [R, Vd] behind all of
        them."""
        children = self._children[level]
        logits = self._biased(logits)
        wide = logits.view(self.shape.requests, -1, logits.shape[1])
        if self.kind == "draft":  # each parent's children have noise of their own
            wide = wide.expand(-1, children.opened, -1)
        rows = wide.shape[1]
        draws = slice(children.first, children.first + rows)
        flat = wide.flatten(0, 1)
        scales = keys = None
        if self.kind != "argmax":
            scales = self.seats.scale.float()[:, None].repeat(1, rows).flatten()
            keys = self.seats.noise[:, draws].flatten()
        if self.seats.q is not None:
            assert scales is not None
            flat, scales = raise_tail(flat * scales[:, None]), None
            self.seats.q[:, draws].copy_(flat.softmax(-1).view(wide.shape))
        ids = self._best(flat, children.most, scales, keys)
        places = children.places if rows > 1 else 0
        drawn = ids.view(self.shape.requests, -1, children.most)[:, places, children.ranks]  # [R, m]
        self.seats.tokens.index_copy_(1, children.nodes, drawn)

    def _run_dynamic(self, logits: Tensor, state: Tensor | None) -> None:
        requests, k = self.shape.requests, self.plan.top_k
        scores, ids = (x.squeeze(1) for x in self._best_children(logits, 0))
        self._found.keep(0, scores, ids, torch.full_like(ids, -1))
        tokens, place = ids, torch.arange(k, device=ids.device).expand(requests, k)
        if state is not None:
            state = state[:, None].expand(-1, k, -1).flatten(0, 1)
        masks = torch.zeros_like(ids)
        first = 0  # candidate of the latest level
        for i, level in enumerate(self._levels):
            masks = masks | level.masks
            logits, state = self._behind(i, tokens, masks, state)
            below, ids = self._best_children(logits, i + 1)
            totals = (scores[:, :, None] + below).flatten(1)
            parents = (first + place)[:, :, None].expand(requests, k, k).flatten(1)
            first = k + i * k * k
            candidates = ids.expand(requests, k, k).flatten(1)
            self._found.keep(first, totals, candidates, parents)
            if i + 1 < len(self._levels):
                scores, place = totals.topk(k)  # [R, k]
                tokens = candidates.gather(1, place)
                above = place // k
                masks = masks.gather(1, above)
                if state is not None:
                    size = state.shape[1]
                    wide = state.view(requests, k, size)
                    state = wide.gather(1, above[:, :, None].expand(-1, -1, size)).flatten(0, 1)
        assert self.seats.form is not None
        self._found.choose(self.seats.length, self.seats.tokens, self.seats.form)

    def _best_children(self, logits: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """``logits`` [R * n, Vd] -> log-probabilities and target ids of the best tokens, [R, n, top_k]. Under shared
        noise g: softmax(T * (logits / T + g)), see `sampling.draw.draft_candidates`."""
        scale = self.seats.scale.float()[:, None, None]
        scores = self._biased(logits).view(self.shape.requests, -1, logits.shape[1]) * scale
        if self.kind == "shared":
            noise = gumbel_of_keys(self.seats.noise[:, level], self._counters)  # of all nodes of a level
            scores = (scores + noise[:, None]) / scale
        best = top_rows(scores.flatten(0, 1), self.plan.top_k, totals=True)
        assert best.log_totals is not None
        # float32 may round a sum of exponentials below its largest term
        shape = (*scores.shape[:2], self.plan.top_k)
        values = (best.values - best.log_totals[:, None]).clamp_(max=0.0)
        return values.view(shape), self._ids(best.indices).view(shape)

    def _batch(self, depth: int, level: Level, tokens: Tensor, masks: Tensor) -> StepInput:
        """The pass that feeds ``tokens`` [R, n], nodes of depth ``depth`` + 1, at keys start + level.start + i."""
        drafter, (requests, n) = self.drafter, tokens.shape
        keys = self.seats.start[:, None] + torch.arange(level.start, level.start + n, device=tokens.device)
        at = self.seats.start + depth + drafter.position_offset
        positions = at.clamp(0, drafter.max_position)[:, None].expand(requests, n)
        # A fed node of a static tree has no higher number among the fed ones than among all.
        first_unused = self.seats.length[:, None] * (1 if self.plan.shape is not None else n + level.start)
        counts = keys - self.seats.start[:, None] < first_unused
        stored = counts & (at <= drafter.max_position)[:, None]
        return self._rows_at(tokens, keys, positions, stored, masks)
