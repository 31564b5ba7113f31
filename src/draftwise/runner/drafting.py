"""The drafting side of the executor: the drafter of each request, the validity of drafter state, and compaction."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from draftwise.kernels.cpu.attention import address
from draftwise.kv.storage import KVStorage
from draftwise.names import MAX_TREE_NODES
from draftwise.propose.base import Committed, DraftRow, Proposer
from draftwise.propose.columns import ColumnDrafter, ColumnFollower, DraftBlock, DraftPart, ReadColumns
from draftwise.propose.grammar import GrammarProposer, fit
from draftwise.runner.guard import Guard, whole_number
from draftwise.runner.placing import Placing
from draftwise.runner.proposal_checks import are_sound, checked, is_foreign
from draftwise.runner.rows import DrafterFill, Row
from draftwise.types import (
    EMPTY_PROPOSAL,
    DrafterFailure,
    IntArray,
    Proposal,
    StepInput,
    TargetOutput,
)


class Drafting:
    """Calls the proposers, all of them through `guard`, and keeps the books of their per-token state.

    Per (block, drafter) a mark says that the whole block is filled for that drafter: a prefix-cache hit may then
    rely on it. A block that is handed out anew loses its marks. Marks are made of answers that were checked; a call
    that fails makes none.
    """

    def __init__(
        self,
        proposers: Mapping[str, Proposer],
        storage: KVStorage,
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
        self._storage = storage
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._device = device
        self._chains_only = chains_only
        self._placing = placing
        self._filled_blocks: dict[str, npt.NDArray[np.bool_]] = {
            name: np.zeros(num_blocks, np.bool_) for name, p in self._proposers.items() if p.has_storage
        }
        self.capture_layers = tuple(sorted({i for p in self._proposers.values() for i in p.capture_layers}))
        self._observers = {n for n, p in self._proposers.items() if p.capture_layers or p.observes}
        self.observes = bool(self._observers)
        self._prompt_only = {name for name in self._observers if self._proposers[name].prompt_only}
        self._foreign = {name for name, p in self._proposers.items() if is_foreign(p)}
        self._moves: tuple[list[int], list[int]] = ([], [])  # slots of the target: from, to

    # -------------------------------------------------------------------------------------- block changes

    def admitted(self, row: Row) -> None:
        """A request entered with ``row.num_computed`` cached tokens: how many of them has each drafter?"""
        self.guard.returns(row)
        blocks = row.blocks_np[: row.num_computed // self._block_size]
        for name, marks in self._filled_blocks.items():
            unfilled = np.flatnonzero(~marks[blocks])
            leading = int(unfilled[0]) if len(unfilled) else len(blocks)
            fill = row.fill[name] = DrafterFill(tokens=leading * self._block_size)
            if name == row.method:
                row.fill_at, row.marks_at = ctypes.addressof(fill), address(marks)

    def fresh_blocks(self, block_ids: Sequence[int]) -> None:
        for marks in self._filled_blocks.values():
            marks[list(block_ids)] = False

    def trimmed(self, row: Row) -> None:
        """Blocks past the committed tokens went away, and what drafters had written there with them."""
        for fill in row.fill.values():
            fill.tokens = min(fill.tokens, row.num_computed)
            fill.drafts = 0
        name = row.speculation.method
        if name in self._filled_blocks and not row.drafting_failed:
            self.guard.ask(name, "trimmed", [row], lambda p: p.trimmed(row.rid, row.num_computed), None)

    def removed(self, row: Row) -> None:
        rid, token_ids_np = row.rid, _delivered(row)
        own = row.speculation.method
        if own in self._filled_blocks and not row.drafting_failed:
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
            self._fill(own, row, max(filled, row.fill[own].tokens))
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
        self, rows: Sequence[Row], rids: Sequence[int], batch: StepInput, output: TargetOutput
    ) -> None:
        """All rows of the step, for those who draft for one of them. Who fails to look at it cannot draft for any."""
        for name in self._observers:
            if any(row.method == name and not row.drafting_failed for row in rows):
                try:
                    self._proposers[name].observe(rids, batch, output)
                except Exception as error:
                    own = [row for row in rows if row.method == name and not row.drafting_failed]
                    self.guard.failed(name, "observe", own, error)

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

    def read_columns(self, rows: Sequence[Row], read: ReadColumns) -> bool:
        """`committed` of all requests of a step, if one drafter is told of all of them and can be told so. False:
        nothing was done."""
        name = rows[0].method
        proposer: object = self._proposers.get(name)
        if name not in self._observers or not isinstance(proposer, ColumnFollower) or name in self._foreign:
            return False
        if any(row.method != name or row.drafting_failed for row in rows):
            return False
        followed = proposer.read_columns
        return self.guard.ask(name, "committed", rows, lambda _: followed(read), True)

    def _committed(self, name: str, rows: list[Row], parts: list[Committed]) -> None:
        def call(proposer: Proposer) -> list[int] | None:
            answer = proposer.committed(parts)
            if answer is None:
                return None
            return [self._leading(row, n) for row, n in zip(rows, answer, strict=True)]

        filled = self.guard.ask(name, "committed", rows, call, None)
        if filled is not None and name in self._filled_blocks:
            for row, tokens in zip(rows, filled, strict=True):
                self._fill(name, row, tokens)

    def _leading(self, row: Row, answer: object) -> int:
        """An answer that has to be a number of leading tokens of the request, which has blocks for them."""
        return whole_number(answer, min(row.num_tokens, row.num_blocks * self._block_size), "what is filled")

    def accepted(self, row: Row, count: int, base: int) -> None:
        """``count`` nodes of the proposal became tokens base, base + 1, ... (``base``: tokens with K/V before them):
        what a drafter wrote for its own chain is valid so far."""
        for name, fill in row.fill.items():
            if fill.drafts and fill.tokens == base:
                self._fill(name, row, base + min(count, fill.drafts))
            fill.drafts = 0

    def move(self, row: Row, path: Sequence[int], base: int) -> None:
        """Nodes ``path``, parents first, become tokens base, base + 1, ...: `compact` will move what they stored.

        Node i stands in key base + i of the target's storage and must come to key base + k, k its place in the path. In
        drafters' storages nothing is moved: see `Proposer`.
        Example: base 10, path (1, 3): keys 11 -> 10 and 13 -> 11.
        """
        source, target = self._moves
        size = self._block_size
        table = row.blocks_np
        for k, node in enumerate(path):
            if node != k:
                src, dst = base + node, base + k
                source.append(int(table[src // size]) * size + src % size)
                target.append(int(table[dst // size]) * size + dst % size)

    def compact(self) -> None:
        """Carry out the moves of this step's accepted paths in the target's storage."""
        source, target = self._moves
        if source:
            self._storage.move(
                torch.tensor(source, device=self._device), torch.tensor(target, device=self._device)
            )
            self._moves = ([], [])

    # -------------------------------------------------------------------------------------------- propose

    def propose(self, wanted: Sequence[tuple[Row, int]]) -> None:
        """Let each request's own proposer draft up to its budget; the result waits in `Row.proposal`."""
        if self._placing is not None and len(wanted):
            wanted = self._in_columns(self._placing, wanted)
        groups: dict[str, list[tuple[Row, DraftRow]]] = {}
        for row, budget in wanted:
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

    def _in_columns(self, placing: Placing, wanted: Sequence[tuple[Row, int]]) -> list[tuple[Row, int]]:
        """Draft for many requests without a record for each: those of one method that want chains, or trees, of one
        kind. Who is left, in their order."""
        kinds = placing.kinds([row for row, _ in wanted])
        groups: dict[tuple[str, int], list[int]] = {}
        for i, (kind, (row, _)) in enumerate(zip(kinds, wanted, strict=True)):
            if kind > 0:
                groups.setdefault((row.method, kind), []).append(i)
        left = {i for i, kind in enumerate(kinds) if kind == 0}
        for (name, _), members in groups.items():
            proposer: object = self._proposers[name]
            drafted: list[int] = []
            if isinstance(proposer, ColumnDrafter) and name not in self._foreign:
                drafted = self._drafted(placing, proposer, wanted, members)
            if len(drafted) < len(members):
                left.update(set(members).difference(drafted))
        return [wanted[i] for i in sorted(left)]

    def _drafted(
        self,
        placing: Placing,
        proposer: ColumnDrafter,
        wanted: Sequence[tuple[Row, int]],
        members: list[int],
    ) -> list[int]:
        """For which of ``members`` the proposer drafted."""
        rows = [wanted[i][0] for i in members]
        columns = placing.columns(rows, [wanted[i][1] for i in members])
        if len(rows) > 1 and proposer.one_length and not columns.is_tree:
            # Near their ends requests want less: these go apart, and not the others with them.
            lengths = columns.depths(1 << 30, self._block_size)
            usual = lengths[0]
            if lengths.count(usual) < len(lengths):
                usual = max(set(lengths), key=lengths.count)
                members = [i for i, length in zip(members, lengths, strict=True) if length == usual]
                rows = [wanted[i][0] for i in members]
                columns = placing.columns(rows, [wanted[i][1] for i in members])
        try:
            drafted = proposer.draft_columns(columns)
        except Exception:  # asked again, it says of whom
            return []
        parts: Sequence[DraftPart] = ()
        if isinstance(drafted, DraftBlock):
            parts = [DraftPart(range(len(rows)), columns.speculation.method, columns, drafted)]
        elif drafted is not None:
            parts = drafted
        return [
            members[i]
            for part in parts
            if placing.place_chains(rows, part, self._vocab_size)
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
        stores = name in self._filled_blocks
        stored = self._stored_after(name, members) if stores else None
        if self._placed(members, proposals, stored):
            if stores and stored is None:
                self._record_fills(name, members, proposals, None)
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
            self._record_fills(name, members, proposals, stored)

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

    def _record_fills(
        self,
        name: str,
        members: Sequence[tuple[Row, DraftRow]],
        proposals: Sequence[Proposal],
        together: tuple[Sequence[int], Sequence[int]] | None,
    ) -> None:
        """The drafter's stored state of its requests after it proposed; ``together``: what it said of all at once. Of
        its
        drafts that counts which is still proposed: a grammar may have put others in their place. Who cannot tell of one
        request fails for that one."""
        proposer = self._proposers[name]
        filled_after, drafts_stored = proposer.filled_after, proposer.drafts_stored
        size = self._block_size
        for i, ((row, draft_row), proposed) in enumerate(zip(members, proposals, strict=True)):
            if row.drafting_failed:  # just now
                continue
            hook = "filled_after"
            stored = 0
            try:
                tokens = filled_after(draft_row) if together is None else together[0][i]
                if tokens.__class__ is not int or not 0 <= tokens <= row.num_tokens <= row.num_blocks * size:
                    tokens = self._leading(row, tokens)
                hook = "drafts_stored"
                drafts = drafts_stored(draft_row) if together is None else together[1][i]
                if drafts.__class__ is not int or drafts:
                    most = len(proposed) if proposed.is_chain else 0
                    stored = whole_number(drafts, most, "the number of stored drafts")
            except Exception as error:
                self.guard.failed(name, hook, [row], error)
                if hook == "filled_after":
                    continue
            fill = row.fill[name]
            if tokens // size > fill.tokens // size:
                self._fill(name, row, tokens)
            fill.tokens = tokens
            if stored and row.proposal is not proposed:
                kept = row.proposal.tokens if row.proposal.is_chain else ()
                same = [ours == theirs for ours, theirs in zip(proposed.tokens, kept, strict=False)]
                stored = min(stored, [*same, False].index(False))
            fill.drafts = stored

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

    def filled(self, name: str, row: Row, tokens: int, drafts: int) -> None:
        """The drafter has so many tokens of the request, and drafts behind them, without having been called."""
        self._fill(name, row, tokens)
        row.fill[name].drafts = drafts

    def _fill(self, name: str, row: Row, tokens: int) -> None:
        """The drafter has the first ``tokens`` tokens of the request now."""
        fill = row.fill[name]
        before = fill.tokens // self._block_size
        fill.tokens = tokens
        after = tokens // self._block_size
        if after > before:
            self._filled_blocks[name][row.blocks_np[before:after]] = True

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
