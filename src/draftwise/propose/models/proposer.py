"""Drafting with a smaller causal model of the same vocabulary (Leviathan 2211.17192, Chen 2302.01318)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar, Self

import numpy as np

from draftwise.graphs.decoder import GraphedDecoder
from draftwise.graphs.seats.drafter import seat_loops
from draftwise.kernels.cpu.book_drafts import BookDrafts, InBooks
from draftwise.kernels.cpu.rounds import RoundDrafts
from draftwise.models.base import DecoderModel
from draftwise.models.inputs import RowInput, build_step_input, pack_spans
from draftwise.propose.base import DraftRow, ProposerContext
from draftwise.propose.chains import (
    ChainKind,
    alike,
    chain_draws,
    draw_next,
    kind_of_columns,
    longest_chain,
    loop_draws,
    loop_proposals,
    one_loop,
)
from draftwise.propose.columns import ColumnDrafter, DraftColumns, RoundDrafter, says_itself
from draftwise.propose.models.loading import load_draft_model
from draftwise.propose.models.passes import CATCH_UP_ROWS, ModelDraft, ModelPasses
from draftwise.propose.models.seated import SeatedModel
from draftwise.propose.trees.expansion import draft_trees, is_tree
from draftwise.propose.trees.growth import TreeTask
from draftwise.propose.trees.native import (
    as_proposal,
    book_tree,
    by_passes,
    forest_draws,
    native_draws,
    tree_proposals,
)
from draftwise.sampling.draw import DraftSampleMethod
from draftwise.types import IntArray, Proposal, StepInput


class ModelProposer(ModelPasses, ColumnDrafter, RoundDrafter):
    """Runs a draft model autoregressively: one pass per position, or per level of a tree, in one call where nothing but
    draws stands between the passes."""

    drafts_trees: ClassVar[bool] = True
    drafts_dynamic_trees: ClassVar[bool] = True
    reads_books: ClassVar[bool] = True

    def __init__(
        self,
        model: DecoderModel,
        *,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int = 64,
        sample_method: DraftSampleMethod = "probabilistic",
        num_drafts: int = 1,
    ) -> None:
        """``num_drafts``: tokens of a chain that states are kept for, if the model carries any.
        ``max_model_len``: no token at this position or later is fed to the drafter; drafting stops there.
        ``sample_method``: "probabilistic" draws from the drafter's distribution, "greedy" takes its argmax."""
        super().__init__(model, block_size, max_num_seqs, num_drafts)
        self._max_len = min(max_model_len, model.config.max_model_len)
        self._sample_method = sample_method
        if self._carried is not None:
            self.most_drafts = num_drafts
            self.drafts_trees = self.drafts_dynamic_trees = False  # type: ignore[misc]  # of this one
        self._books: BookDrafts | None = None  # see `allocate`
        self._drafts: dict[int, ModelDraft] = {}
        # Rows of the present call that one loop drafted for -> tokens with K/V.
        self._looped: dict[int, int] = {}
        self._loop_stored = 0  # drafts with K/V behind them

    @classmethod
    def create(cls, context: ProposerContext) -> Self:
        """Load the draft model named by ``speculative_config``; raises ConfigError if it does not fit the target."""
        model = load_draft_model(context)
        config = context.speculative
        return cls(
            model,
            block_size=context.block_size,
            max_model_len=context.max_draft_len,
            max_num_seqs=context.max_num_seqs,
            sample_method=context.sample_method,
            num_drafts=config.num_speculative_tokens,
        )

    # -------------------------------------------------------------------------------------------- propose

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        self._drafts = {}
        self._looped, self._loop_stored = {}, 0
        found = None
        if self._carried is None:
            found = one_loop(rows, self._sample_method, self._max_len, self._block_size)
        if found is not None:
            proposals = self._loop(rows, *found)
        else:
            proposals = self._forest(rows) if self._carried is None else None
        if proposals is not None:
            return proposals
        drafts = [self._start(row) for row in rows]
        active = [d for d in drafts if d.length > len(d.tokens)]
        trees = [d for d in active if is_tree(d.row)]
        if trees:
            active = [d for d in active if not is_tree(d.row)]
            together = self._scratch.num_requests
            for group in by_passes(trees, self._sample_method):
                for i in range(0, len(group), together):
                    self._draft_trees(group[i : i + together])
        active = [
            d
            for kind, group in alike(active, self._sample_method)
            if not self._draft_at_once(group, kind)
            for d in group
        ]
        if active:
            logits = self._catch_up(active)
        while active:
            draw_next(active, logits, self._sample_method)
            active = [d for d in active if d.length > len(d.tokens)]
            if active:
                logits = self._advance(active)
        return [draft.proposal(self.name, self._sample_method) for draft in drafts]

    def draft_columns(self, columns: DraftColumns) -> InBooks | None:
        begun = time.perf_counter()
        if not self._ask(columns):
            return None
        assert self._storage is not None and self._books is not None, "allocate comes before propose"
        found = self._model.draft_books(self._books, self._storage)
        if found is not None:
            self._drafts, self._looped = {}, {}
            self.forward_time += time.perf_counter() - begun
        return found

    def round_drafts(self, columns: DraftColumns, rounds: int, rows: int) -> tuple[RoundDrafts, None] | None:
        if not self._ask(columns):
            return None
        assert self._storage is not None and self._books is not None, "allocate comes before propose"
        found = self._model.round_passes(self._books, self._storage, rows)
        if found is None:
            return None
        self._drafts, self._looped = {}, {}
        return found, None

    def _ask(self, columns: DraftColumns) -> bool:
        """Say who wants drafts, if native code can make them."""
        if self._carried is not None or says_itself(self, ModelProposer.propose):
            return False
        assert self._books is not None, "allocate comes before propose"
        tree = None
        if columns.is_tree:
            tree = book_tree(columns, self._sample_method)
            if tree is None:
                return False
        kind = kind_of_columns(columns, self._sample_method)
        self._books.ask(columns.places, columns.asked, kind, tree=tree)
        return True

    def _loop(self, rows: Sequence[DraftRow], kind: ChainKind, length: int) -> list[Proposal] | None:
        """Let the model do the whole loop for all rows, if it can."""
        found = self._spans(rows)
        if found is None:
            return None
        begun = time.perf_counter()
        batch, last = found
        assert self._storage is not None, "allocate comes before propose"
        chains = self._model.draft_chains(batch, self._storage, last, length, loop_draws(rows, kind))
        if chains is None:
            return None
        self.forward_time += time.perf_counter() - begun
        self._looped = {row.rid: len(row.token_ids_np) for row in rows}
        self._loop_stored = length - 1
        drawn, q = chains
        return loop_proposals(drawn.tolist(), q, kind, self.name)

    def _spans(
        self, rows: Sequence[DraftRow], tables: Sequence[IntArray] | None = None
    ) -> tuple[StepInput, list[int] | None] | None:
        """A batch of the known tokens that the model has not read, the last one of each row in any case, and where
        these last ones stand in it (None: they are all). None: these are too many for one pass. ``tables``: of the
        blocks, where these are more than the rows' own."""
        filled = self._filled
        firsts = [min(filled(row), len(row.token_ids_np) - 1) for row in rows]
        tokens = [row.token_ids_np for row in rows]
        total = sum(map(len, tokens)) - sum(firsts)
        if total > CATCH_UP_ROWS:
            return None
        batch = pack_spans(
            firsts,
            tokens,
            [row.block_table_np for row in rows] if tables is None else tables,
            [row.tokens_at for row in rows],
            [row.blocks_at for row in rows] if tables is None else [0] * len(rows),
            self._block_size,
            self._model.inputs_on,
            packer=self._packer,
        )
        last = None if total == len(rows) else (batch.attention.query_start_np[1:] - 1).tolist()
        return batch, last

    def _forest(self, rows: Sequence[DraftRow]) -> list[Proposal] | None:
        """Let the model draft the trees of all rows, if that is what they want and it can."""
        found = forest_draws(rows, self._sample_method, self._max_len, self._block_size)
        if found is None:
            return None
        draws, scratch = found
        together = self._scratch.num_requests if scratch else len(rows)
        proposals: list[Proposal] = []
        for i in range(0, len(rows), together):
            own = rows[i : i + together]
            tables = None
            if scratch:
                tables = [self._scratch.table(k, row.block_table_np) for k, row in enumerate(own)]
            spans = self._spans(own, tables)
            if spans is None:
                return None
            begun = time.perf_counter()
            assert self._storage is not None, "allocate comes before propose"
            trees = self._model.draft_trees(spans[0], self._storage, spans[1], draws[i : i + together])
            if trees is None:
                return None
            self.forward_time += time.perf_counter() - begun
            proposals += tree_proposals(trees, self.name)
        self._looped = {row.rid: len(row.token_ids_np) for row in rows}
        return proposals

    def _start(self, row: DraftRow) -> ModelDraft:
        length = longest_chain(row, self._max_len, self._block_size)
        if self.most_drafts is not None:  # a grammar may force more, and a hybrid may ask for them
            length = min(length, self.most_drafts)
        forced = row.forced[: max(length, 0)]
        context_np = row.token_ids_np
        if forced:
            context_np = np.concatenate([context_np, np.asarray(forced, np.int32)])
        draft = ModelDraft(
            row, length, list(forced), context_np=context_np, fed=min(self._filled(row), row.num_tokens)
        )
        self._drafts[row.rid] = draft
        return draft

    def _draft_trees(self, drafts: Sequence[ModelDraft]) -> None:
        """Draft the trees of as many requests as there are scratch blocks for."""
        tasks = [
            TreeTask(d.row, d.row.budget - len(d.tokens), d.length - len(d.tokens), tuple(d.tokens))
            for d in drafts
        ]
        if self._draft_trees_at_once(drafts, tasks):
            return
        logits = self._catch_up(drafts)
        trees = draft_trees(self, tasks, logits, name=self.name, method=self._sample_method)
        for draft, tree in zip(drafts, trees, strict=True):
            draft.tree = tree

    def _draft_trees_at_once(self, drafts: Sequence[ModelDraft], tasks: Sequence[TreeTask]) -> bool:
        """Let the model do all levels, where it can and nothing but a choice stands between them."""
        starts = [min(d.fed, len(d.context_np) - 1) for d in drafts]
        rows = sum(len(d.context_np) - start for d, start in zip(drafts, starts, strict=True))
        if rows > CATCH_UP_ROWS:
            return False
        draws = native_draws(tasks, self._sample_method)
        if draws is None:
            return False
        begun = time.perf_counter()
        assert self._storage is not None, "allocate comes before propose"
        inputs = [
            RowInput(d.context_np[start:], start, self._scratch.table(i, d.row.block_table_np))
            for i, (d, start) in enumerate(zip(drafts, starts, strict=True))
        ]
        batch = build_step_input(inputs, self._block_size, self._model.inputs_on, packer=self._packer)
        last = None if rows == len(drafts) else (batch.attention.query_start_np[1:] - 1).tolist()
        trees = self._model.draft_trees(batch, self._storage, last, draws)
        if trees is None:
            return False
        self.forward_time += time.perf_counter() - begun
        for draft, task, tree in zip(drafts, tasks, trees, strict=True):
            draft.fed = len(draft.context_np)
            draft.tree = as_proposal(task, tree, self.name)
        return True

    def _draft_at_once(self, active: Sequence[ModelDraft], kind: ChainKind | None) -> bool:
        """Let the model do the whole loop where nothing stands between its passes but a draw at a temperature, the
        same ``kind`` for all. False: it cannot."""
        rows = sum(len(d.context_np) - min(d.fed, len(d.context_np) - 1) for d in active)
        if kind is None or rows > CATCH_UP_ROWS or self._carried is not None:
            return False
        steps = active[0].length - len(active[0].tokens)
        start = time.perf_counter()
        assert self._storage is not None, "allocate comes before propose"
        inputs = []
        for draft in active:
            first = min(draft.fed, len(draft.context_np) - 1)
            inputs.append(RowInput(draft.context_np[first:], first, draft.row.block_table_np))
        batch = build_step_input(inputs, self._block_size, self._model.inputs_on, packer=self._packer)
        last = None if rows == len(active) else (batch.attention.query_start_np[1:] - 1).tolist()
        draws = chain_draws(active, kind)
        chains = self._model.draft_chains(batch, self._storage, last, steps, draws)
        if chains is None:
            return False
        self.forward_time += time.perf_counter() - start
        drawn, q = chains
        all_q = None if q is None else q.flatten(0, 1)  # of all requests, one after the other
        for i, (draft, tokens) in enumerate(zip(active, drawn.tolist(), strict=True)):
            draft.fed = len(draft.context_np)
            draft.take(tokens, all_q, i * len(tokens))
            draft.stored = len(draft.tokens) - 1
        return True

    # ------------------------------------------------------------------------------------------ state kept

    def filled_after(self, row: DraftRow) -> int:
        looped = self._looped.get(row.rid)
        if looped is not None:
            return looped
        draft = self._drafts.get(row.rid)
        return row.filled if draft is None or draft.length <= 0 else min(draft.fed, row.num_tokens)

    def drafts_stored(self, row: DraftRow) -> int:
        if row.rid in self._looped:
            return self._loop_stored
        draft = self._drafts.get(row.rid)
        # A tree's nodes do not stand where its path will be: what is accepted is read again.
        return 0 if draft is None or draft.tree is not None else draft.stored

    def stored_after(self, rows: Sequence[DraftRow]) -> tuple[list[int], list[int]] | None:
        looped = self._looped
        if [row.rid for row in rows] != list(looped):
            return None
        return list(looped.values()), [self._loop_stored] * len(rows)

    def allocate(self, num_blocks: int) -> None:
        super().allocate(num_blocks)
        self._books = BookDrafts(
            self.name,
            block_size=self._block_size,
            max_len=self._max_len,
            vocab_size=self._model.config.vocab_size,
            scratch=self._scratch.of_books(),
            most_rows=CATCH_UP_ROWS,
            shares=not self.has_storage,
        )

    def seated(self) -> SeatedModel | None:
        model = self._model
        loops = seat_loops(model.loops) if isinstance(model, GraphedDecoder) else ()
        if not loops or self._carried is not None:
            return None
        assert self._storage is not None, "allocate comes first"
        return SeatedModel(
            loops,
            self._max_len,
            self._sample_method,
            model,
            self._storage,
            self._block_size,
            self._scratch.seats,
        )
