"""Method ``hybrid``: a look-up if its match is long, else a model; a dynamic tree has both
(docs/algorithms/hybrid.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Protocol, Self

import numpy as np

from draftwise.graphs.seats.drafter import Joined, SeatedDrafter
from draftwise.graphs.seats.lookup import LookUp as SeatedLookUp
from draftwise.kernels.cpu.book_drafts import ANY_LENGTH, InBooks
from draftwise.kernels.cpu.rounds import RoundDrafts, RoundFeatures, RoundHybrid
from draftwise.propose.base import DraftRow, Proposer, ProposerContext
from draftwise.propose.columns import (
    ColumnDrafter,
    ColumnFollower,
    ColumnLookUp,
    DraftBlock,
    DraftColumns,
    DraftPart,
    ReadColumns,
    RoundAnswer,
    RoundDrafter,
    says_itself,
)
from draftwise.propose.delegating import DelegatingProposer
from draftwise.propose.registry import resolve_proposer
from draftwise.structured.cursor import is_point_mass
from draftwise.types import IntArray, Proposal

_MOST_READ = 512
"""Tokens that a draft model has room for when it reads of requests that were looked up for some rounds."""
DEFAULT_MIN_MATCH = 4
"""Tokens of a match from which on the text's own continuation is trusted more than a model."""


class LookUp(Protocol):
    """The interface of a look-up: `NgramProposer` and `SuffixProposer` have it."""

    name: ClassVar[str]

    def look_ups(self, rows: Sequence[DraftRow]) -> list[tuple[Proposal, int]]:
        """The draft of each row (of point masses), and the length of the match it follows (0: none)."""

    def leaving(self, rid: int, token_ids_np: IntArray) -> None: ...

    def remove(self, rid: int) -> None: ...

    def forget(self) -> None: ...

    def seated(self) -> SeatedLookUp | None: ...


