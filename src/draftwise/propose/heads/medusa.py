"""Drafting with Medusa heads (Cai et al. 2024, arXiv:2401.10774): all drafts from one hidden state of the target."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch

from draftwise.errors import ConfigError
from draftwise.graphs.medusa import GraphedMedusa
from draftwise.graphs.seats.drafter import SeatedDrafter, seat_loops
from draftwise.kernels.cpu.rounds import FeatureJoin, RoundDrafts, RoundFeatures, RoundGuesses
from draftwise.models.heads.medusa import MedusaHeads
from draftwise.names import method_number
from draftwise.propose.base import Committed, DraftRow, Proposer, ProposerContext
from draftwise.propose.chains import (
    ChainDraft,
    ChainKind,
    chain_kind,
    column_draws,
    draw_next,
    kind_of_columns,
    loop_draws,
)
from draftwise.propose.columns import (
    ColumnDrafter,
    ColumnFollower,
    DraftBlock,
    DraftColumns,
    ReadColumns,
    RoundAnswer,
    RoundDrafter,
    says_itself,
)
from draftwise.propose.heads.seated_medusa import SeatedMedusa
from draftwise.propose.trees.expansion import TreeModel, draft_trees, is_tree
from draftwise.propose.trees.growth import TreeLevel, TreeTask
from draftwise.propose.trees.native import cut_shape
from draftwise.sampling.draw import DraftSampleMethod, draft_tokens
from draftwise.sampling.logits import LogitsRow
from draftwise.sampling.rows import top_rows
from draftwise.types import Proposal, StepInput, TargetOutput


@dataclass(slots=True)
class _Draft(ChainDraft):
    """Draft d, from 0, comes from head d whatever the drafts before it are. ``length`` of a tree: its levels."""

    forced: tuple[int, ...] = ()
    index: int = 0  # among the rows of the call: which column of the logits


class MedusaProposer(Proposer, TreeModel, ColumnDrafter, ColumnFollower, RoundDrafter):
    """Chains, static trees and dynamic trees from the heads' guesses at the next tokens.

    The heads read the target's hidden state of the newest token that the target has read. That is always a row of the
    step that has just been verified, so nothing is kept from one step to the next, and neither prefix hits nor
    preemption nor steps without drafting matter. A head's distribution does not depend on the drafts before its
    position: the children of all nodes of a level are drawn from the same distribution, independently for each node.
    """

    name: ClassVar[str] = "medusa"
    observes: ClassVar[bool] = True
    drafts_trees: ClassVar[bool] = True
    drafts_dynamic_trees: ClassVar[bool] = True

    def __init__(
        self,
        heads: MedusaHeads,
        *,
        max_model_len: int,
        sample_method: DraftSampleMethod = "probabilistic",
        graphed: GraphedMedusa | None = None,
    ) -> None:
        """``max_model_len``: no draft stands at this position or behind it. ``sample_method``: "probabilistic" draws
        from the heads' distributions, "greedy" takes their most likely tokens. ``graphed``: for steps that stay on
        the device."""
        self._graphed = graphed
        self._heads = heads
        self._max_len = max_model_len
        self._sample_method = sample_method
        self._hidden: torch.Tensor | None = None  # [T, H] of the step's target pass
        self._rows: dict[int, int] = {}  # see `_newest`
        self._told: tuple[Sequence[int], npt.NDArray[np.int64]] | None = None  # the same of many requests
        self._logits = torch.empty(0)  # [heads, R, Vd] float32, of the rows of the present call
        self._room: torch.Tensor | None = None  # [2, n, H] hidden states of rounds
        self._halves: Sequence[torch.Tensor] = ()  # of it
        self._features: RoundFeatures | None = None  # as rounds were told of them last
        self._rounds: tuple[list[int], array[int]] | None = None  # whose they are, and rows of each
        self._columns: list[int] = []  # of the trees of the present call: index of each in the rows

    @classmethod
    def create(cls, context: ProposerContext) -> Self:
        """Load the heads named by ``speculative_config``.

        Raises:
            ConfigError: K or the tree is deeper than there are heads.
            ModelLoadError: they cannot be loaded, or are for another target.
        """
        from draftwise.models.heads.loading import head_folder, load_medusa, target_link

        config = context.speculative
        folder = head_folder(config.model, config.revision, config.method)
        link, ops = target_link(
            context.target_model, context.max_model_len, context.dtype, context.device, config.quantization
        )
        heads = load_medusa(folder, link, ops)
        tree = config.speculative_token_tree
        depth = config.num_speculative_tokens if tree is None else max(map(len, tree))
        if depth > heads.num_heads and config.speculative_dynamic_tree is None:
            name = "num_speculative_tokens" if tree is None else "speculative_token_tree"
            raise ConfigError(
                f"speculative_config.{name}: reaches {depth} tokens ahead, {config.model!r} has {heads.num_heads} "
                "Medusa heads, one for each"
            )
        graphed: GraphedMedusa | None = None
        if context.graphs is not None:
            hidden_size = context.target_config.hidden_size
            plan = context.graphs.tree_of(config)
            graphed = context.graphs.medusa(
                heads, config.num_speculative_tokens, hidden_size, context.dtype, plan
            )
        return cls(
            heads,
            max_model_len=context.max_draft_len,
            sample_method=context.sample_method,
            graphed=graphed,
        )

    # ------------------------------------------------------------------------------ after the target's pass

    @property
    def _newest(self) -> dict[int, int]:
        """By request its newest committed row of the pass."""
        told, self._told = self._told, None
        if told is not None:
            self._rows.update(zip(told[0], told[1].tolist(), strict=True))
        return self._rows

    def observe(self, rids: Sequence[int], batch: StepInput, output: TargetOutput) -> None:
        self._hidden, self._told = output.hidden, None
        self._rows.clear()

    def read_columns(self, read: ReadColumns) -> bool:
        if self._told is not None:
            return False
        self._told = read.rids, read.rows_np[np.cumsum(read.counts) - 1]
        return True

    def committed(self, parts: Sequence[Committed]) -> None:
        for part in parts:
            if part.rows:
                self._newest[part.rid] = part.rows[-1]

    def remove(self, rid: int) -> None:
        self._newest.pop(rid, None)

    # --------------------------------------------------------------------------- steps that stay on the device

    def memory_static(self) -> int:
        return 0 if self._graphed is None else self._graphed.static_bytes()

    def allocate(self, num_blocks: int) -> None:
        if self._graphed is not None:
            self._graphed.prepare()

    def seated(self) -> SeatedDrafter | None:
        loops = () if self._graphed is None else seat_loops(self._graphed.loops)
        if not loops or says_itself(self, MedusaProposer.propose):
            return None
        return SeatedMedusa(loops, self._max_len, self._sample_method)

    # -------------------------------------------------------------------------------------------- propose

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        drafts = [self._start(row) for row in rows]
        active = [draft for draft in drafts if draft.length > len(draft.forced)]
        if active:
            for i, draft in enumerate(active):
                draft.index = i
            self._compute(active)
            chains = [draft for draft in active if not is_tree(draft.row)]
            trees = [draft for draft in active if is_tree(draft.row)]
            if chains:
                self._draw_chains(chains)
            if trees:
                for draft, tree in zip(trees, self._draft_trees(trees), strict=True):
                    draft.tree = tree
        return [draft.proposal(self.name, self._sample_method) for draft in drafts]

    def draft_columns(self, columns: DraftColumns) -> DraftBlock | None:
        """Chains of one kind, and static trees of the most likely tokens."""
        told, speculation = self._told, columns.speculation
        if (
            told is None
            or (columns.is_tree and not columns.greedy)
            or speculation.dynamic is not None
            or list(told[0]) != columns.rids
            or says_itself(self, MedusaProposer.propose)
            or any(state.adjusts for state in columns.states())
        ):
            return None
        # draft d, from 1, stands at position num_tokens - 1 + d
        facts, budgets = columns.facts, columns.budgets
        cuts = [
            min(depth, self._max_len - known, self._heads.num_heads)
            for depth, known in zip(facts.max_depths, facts.known, strict=True)
        ]
        if columns.is_tree:
            if len(set(cuts)) > 1 or len(set(budgets)) > 1:
                return None
        else:  # near their ends requests want less
            cuts = list(map(min, cuts, budgets))
        depth, budget = max(cuts), budgets[0]
        if min(cuts) < 1:
            return None
        sizes = None if min(cuts) == depth else cuts
        kind = kind_of_columns(columns, self._sample_method)
        draws = column_draws(columns, kind)
        if draws is not None and not self._can_draw(kind):
            return None
        begun = time.perf_counter()
        assert self._hidden is not None, "observe comes before propose"
        logits = self._heads.logits(self._hidden[torch.from_numpy(told[1])], depth)  # [depth, R, Vd]
        self.forward_time += time.perf_counter() - begun
        if logits.device.type != "cpu" or logits.dtype is not torch.float32:
            return None
        ids = self._heads.target_ids
        if draws is not None:
            tokens, q = self._heads.draw(logits, draws)
            return DraftBlock(tokens.astype(np.int32), sizes, None if q is None else q.flatten(0, 1))
        if speculation.tree is None:
            best = logits.numpy().argmax(axis=-1)
            tokens = best if ids is None else ids.numpy()[best]
            return DraftBlock(np.ascontiguousarray(tokens.T, np.int32), sizes)
        shape = cut_shape(speculation.tree, speculation.tree_ranks, budget, depth)
        levels = [above - 1 for above in Proposal(parents=shape.parents).depths()]
        top = top_rows(logits.flatten(0, 1), min(max(shape.ranks) + 1, logits.shape[2]))
        width = top.indices.shape[1]
        if max(shape.ranks) >= width:
            return None
        # node i of request r: rank i of what head `levels[i]` says of it
        places = np.array(levels)[None] * len(columns.rids) + np.arange(len(columns.rids))[:, None]
        ranks = np.array(shape.ranks)[None]
        if not np.isfinite(top.values.numpy()[places, ranks]).all():
            return None
        best = top.indices.numpy()[places, ranks]
        tokens = best if ids is None else ids.numpy()[best]
        parents = np.tile(np.array(shape.parents, np.int32), (len(columns.rids), 1))
        return DraftBlock(np.ascontiguousarray(tokens, np.int32), parents=parents)

    @property
    def in_rounds(self) -> bool:
        own = not says_itself(self, MedusaProposer.propose)
        return own and self._heads.native is not None and not self._heads.finishes

    @property
    def reads_every_step(self) -> bool:
        return False

    def round_drafts(
        self, columns: DraftColumns, rounds: int, rows: int
    ) -> tuple[RoundDrafts, RoundFeatures] | None:
        heads, speculation = self._heads, columns.speculation
        if not self.in_rounds or heads.native is None or speculation.dynamic is not None:
            return None
        if columns.is_tree and not columns.greedy:
            return None
        kind = kind_of_columns(columns, self._sample_method)
        if kind == "sampled" and not self._can_draw(kind):
            return None
        if self._room is None or self._room.shape[1] < rows:
            self._room = torch.empty((2, rows, heads.native.inputs), dtype=heads.native.dtype)
            self._halves = self._room.unbind()
        tree = None
        if speculation.tree is not None:
            tree = speculation.tree, speculation.tree_ranks or (0,) * len(speculation.tree)
        counts = array("i", bytes(4 * len(columns.rids)))
        self._rounds = columns.rids, counts
        drafts = RoundGuesses(
            heads.native,
            columns.asked,
            kind,
            method=method_number(self.name),
            max_len=self._max_len,
            target_ids=heads.target_ids,
            tree=tree,
        )
        if self._features is None or self._features.values is not self._room:
            self._features = RoundFeatures(FeatureJoin(), self._room, counts, None)
        self._features.counts = counts
        return drafts, self._features

    def after_rounds(self, answer: RoundAnswer) -> None:
        assert self._rounds is not None, "rounds were asked for"
        rids, counts = self._rounds
        self._rows.clear()
        self._hidden = self._halves[(answer.done - 1) % 2]
        self._told = rids, np.cumsum(counts, dtype=np.int64) - 1

    def _start(self, row: DraftRow) -> _Draft:
        # Draft d, from 1, stands at position num_tokens - 1 + d.
        limit = min(row.max_depth, self._max_len - row.num_tokens, self._heads.num_heads)
        if row.rid not in self._newest:
            limit = 0
        forced = row.forced[: max(min(limit, row.budget), 0)]
        if not is_tree(row) or len(forced) == row.budget:
            limit = min(limit, row.budget)
        return _Draft(row, max(limit, 0), list(forced), forced=forced)

    def _compute(self, drafts: Sequence[_Draft]) -> None:
        """The logits of all heads that are needed, for all rows at once."""
        start = time.perf_counter()
        assert self._hidden is not None, "observe comes before propose"
        rows = torch.tensor([self._newest[draft.row.rid] for draft in drafts], device=self._hidden.device)
        self._logits = self._heads.logits(self._hidden[rows], max(draft.length for draft in drafts))
        self.forward_time += time.perf_counter() - start

    def _draw_chains(self, drafts: Sequence[_Draft]) -> None:
        """Draw all positions at once, unless a draw depends on those before it."""
        deepest = max(draft.length for draft in drafts)
        if any(d.row.grammar is not None or d.row.sampling.needs_history for d in drafts):
            for depth in range(deepest):
                level = [draft for draft in drafts if len(draft.tokens) == depth < draft.length]
                if level:
                    logits = self._logits[depth, [draft.index for draft in level]]
                    draw_next(level, logits, self._sample_method, self._heads.target_ids)
            return
        drafts = self._draw_together(drafts)
        if not drafts:
            return
        positions = [
            (draft, d) for d in range(deepest) for draft in drafts if len(draft.forced) <= d < draft.length
        ]
        if len(positions) == self._logits.shape[0] * self._logits.shape[1]:
            logits = self._logits.flatten(0, 1)  # every row of every head, in this order
        else:
            logits = self._logits[[d for _, d in positions], [draft.index for draft, _ in positions]]
        tokens, q = draft_tokens(
            logits,
            [LogitsRow(draft.row.sampling, (), draft.row.token_ids_np) for draft, _ in positions],
            rules=[draft.row.speculation.rule for draft, _ in positions],
            positions=[draft.row.num_tokens + d for draft, d in positions],
            nodes=[d for _, d in positions],
            bases=[draft.row.num_tokens for draft, _ in positions],
            method=self._sample_method,
            vocab_map=self._heads.target_ids,
        )
        for i, ((draft, _), token) in enumerate(zip(positions, tokens, strict=True)):
            draft.take([token], None if q is None else q[i : i + 1])

    def _draw_together(self, drafts: Sequence[_Draft]) -> list[_Draft]:
        """Draw for those whose draws one call can make, as `draft_columns` does: the same bits. Who is left."""
        groups: dict[ChainKind, list[_Draft]] = {}
        left = []
        for draft in drafts:
            kind = chain_kind(draft.row, self._sample_method)
            if draft.forced or draft.row.sampling.adjusts or not self._can_draw(kind):
                left.append(draft)
            else:
                groups.setdefault(kind, []).append(draft)
        for kind, group in groups.items():
            draws = loop_draws([draft.row for draft in group], kind)
            assert draws is not None, "tokens that are drawn"
            logits = self._logits[: max(draft.length for draft in group), [draft.index for draft in group]]
            tokens, q = self._heads.draw(logits, draws)
            for i, draft in enumerate(group):
                draft.take(tokens[i, : draft.length].tolist(), None if q is None else q[i, : draft.length])
        return left

    def _can_draw(self, kind: ChainKind) -> bool:
        """Whether one call can draw chains of this kind; q has to be over the target's tokens."""
        mapped = kind == "sampled" and self._heads.target_ids is not None
        return kind != "argmax" and self._heads.draws and not mapped

    # ---------------------------------------------------------------------------------------------- trees

    def _draft_trees(self, drafts: Sequence[_Draft]) -> list[Proposal]:
        self._columns = [draft.index for draft in drafts]
        tasks = [
            TreeTask(d.row, d.row.budget - len(d.forced), d.length - len(d.forced), d.forced) for d in drafts
        ]
        return draft_trees(
            self,
            tasks,
            self._logits[[len(draft.forced) for draft in drafts], self._columns],
            name=self.name,
            method=self._sample_method,
            vocab_map=self._heads.target_ids,
        )

    def expand(self, levels: Sequence[TreeLevel]) -> torch.Tensor:
        """The logits of the heads of the nodes' depths: the same for all nodes of a level."""
        heads: list[int] = []
        columns: list[int] = []
        for level in levels:
            depth = level.ancestors[0].bit_count()
            heads += [len(level.task.forced) + depth] * len(level.tokens)
            columns += [self._columns[level.member]] * len(level.tokens)
        return self._logits[heads, columns]
