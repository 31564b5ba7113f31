"""The drafting side of the executor: which drafter is asked for whom, and what becomes of its answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch

from draftwise.kernels.cpu.book_drafts import InBooks
from draftwise.names import MAX_TREE_NODES
from draftwise.propose.base import Committed, DraftRow, Proposer
from draftwise.propose.columns import DraftBlock, DraftPart, ReadColumns, drafts_columns, follows_columns
from draftwise.propose.grammar import GrammarProposer, fit
from draftwise.runner.fills import Fills
from draftwise.runner.guard import Guard, whole_number
from draftwise.runner.placing import NOBODY, Placing, Wanted
from draftwise.runner.proposal_checks import are_sound, checked, is_foreign
from draftwise.runner.rows import Row
from draftwise.types import (
    EMPTY_PROPOSAL,
    DrafterFailure,
    IntArray,
    Proposal,
    StepInput,
    TargetOutput,
)


class Drafting:
    """Calls the proposers, all of them through `guard`, and tells `fills` what they have stored."""

    def __init__(
        self,
        proposers: Mapping[str, Proposer],
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        chains_only: bool = False,
        placing: Placing | None = None,
    ) -> None:
        """``chains_only``: the target carries recurrent state, and verifies no trees. ``placing``: writes proposals
        where native code finds them."""
        self._proposers = {GrammarProposer.name: GrammarProposer(), **proposers}
        self.guard = Guard(self._proposers)
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._device = device
        self._chains_only = chains_only
        self._placing = placing
        with_storage = [name for name, p in self._proposers.items() if p.has_storage]
        self.fills = Fills(with_storage, num_blocks, block_size)
        self.capture_layers = tuple(sorted({i for p in self._proposers.values() for i in p.capture_layers}))
        self._observers = {n for n, p in self._proposers.items() if p.capture_layers or p.observes}
        self.observes = bool(self._observers)
        self._prompt_only = {name for name in self._observers if self._proposers[name].prompt_only}
        self._foreign = {name for name, p in self._proposers.items() if is_foreign(p)}

    # -------------------------------------------------------------------------------------- block changes

    def admitted(self, row: Row) -> None:
        """A request entered, with ``row.num_computed`` cached tokens."""
        self.guard.returns(row)
        self.fills.admitted(row)

    def trimmed(self, row: Row) -> None:
        """Blocks past the committed tokens went away, and what drafters had written there with them."""
        for fill in row.fill.values():
            fill.tokens = min(fill.tokens, row.num_computed)
            fill.drafts = 0
        name = row.speculation.method
        if name in self.fills.marks and not row.drafting_failed:
            self.guard.ask(name, "trimmed", [row], lambda p: p.trimmed(row.rid, row.num_computed), None)

    def removed(self, row: Row) -> None:
        rid, token_ids_np = row.rid, _delivered(row)
        own = row.speculation.method
        if own in self.fills.marks and not row.drafting_failed:
            # Its blocks may be found by the next request with this prefix, such as the next turn of a conversation.
            known_np = token_ids_np[: min(row.num_computed, len(token_ids_np))]
            filled = self.guard.ask(
                own,
                "settle",
                [row],
                lambda p: whole_number(
                    p.settle(rid, known_np, row.blocks_np), len(known_np), "what is filled"
                ),
                0,
            )
            self.fills.has(own, row, max(filled, row.fill[own].tokens))
        for name in self._proposers:
            concerned = [row] if name == own else []
            if not (concerned and row.drafting_failed):
                self.guard.ask(name, "leaving", concerned, lambda p: p.leaving(rid, token_ids_np), None)
            self.guard.ask(name, "remove", concerned, lambda p: p.remove(rid), None)
        self.guard.left(row)

    def forget(self) -> None:
        for name in self._proposers:
            self.guard.ask(name, "forget", (), lambda p: p.forget(), None)

    # ------------------------------------------------------------------------------- after the target pass

    def observe(
        self,
        rows: Sequence[Row],
        rids: Sequence[int],
        batch: StepInput,
        output: TargetOutput,
        method: str | None = None,
    ) -> None:
        """All rows of the step, for those who draft for one of them. Who fails to look at it cannot draft for any.
        ``method``: of all requests, if they have one."""
        alike = method is not None and not self.guard.failed_once
        for name in self._observers:
            if alike:
                own = rows if method == name else ()
            else:
                own = [row for row in rows if row.method == name and not row.drafting_failed]
            if own:
                try:
                    self._proposers[name].observe(rids, batch, output)
                except Exception as error:
                    self.guard.failed(name, "observe", own, error)

    def observes_for(self, methods: Set[str]) -> bool:
        """Whether a drafter of one of these names looks at what the target computes."""
        return not self._observers.isdisjoint(methods)

    def native(self, method: str) -> object | None:
        """The proposer of this name, if it is one of ours."""
        return None if method in self._foreign else self._proposers.get(method)

    @property
    def transfers(self) -> bool:
        """Whether `transfer` may have something to say."""
        return bool(self._prompt_only)

    def transfer(self, row: Row) -> Mapping[str, Any] | None:
        """The output's data about a request's prompt, for requests that only read their prompt. Raises what the
        proposer
        raises, or RuntimeError if it failed before: without it the request has no purpose, so it fails."""
        name = row.speculation.method
        if name not in self._prompt_only:
            return None
        if row.drafting_failed:
            raise RuntimeError(f"{name} failed while the prompt was computed")
        answer = self._proposers[name].transfer(row.rid)
        if answer is not None and not isinstance(answer, Mapping):
            raise TypeError(f"{name} answered with a {type(answer).__name__}; expected a mapping or None")
        return answer

    def committed(self, parts: Sequence[tuple[Row, int, Sequence[int]]]) -> None:
        """The tokens that a step made final: (request, first token, its rows in the batch), see `Committed`."""
        groups: dict[str, tuple[list[Row], list[Committed]]] = {}
        for row, first_token, batch_rows in parts:
            name = row.method
            if name not in self._observers or row.drafting_failed or not batch_rows:
                continue
            fill = row.fill.get(name)
            filled = 0 if fill is None else fill.tokens
            group = groups.get(name)
            if group is None:
                group = groups[name] = ([], [])
            group[0].append(row)
            group[1].append(  # by position: twice as fast as by name
                Committed(
                    row.rid, row.tokens_np, row.num_tokens, first_token, batch_rows, row.blocks_np, filled
                )
            )
        for name, (rows, told) in groups.items():
            self._committed(name, rows, told)

    def read_columns(
        self, rows: Sequence[Row], name: str | None, read: Callable[[], ReadColumns | None]
    ) -> bool:
        """`committed` of all requests of a step, if one drafter is told of all of them and can be told so: ``read``
        then gives what it is told. ``name``: their method, if they have one. False: nothing was done."""
        if name is None or name not in self._observers or name in self._foreign:
            return False
        follower: object = self._proposers[name]
        if not follows_columns(follower) or not follower.reads_columns:
            return False
        if self.guard.failed_once and True in [row.drafting_failed for row in rows]:
            return False
        columns = read()
        if columns is None:
            return False
        followed = follower.read_columns
        return self.guard.ask(name, "committed", rows, lambda _: followed(columns), True)

    def _committed(self, name: str, rows: list[Row], parts: list[Committed]) -> None:
        def call(proposer: Proposer) -> list[int] | None:
            answer = proposer.committed(parts)
            if answer is None:
                return None
            return [self.fills.leading(row, n) for row, n in zip(rows, answer, strict=True)]

        filled = self.guard.ask(name, "committed", rows, call, None)
        if filled is not None and name in self.fills.marks:
            for row, tokens in zip(rows, filled, strict=True):
                self.fills.has(name, row, tokens)

    # -------------------------------------------------------------------------------------------- propose

    def propose(self, wanted: Wanted) -> None:
        """Let each request's own proposer draft up to its budget; the result waits in `Row.proposal`."""
        if self._placing is not None and wanted.rows:
            wanted = self._in_columns(self._placing, wanted)
            if not wanted.rows:  # nearly always
                return
        groups: dict[str, list[tuple[Row, DraftRow]]] = {}
        for row, budget in zip(wanted.rows, wanted.budgets, strict=True):
            # The last token that may come is the bonus token behind the deepest accepted node.
            max_depth = row.max_total - row.num_tokens - 1
            if max_depth < 1 or row.drafting_failed:
                continue
            name = row.method
            fill = row.fill.get(name)
            nodes = budget if budget < MAX_TREE_NODES else MAX_TREE_NODES
            forced: tuple[int, ...] = ()
            if row.grammar is not None:
                try:
                    forced = row.grammar.forced(min(nodes, max_depth))
                except Exception:  # the next step's masks will say so, and fail the request
                    continue
            draft_row = DraftRow(
                row.rid,
                row.tokens_np[: row.num_tokens],
                row.num_prompt,
                nodes,
                max_depth,
                row.speculation,
                row.state,
                row.blocks_np,
                fill.tokens if fill is not None else 0,
                row.grammar,
                forced,
                row.tokens_at,
                row.blocks_at,
            )
            group = groups.get(name)
            if group is None:
                group = groups[name] = []
            group.append((row, draft_row))
        for name, members in groups.items():
            self._propose_group(name, members)

    def _in_columns(self, placing: Placing, wanted: Wanted) -> Wanted:
        """Draft for many requests without a record for each: those of one method that want chains, or trees, of one
        kind. Who is left, in their order."""
        kinds = [row.kind for row in wanted.rows]
        if kinds.count(kinds[0]) == len(kinds):  # nearly always
            drafted = self._drafted(placing, wanted) if kinds[0] > 0 else ()
            if len(drafted) == len(kinds):
                return NOBODY
            left = set(range(len(kinds))).difference(drafted)
        else:
            left = set(range(len(kinds)))
            groups: dict[int, list[int]] = {}
            for i, kind in enumerate(kinds):
                if kind > 0:
                    groups.setdefault(kind, []).append(i)
            for members in groups.values():
                drafted = self._drafted(placing, wanted.chosen(members))
                left.difference_update([members[i] for i in drafted])
        return wanted.chosen(sorted(left))

    def _drafted(self, placing: Placing, wanted: Wanted) -> Sequence[int]:
        """For which of some requests of one kind their proposer drafted, by their places."""
        name = wanted.rows[0].method
        proposer: object = self._proposers[name]
        if name in self._foreign or not drafts_columns(proposer):
            return ()
        columns = placing.columns(wanted)
        members: Sequence[int] = range(len(wanted.rows))
        if not proposer.reads_books and -1 in columns.facts.kinds:
            members = [i for i, kind in enumerate(columns.facts.kinds) if kind > 0]
            if not members:
                return ()
            wanted = wanted.chosen(members)
            columns = placing.columns(wanted)
        try:
            drafted = proposer.draft_columns(columns)
        except Exception:  # asked again, it says of whom
            return ()
        if drafted is None:
            return ()
        if isinstance(drafted, (DraftBlock, InBooks)):
            whole = DraftPart(range(len(members)), name, columns, drafted)
            return members if placing.place_chains(wanted, whole, self._vocab_size) else ()
        return [
            members[i]
            for part in drafted
            if placing.place_chains(wanted, part, self._vocab_size)
            for i in part.members
        ]

    def _propose_group(self, name: str, members: list[tuple[Row, DraftRow]]) -> None:
        rows = [draft_row for _, draft_row in members]
        try:
            proposals = self._asked(name, rows)
        except Exception as error:
            if len(members) > 1:  # find out whose fault it is; the others go on drafting
                for member in members:
                    self._propose_group(name, [member])
            else:
                self.guard.failed(name, "propose", [members[0][0]], error)
            return
        stores = name in self.fills.marks
        stored = self._stored_after(name, members) if stores else None
        if self._placed(members, proposals, stored):
            if stores and stored is None:
                self.fills.proposed(self.guard, self._proposers[name], members, proposals, None)
            return
        for (row, draft_row), proposed in zip(members, proposals, strict=True):
            row.proposal = proposed
            if draft_row.grammar is not None:
                try:
                    row.proposal = fit(proposed, draft_row.grammar, draft_row.forced)
                except (
                    Exception
                ):  # the grammar's fault: the next step's masks will say so, and fail the request
                    row.proposal = EMPTY_PROPOSAL
        if stores:
            self.fills.proposed(self.guard, self._proposers[name], members, proposals, stored)

    def _placed(
        self,
        members: Sequence[tuple[Row, DraftRow]],
        proposals: Sequence[Proposal],
        stored: tuple[Sequence[int], Sequence[int]] | None,
    ) -> bool:
        """Let proposals wait where native code finds them, and take in what is ``stored``; False: it has to be done one
        by one, for a grammar may change what was proposed, say."""
        if self._placing is None:
            return False
        rows: list[Row] = []
        for (row, draft_row), proposal in zip(members, proposals, strict=True):
            if draft_row.grammar is not None:
                return False
            row.keep(proposal)
            rows.append(row)
        return self._placing.place(rows, proposals, stored)

    def _asked(self, name: str, rows: list[DraftRow]) -> list[Proposal]:
        proposals = list(self._proposers[name].propose(rows))
        if len(proposals) != len(rows):
            raise ValueError(f"{len(proposals)} proposals for {len(rows)} requests")
        if self._chains_only and not all(proposal.is_chain for proposal in proposals):
            raise ValueError("a tree for a model that carries recurrent state")
        size, device, foreign = self._vocab_size, self._device, name in self._foreign
        if not foreign and are_sound(proposals, rows, size):
            return proposals
        return [
            checked(proposal, row, size, device, foreign=foreign)
            for proposal, row in zip(proposals, rows, strict=True)
        ]

    def _stored_after(
        self, name: str, members: Sequence[tuple[Row, DraftRow]]
    ) -> tuple[Sequence[int], Sequence[int]] | None:
        """`Proposer.stored_after`: as many numbers as there are members, or None."""

        def call(proposer: Proposer) -> tuple[Sequence[int], Sequence[int]] | None:
            answer = proposer.stored_after([draft_row for _, draft_row in members])
            if answer is not None and not len(answer[0]) == len(answer[1]) == len(members):
                raise ValueError(f"numbers for {len(answer[0])} of {len(members)} requests")
            return answer

        return self.guard.ask(name, "stored_after", [row for row, _ in members], call, None)

    # ---------------------------------------------------------------------------------------------- reports

    def take_forward_time(self) -> float:
        """Seconds the proposers spent in their models' forward passes since the last call."""
        total = 0.0
        for name, proposer in self._proposers.items():
            try:
                seconds = proposer.forward_time
                if seconds.__class__ is not float or seconds:
                    proposer.forward_time = 0.0
                    total += _duration(seconds)
            except Exception as error:
                self.guard.failed(name, "forward_time", (), error)
        return total

    def take_failures(self) -> tuple[DrafterFailure, ...]:
        """Failures of drafters since the last call."""
        return self.guard.take_failures()


def _duration(value: float) -> float:
    seconds = float(value)
    if not 0.0 <= seconds < math.inf:
        raise ValueError(f"forward_time is {seconds}")
    return seconds


def _delivered(row: Row) -> IntArray:
    """[n] the row's tokens as far as limits and stop tokens let them come, see `Scheduler`. Accepted tokens behind a
    stop string are still among them: only the host knows that string."""
    tokens_np = row.tokens_np[: min(row.num_tokens, row.max_total)]
    if not row.stop_token_ids:
        return tokens_np
    # The first output token that may stop is number min_tokens, and one always comes.
    first = row.num_prompt + max(row.state.params.min_tokens, 1) - 1
    stops = np.flatnonzero(np.isin(tokens_np[first:], list(row.stop_token_ids)))
    return tokens_np[: first + int(stops[0]) + 1] if len(stops) else tokens_np