class HybridProposer(DelegatingProposer, ColumnDrafter, ColumnFollower, RoundDrafter):
    """Looks the end of the text up first. What follows a match of ``min_match`` tokens or more is the proposal; all
    other requests are drafted by ``model``, together.

    The choice depends on committed tokens alone, so it is lossless whatever the model draws. A request that was
    looked up for some steps is caught up by the model as after steps without drafting, but in steps of several rounds:
    there a head reads the features of every round while they are there. A request with a dynamic
    tree gets both in one proposal, whatever the length of the match, if its nodes are point masses.

    All other hooks, those for storage and features above all, are the model's: the look-up has neither.
    """

    name: ClassVar[str] = "hybrid"
    drafts_dynamic_trees: ClassVar[bool] = True
    evident: ClassVar[bool] = False
    most_drafts = None  # the model is asked for `model_tokens` at most, and a match has no state

    def __init__(
        self,
        look_up: LookUp,
        model: Proposer,
        *,
        min_match: int = DEFAULT_MIN_MATCH,
        model_tokens: int = 63,
    ) -> None:
        """``model_tokens``: most tokens of a chain that ``model`` drafts."""
        super().__init__(model)
        self._look_up = look_up
        self._min_match = min_match
        self._model_tokens = model_tokens
        self._asked: dict[int, tuple[DraftRow, bool]] = {}  # rid -> what the model was given, used as it is
        self._all_read = False  # the model is to read of all requests, so that rounds can follow

    @classmethod
    def create(cls, context: ProposerContext) -> Self:
        """Build both drafters from ``speculative_config``: see ``hybrid_drafter``."""
        config, graphs = context.speculative, context.graphs
        inner = config.hybrid_drafter
        assert inner is not None, "resolved by the configuration"
        look_up = resolve_proposer(config.hybrid_lookup or "suffix").create(context)
        if graphs is not None:
            grows = config.speculative_dynamic_tree is not None
            if inner.method == "dflash" or inner.parallel_drafting:
                grows = False  # their passes are made for as many drafts as they are configured with
            tree = graphs.tree_of(config) if grows else None
            graphs = replace(graphs, unseen=config.num_speculative_tokens, tree=tree)
        model = resolve_proposer(inner.method).create(replace(context, speculative=inner, graphs=graphs))
        return cls(
            look_up,  # type: ignore[arg-type]  # the configuration allows only those that can be looked up
            model,
            min_match=config.hybrid_min_match or DEFAULT_MIN_MATCH,
            model_tokens=inner.num_speculative_tokens,
        )

    # -------------------------------------------------------------------------------------------- propose

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        self._asked = {}
        proposals: list[Proposal] = []
        asked: list[int] = []
        inner: list[DraftRow] = []
        for i, (row, (found, match_len)) in enumerate(zip(rows, self._look_up.look_ups(rows), strict=True)):
            proposals.append(found)
            if row.speculation.dynamic is not None:
                inner.append(self._tree_row(row, found))
            elif match_len >= self._min_match and len(found) > len(row.forced):
                continue
            else:
                inner.append(self._model_row(row))
            asked.append(i)
        drafted = self.inner.propose(inner) if inner else ()
        for i, given, proposal in zip(asked, inner, drafted, strict=True):
            joined = proposal
            if rows[i].speculation.dynamic is not None:
                joined = join(proposal, proposals[i], rows[i].budget)
            self._asked[rows[i].rid] = (given, joined is proposal)
            proposals[i] = joined
        return proposals

    def draft_columns(self, columns: DraftColumns) -> Sequence[DraftPart] | None:
        look_up, model = self._look_up, self.inner
        if (
            columns.is_tree
            or not isinstance(look_up, ColumnLookUp)
            or not isinstance(model, ColumnDrafter)
            or says_itself(self, HybridProposer.propose)
        ):
            return None
        found = look_up.look_up_columns(columns)
        if found is None:
            return None
        all_read, self._all_read = self._all_read, False
        block, matches = found
        sizes = block.sizes or [block.tokens.shape[1]] * len(matches)
        trusted = [size > 0 and match >= self._min_match for size, match in zip(sizes, matches, strict=True)]
        parts: list[DraftPart] = []
        own = [i for i, trust in enumerate(trusted) if trust]
        if own:
            taken = DraftBlock(np.ascontiguousarray(block.tokens[own]), [sizes[i] for i in own])
            parts.append(DraftPart(own, look_up.name, columns.chosen(own, ANY_LENGTH), taken))
        rest = [i for i, trust in enumerate(trusted) if not trust]
        if all_read and model.reads_books and own:
            asked = columns.chosen(range(len(trusted)), self._model_tokens)
            for i in own:
                asked.asked[i] = 0
            drafted = model.draft_columns(asked)
            if isinstance(drafted, InBooks):  # what was looked up is written over nothing
                return [DraftPart(rest, model.name, columns.chosen(rest), drafted), *parts]
        if rest:
            asked = columns.chosen(rest, self._model_tokens)
            drafted = model.draft_columns(asked)
            if isinstance(drafted, (DraftBlock, InBooks)):
                parts.append(DraftPart(rest, model.name, asked, drafted))
        return parts

    @property
    def in_rounds(self) -> bool:
        inner: object = self.inner
        return (
            isinstance(inner, RoundDrafter)
            and inner.in_rounds
            and not says_itself(self, HybridProposer.propose)
        )

    @property
    def reads_every_step(self) -> bool:
        inner: object = self.inner
        return not isinstance(inner, RoundDrafter) or inner.reads_every_step

    def round_drafts(
        self, columns: DraftColumns, rounds: int, rows: int
    ) -> tuple[RoundDrafts, RoundFeatures | None] | None:
        look_up, model = self._look_up, self.inner
        self._all_read = False
        # A head that is asked for nobody would read all its weights for nothing.
        if (rounds < 2 and len(columns.rids) < 2) or columns.is_tree or not self.in_rounds:
            return None
        if not isinstance(look_up, RoundDrafter) or not isinstance(model, RoundDrafter):
            return None
        found = look_up.round_drafts(columns, rounds, rows)
        if found is None:
            return None
        # a model without features reads of those who were looked up when it drafts for them again
        reads = min(rows * rounds, _MOST_READ)
        own = model.round_drafts(
            columns.chosen(range(len(columns.rids)), self._model_tokens), rounds, max(rows, reads)
        )
        if own is None:
            self._all_read = True
            return None
        return RoundHybrid(found[0], own[0], self._min_match), own[1]

    def after_rounds(self, answer: RoundAnswer) -> None:
        if isinstance(self.inner, RoundDrafter):
            self.inner.after_rounds(answer)

    @property
    def reads_columns(self) -> bool:
        return isinstance(self.inner, ColumnFollower) and self.inner.reads_columns

    def read_columns(self, read: ReadColumns) -> bool:
        return isinstance(self.inner, ColumnFollower) and self.inner.read_columns(read)

    def _model_row(self, row: DraftRow) -> DraftRow:
        if row.speculation.tree is not None or row.budget <= self._model_tokens:
            return row
        return row.with_budget(max(self._model_tokens, len(row.forced)))

    def _tree_row(self, row: DraftRow, found: Proposal) -> DraftRow:
        """The model's part of a tree: at least half of the nodes, and those that the look-up does not use."""
        budget = max(row.budget - min(len(found), row.budget // 2), len(row.forced), 1)
        if self.inner.drafts_dynamic_trees:
            return row.with_budget(budget)
        budget = min(budget, self._model_tokens)
        return replace(row, budget=budget, speculation=replace(row.speculation, dynamic=None))

    # ------------------------------------------------------------------------------------------ state kept

    def filled_after(self, row: DraftRow) -> int:
        asked = self._asked.get(row.rid)
        return row.filled if asked is None else self.inner.filled_after(asked[0])

    def drafts_stored(self, row: DraftRow) -> int:
        asked = self._asked.get(row.rid)
        return self.inner.drafts_stored(asked[0]) if asked is not None and asked[1] else 0

    def stored_after(self, rows: Sequence[DraftRow]) -> None:
        return None  # the model was asked about some of them

    def leaving(self, rid: int, token_ids_np: IntArray) -> None:
        try:
            self._look_up.leaving(rid, token_ids_np)
        finally:
            self.inner.leaving(rid, token_ids_np)

    def remove(self, rid: int) -> None:
        self._asked.pop(rid, None)
        try:
            self._look_up.remove(rid)
        finally:
            self.inner.remove(rid)

    def forget(self) -> None:
        try:
            self._look_up.forget()
        finally:
            self.inner.forget()

    def seated(self) -> SeatedDrafter | None:
        """The model's part, joined with the look-up's. What is looked up has no place in a static tree."""
        drafter, look = self.inner.seated(), self._look_up.seated()
        if not isinstance(drafter, SeatedDrafter) or look is None:
            return None
        if drafter.plan is not None:
            if drafter.plan.shape is not None:
                return None
            drafter.joined = Joined(look._replace(joins=True), self.name, self.inner.name)
            return drafter
        look = look._replace(shortest=max(look.shortest, self._min_match))
        drafter.joined = Joined(look, self._look_up.name, self.inner.name)
        return drafter


def join(model: Proposal, found: Proposal, budget: int) -> Proposal:
    """Both proposals as branches of one tree, equal beginnings shared, at most ``budget`` nodes: all of the model's,
    then as much of the other as there is room for. Nodes that were drawn from a distribution stand alone: point masses
    cannot be their siblings.

    Example: model 5 -> 7 (and 5 -> 9), found 5 -> 9 -> 2: tokens (5, 7, 9, 2), parents (-1, 0, 0, 2).
    """
    if not model.tokens:
        return found.prefix(budget)
    if not found.tokens or not is_point_mass(model):
        return model
    tokens, parents = list(model.tokens), list(model.parents)
    index = {(parent, token): i for i, (token, parent) in enumerate(zip(tokens, parents, strict=True))}
    place: dict[int, int] = {-1: -1}  # node of `found` -> node of the tree
    for i, (token, parent) in enumerate(zip(found.tokens, found.parents, strict=True)):
        above = place.get(parent)
        if above is None:
            continue
        node = index.get((above, token))
        if node is None:
            if len(tokens) >= budget:
                continue
            node = index[above, token] = len(tokens)
            tokens.append(token)
            parents.append(above)
        place[i] = node
    if len(tokens) == len(model.tokens):
        return model
    return Proposal(tuple(tokens), tuple(parents), HybridProposer.name)
