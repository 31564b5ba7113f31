"""Drafting with heads on the target's hidden states: EAGLE, EAGLE-3, MTP layers (see `models.heads.base`)."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Self

import torch

from draftwise.graphs.head import GraphedHead
from draftwise.graphs.seats.drafter import SeatedDrafter, seat_loops
from draftwise.kernels.cpu.book_drafts import ANY_LENGTH, BookDrafts, BookTree, InBooks
from draftwise.kernels.cpu.rounds import RoundDrafts, RoundFeatures
from draftwise.models.heads.base import HeadModel
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
from draftwise.propose.columns import (
    ColumnDrafter,
    DraftColumns,
    RoundAnswer,
    RoundDrafter,
    says_itself,
)
from draftwise.propose.heads.follower import HeadFollower
from draftwise.propose.heads.loops import HeadLoops
from draftwise.propose.heads.passes import HeadDraft
from draftwise.propose.heads.seated import SeatedHead
from draftwise.propose.heads.state import Features
from draftwise.propose.heads.steady import SteadyHeads
from draftwise.propose.heads.trees import HeadTrees, RootedTrees
from draftwise.propose.trees.expansion import ScratchBlocks, draft_trees, is_tree
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
from draftwise.types import EMPTY_PROPOSAL, Proposal


class HeadProposer(HeadFollower, ColumnDrafter, RoundDrafter):
    """Runs a head autoregressively, all requests of the batch in one pass per position, or per level of a tree.

    The head computes the rows of all committed tokens that it has not seen (`HeadFollower`), and goes on from its own
    output. K/V of drafts is not kept: it came from the head's own features, and is computed again from the target's
    once the tokens are accepted.
    """

    drafts_trees: ClassVar[bool] = True
    drafts_dynamic_trees: ClassVar[bool] = True
    reads_books: ClassVar[bool] = True

    def __init__(
        self,
        head: HeadModel,
        *,
        vocab_size: int,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int = 64,
        sample_method: DraftSampleMethod = "probabilistic",
    ) -> None:
        """``vocab_size``: of the target. ``max_model_len``: no token at this position or later is fed to the head;
        drafting stops there. ``sample_method``: "probabilistic" draws from the head's distribution, "greedy" takes its
        most likely token."""
        super().__init__(head, block_size)
        self._head = head
        self._loops = HeadLoops(self._passes)
        self._vocab_size = vocab_size
        self._max_len = min(max_model_len, head.max_model_len)
        self._max_num_seqs = max_num_seqs
        self._sample_method = sample_method
        self._scratch: ScratchBlocks  # see `allocate`
        self._books: BookDrafts  # see `allocate`
        self._most = ANY_LENGTH  # drafts in a row
        self._join = head.feature_join()
        self._room: torch.Tensor | None = None  # [2, n, F] features of rounds
        self._halves: Sequence[torch.Tensor] = ()  # of it
        self._features: RoundFeatures | None = None  # as rounds were told of them last
        self._first, self._half = 0, 1  # halves of it: where the latest rounds began, and where they ended
        self._together: tuple[list[int], list[int]] | None = None
        """The requests of the latest call, if the head did all of it at once, and the stored leading tokens of
        each."""

    @classmethod
    @abstractmethod
    def load(cls, context: ProposerContext) -> HeadModel:
        """Load the head named by ``speculative_config``; ConfigError or ModelLoadError if it does not fit.

        Readers of checkpoints are imported here, because `draftwise bench gpu` makes random heads where no such
        package is installed."""

    @classmethod
    def create(cls, context: ProposerContext) -> Self:
        config = context.speculative
        head = cls.load(context)
        if context.graphs is not None:
            head = context.graphs.head(head, config.num_speculative_tokens, context.graphs.tree_of(config))
        return cls(
            head,
            vocab_size=context.vocab_size,
            block_size=context.block_size,
            max_model_len=context.max_draft_len,
            max_num_seqs=context.max_num_seqs,
            sample_method=context.sample_method,
        )

    # -------------------------------------------------------------------------------------------- propose

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        self._together = None
        found = one_loop(rows, self._sample_method, self._max_len, self._block_size, self._most)
        proposals = self._forest(rows) if found is None else self._loop(rows, *found)
        if proposals is not None:
            return proposals
        drafts = [self._start(row) for row in rows]
        active = [d for d in drafts if d is not None and d.length > len(d.tokens)]
        trees = [d for d in active if is_tree(d.row)]
        if trees:
            active = [d for d in active if not is_tree(d.row)]
            together = self._scratch.num_requests
            for group in by_passes(trees, self._sample_method):
                for i in range(0, len(group), together):
                    self._draft_trees(group[i : i + together])
        left = [
            d
            for kind, group in alike(active, self._sample_method)
            if not self._draft_at_once(group, kind)
            for d in group
        ]
        if left:
            self._draft_chains(left)
        self.forward_time += self._passes.take_time()
        return [
            EMPTY_PROPOSAL if draft is None else draft.proposal(self.name, self._sample_method)
            for draft in drafts
        ]

    def draft_columns(self, columns: DraftColumns) -> InBooks | None:
        if says_itself(self, HeadProposer.propose):
            return None
        tree: BookTree | None = None
        if columns.is_tree:
            tree = book_tree(columns, self._sample_method)
            if tree is None:
                return None
        self._together = None
        begun = time.perf_counter()
        steady, states = self._steady, None
        features = None if steady is None else steady.ready(columns.rids)
        if features is None:
            states = [state for rid in columns.rids if (state := self._states.get(rid)) is not None]
            if len(states) != len(columns.rids) or self._head.num_depths > 1:
                return None
            features = self._loops.missing(columns.facts.known, states)
        kind = kind_of_columns(columns, self._sample_method)
        self._books.ask(columns.places, columns.asked, kind, features, tree)
        found = self._head.draft_books(self._books, self._passes.kv)
        if found is None:
            return None
        if states is not None:
            for state, known in zip(states, columns.facts.known, strict=True):
                state.tracks[0].advance(known)
            self._steady = SteadyHeads.of(columns.rids, states)
        elif steady is not None:
            steady.drafted()
        self.forward_time += time.perf_counter() - begun
        return found

    @property
    def in_rounds(self) -> bool:
        return self._join is not None and not says_itself(self, HeadProposer.propose)

    def round_drafts(
        self, columns: DraftColumns, rounds: int, rows: int
    ) -> tuple[RoundDrafts, RoundFeatures] | None:
        steady, join = self._steady, self._join
        if steady is None or join is None or says_itself(self, HeadProposer.propose):
            return None
        if self._passes.source.waits or not steady.rests(columns.rids):
            return None
        tree = None
        if columns.is_tree:
            tree = book_tree(columns, self._sample_method)
            if tree is None:
                return None
        if self._room is None or self._room.shape[1] < rows:
            self._room = torch.empty((2, rows, self._head.feature_size), dtype=self._head.dtype)
            self._halves = self._room.unbind()
        self._first = 1 - self._half
        features, blocks = self._features, self._passes.source.blocks
        if features is None or features.values is not self._room or features.blocks is not blocks:
            features = self._features = RoundFeatures(join, self._room, steady.counts, blocks)
        features.counts, features.first = steady.counts, self._first
        kind = kind_of_columns(columns, self._sample_method)
        self._books.ask(columns.places, columns.asked, kind, steady.features_in(self._halves[0]), tree)
        found = self._head.round_passes(self._books, self._passes.kv, rows)
        return None if found is None else (found, features)

    def after_rounds(self, answer: RoundAnswer) -> None:
        steady, halves = self._steady, self._halves
        assert steady is not None and halves, "rounds were asked for"
        # Of the last round, and of the one before it. The next rounds begin in the other half: what is kept of these is
        # read until then, or written down (`Features.keep`).
        self._half = (self._first + answer.done - 1) % 2
        before = Features.lent(halves[1 - self._half]) if answer.done > 1 else None
        steady.went_on(Features.lent(halves[self._half]), before, answer.drafted)

    def _loop(self, rows: Sequence[DraftRow], kind: ChainKind, length: int) -> list[Proposal] | None:
        """Let the head do the whole loop for all rows, if it can."""
        try:
            states = [self._states[row.rid] for row in rows]
        except KeyError:  # the head was told nothing of one of them
            return None
        chains = self._loops.chains(rows, states, length, loop_draws(rows, kind))
        if chains is None:
            return None
        self.forward_time += self._passes.take_time()
        self._together = [row.rid for row in rows], self._loops.filled
        drawn, q = chains
        return loop_proposals(drawn.tolist(), self._of_target(q), kind, self.name)

    def _forest(self, rows: Sequence[DraftRow]) -> list[Proposal] | None:
        """Let the head draft the trees of all rows, if that is what they want and it can."""
        found = forest_draws(rows, self._sample_method, self._max_len, self._block_size, self._most)
        if found is None:
            return None
        try:
            states = [self._states[row.rid] for row in rows]
        except KeyError:
            return None
        draws, scratch = found
        together = self._scratch.num_requests if scratch else len(rows)
        proposals: list[Proposal] = []
        filled: list[int] = []
        for i in range(0, len(rows), together):
            own = slice(i, i + together)
            tables = None
            if scratch:
                tables = [self._scratch.table(k, row.block_table_np) for k, row in enumerate(rows[own])]
            trees = self._loops.trees(rows[own], states[own], draws[own], tables)
            if trees is None:
                return None
            filled += self._loops.filled
            proposals += tree_proposals(trees, self.name)
        self.forward_time += self._passes.take_time()
        self._together = [row.rid for row in rows], filled
        return proposals

    def _start(self, row: DraftRow) -> HeadDraft | None:
        state = self._states.get(row.rid)
        length = longest_chain(row, self._max_len, self._block_size)
        if state is None or length <= 0:
            return None
        length = min(length, self._most)
        return HeadDraft(row, length, list(row.forced[:length]), state=state)

    def _draft_at_once(self, drafts: Sequence[HeadDraft], kind: ChainKind | None) -> bool:
        """Let the head do the whole loop, if it can."""
        if kind is None or any(draft.tokens for draft in drafts):
            return False
        draws = chain_draws(drafts, kind)
        chains = self._loops.chains(
            [draft.row for draft in drafts], [draft.state for draft in drafts], drafts[0].length, draws
        )
        if chains is None:
            return False
        drawn, q = chains
        q = self._of_target(q)
        all_q = None if q is None else q.flatten(0, 1)  # of all requests, one after the other
        for i, (draft, tokens) in enumerate(zip(drafts, drawn.tolist(), strict=True)):
            draft.take(tokens, all_q, i * len(tokens))
        return True

    def _of_target(self, q: torch.Tensor | None) -> torch.Tensor | None:
        """Distributions [R, steps, Vd] of the head as ones over the target's vocabulary [R, steps, V]."""
        vocab_map = self._head.target_ids
        if q is None or vocab_map is None:
            return q
        full = q.new_zeros((*q.shape[:2], self._vocab_size))
        full[:, :, vocab_map] = q
        return full

    def _draft_chains(self, drafts: Sequence[HeadDraft]) -> None:
        """Pass by pass. Forced tokens are fed like drafts, for the head goes on from nothing but its own outputs."""
        active = list(drafts)
        logits, features = self._passes.catch_up(active)
        step = 0
        while True:
            drawing = [i for i, draft in enumerate(active) if len(draft.tokens) == step]
            if drawing:
                part = logits if len(drawing) == len(active) else logits[drawing]
                draw_next([active[i] for i in drawing], part, self._sample_method, self._head.target_ids)
            step += 1
            going = [i for i, draft in enumerate(active) if draft.length > step]
            if not going:
                return
            if len(going) < len(active):
                active = [active[i] for i in going]
                features = features[going]
            logits, features = self._passes.advance(active, features, step)

    # ----------------------------------------------------------------------------------------------- trees

    def _draft_trees(self, drafts: Sequence[HeadDraft]) -> None:
        """Draft the trees of as many requests as there are scratch blocks for."""
        tasks = [
            TreeTask(d.row, d.row.budget - len(d.tokens), d.length - len(d.tokens), tuple(d.tokens))
            for d in drafts
        ]
        if self._draft_trees_at_once(drafts, tasks):
            return
        model = self._tree_model(drafts)
        trees = draft_trees(
            model,
            tasks,
            model.roots(),
            name=self.name,
            method=self._sample_method,
            vocab_map=self._head.target_ids,
        )
        for draft, tree in zip(drafts, trees, strict=True):
            draft.tree = tree

    def _tree_model(self, drafts: Sequence[HeadDraft]) -> RootedTrees:
        """Level by level."""
        return HeadTrees(self._passes, self._scratch, drafts)

    def _draft_trees_at_once(self, drafts: Sequence[HeadDraft], tasks: Sequence[TreeTask]) -> bool:
        """Let the head do all levels, if it can and nothing but a choice stands between them."""
        if any(draft.tokens for draft in drafts):
            return False
        draws = native_draws(tasks, self._sample_method)
        if draws is None:
            return False
        tables = [self._scratch.table(i, draft.row.block_table_np) for i, draft in enumerate(drafts)]
        trees = self._loops.trees(
            [draft.row for draft in drafts], [draft.state for draft in drafts], draws, tables
        )
        if trees is None:
            return False
        for draft, task, tree in zip(drafts, tasks, trees, strict=True):
            draft.tree = as_proposal(task, tree, self.name)
        return True

    # ------------------------------------------------------------------------------------------ state kept

    def stored_after(self, rows: Sequence[DraftRow]) -> tuple[list[int], list[int]] | None:
        together = self._together
        if together is None or [row.rid for row in rows] != together[0]:
            return None
        return together[1], [0] * len(rows)

    def memory_per_block(self) -> int:
        return self._passes.memory_per_block()

    def memory_fixed(self) -> int:
        return self._scratch_blocks(0).count * self._passes.kv_bytes_per_block()

    def _scratch_blocks(self, num_blocks: int) -> ScratchBlocks:
        fed = self._head.captures.fed if isinstance(self._head, GraphedHead) else 0
        return ScratchBlocks(num_blocks, self._block_size, self._max_num_seqs, fed)

    def memory_static(self) -> int:
        return self._head.static_bytes()

    def seated(self) -> SeatedDrafter | None:
        head = self._head
        loops = seat_loops(head.loops) if isinstance(head, GraphedHead) else ()
        if not loops:
            return None
        return SeatedHead(
            loops, self._max_len, self._sample_method, self._passes, self._known, self._scratch.seats
        )

    def allocate(self, num_blocks: int) -> None:
        self._scratch = self._scratch_blocks(num_blocks)
        self._passes.allocate(num_blocks, self._scratch.count)
        self._books = BookDrafts(
            self.name,
            block_size=self._block_size,
            max_len=self._max_len,
            vocab_size=self._vocab_size,
            scratch=self._scratch.of_books(),
            most=self._most,
        )
