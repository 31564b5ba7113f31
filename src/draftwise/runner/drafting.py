"""The drafting side of the executor: who drafts for whom, which drafter state is valid, and compaction."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from draftwise.kv.storage import KVStorage
from draftwise.names import MAX_TREE_NODES
from draftwise.propose.base import Committed, DraftRow, Proposer
from draftwise.propose.grammar import GrammarProposer, fit
from draftwise.runner.rows import DrafterFill, Row
from draftwise.types import IntArray, Proposal, StepInput, TargetOutput, tree_depth

logger = logging.getLogger("draftwise")


class Drafting:
    """Calls the proposers and keeps the books of their per-token state.

    Per (block, drafter) a mark says that the whole block is filled for that drafter: a prefix-cache hit may then
    rely on it. A block that is handed out anew loses its marks.
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
    ) -> None:
        self._proposers = {GrammarProposer.name: GrammarProposer(), **proposers}
        self._storage = storage
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._device = device
        self._filled_blocks: dict[str, npt.NDArray[np.bool_]] = {
            name: np.zeros(num_blocks, np.bool_) for name, p in self._proposers.items() if p.has_storage
        }
        self.capture_layers = tuple(sorted({i for p in self._proposers.values() for i in p.capture_layers}))
        self._observers = {n: p for n, p in self._proposers.items() if p.capture_layers or p.observes}
        self.observes = bool(self._observers)
        self._moves: tuple[list[int], list[int]] = ([], [])  # slots of the target: from, to
        self._warnings: list[str] = []

    # -------------------------------------------------------------------------------------- block changes

    def admitted(self, row: Row) -> None:
        """A request entered with ``row.num_computed`` cached tokens: how many of them has each drafter?"""
        blocks = row.blocks_np[: row.num_computed // self._block_size]
        for name, marks in self._filled_blocks.items():
            unfilled = np.flatnonzero(~marks[blocks])
            leading = int(unfilled[0]) if len(unfilled) else len(blocks)
            row.fill[name] = DrafterFill(tokens=leading * self._block_size)

    def fresh_blocks(self, block_ids: Sequence[int]) -> None:
        for marks in self._filled_blocks.values():
            marks[list(block_ids)] = False

    def trimmed(self, row: Row) -> None:
        """Blocks past the committed tokens went away, and what drafters had written there with them."""
        for fill in row.fill.values():
            fill.tokens = min(fill.tokens, row.num_computed)
            fill.drafts = 0
        if row.speculation.method in self._filled_blocks:
            self._proposers[row.speculation.method].trimmed(row.rid, row.num_computed)

    def removed(self, row: Row) -> None:
        token_ids_np = _delivered(row)
        name = row.speculation.method
        if name in self._filled_blocks and not row.drafting_failed:
            # Its blocks may be found by the next request with this prefix, such as the next turn of a conversation.
            known = min(row.num_computed, len(token_ids_np))
            try:
                filled = self._proposers[name].settle(row.rid, token_ids_np[:known], row.blocks_np)
            except Exception:
                logger.warning("proposer %r failed to settle request %d", name, row.rid, exc_info=True)
            else:
                self._fill(name, row, max(filled, row.fill[name].tokens))
        for proposer in self._proposers.values():
            proposer.leaving(row.rid, token_ids_np)
            proposer.remove(row.rid)

    def forget(self) -> None:
        for proposer in self._proposers.values():
            proposer.forget()

    # ------------------------------------------------------------------------------- after the target pass

    def observe(self, rids: Sequence[int], batch: StepInput, output: TargetOutput) -> None:
        for proposer in self._observers.values():
            proposer.observe(rids, batch, output)

    @property
    def transfers(self) -> bool:
        """Whether `transfer` may have something to say."""
        return any(p.prompt_only for p in self._observers.values())

    def transfer(self, row: Row) -> Mapping[str, Any] | None:
        """What the output of a request is to say of its prompt, if it is there for that."""
        proposer = self._observers.get(row.speculation.method)
        if proposer is None or not proposer.prompt_only:
            return None
        return proposer.transfer(row.rid)

    def committed(self, parts: Sequence[tuple[Row, int, IntArray]]) -> None:
        """What a step made final: (request, first token, its rows in the batch), see `Committed`."""
        groups: dict[str, list[tuple[Row, Committed]]] = {}
        for row, first_token, rows_np in parts:
            name = row.speculation.method
            if name not in self._observers or row.drafting_failed or not len(rows_np):
                continue
            fill = row.fill.get(name)
            part = Committed(  # by position: twice as fast as by name
                row.rid,
                row.tokens_np[: row.num_tokens],
                first_token,
                rows_np,
                row.blocks_np,
                fill.tokens if fill is not None else 0,
            )
            groups.setdefault(name, []).append((row, part))
        for name, members in groups.items():
            try:
                filled = self._observers[name].committed([part for _, part in members])
            except Exception as error:
                for row, _ in members:
                    self._failed(name, row, error)
                continue
            if filled is not None:
                for (row, _), tokens in zip(members, filled, strict=True):
                    self._fill(name, row, tokens)

    def accepted(self, row: Row, path: Sequence[int], base: int, *, moved: bool = False) -> None:
        """Nodes ``path`` of the proposal, parents first, become tokens base, base + 1, ... (``base``: tokens with K/V
        before them).

        Node i stands in key base + i of the target's storage and must come to key base + k, k its place in the path.
        ``moved``: it was moved already. In drafters' storages nothing is moved: see `Proposer`.
        Example: base 10, path (1, 3): keys 11 -> 10 and 13 -> 11.
        """
        for name, fill in row.fill.items():
            # What a drafter wrote for its own chain is valid as far as the chain was accepted.
            if fill.drafts and fill.tokens == base:
                self._fill(name, row, base + min(len(path), fill.drafts))
            fill.drafts = 0
        if moved or not path or path[-1] == len(path) - 1:  # nodes 0, 1, ... stand where they belong
            return
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
        groups: dict[str, list[tuple[Row, DraftRow]]] = {}
        for row, budget in wanted:
            # The last token that may come is the bonus token behind the deepest accepted node.
            max_depth = row.max_total - row.num_tokens - 1
            if max_depth < 1 or row.drafting_failed:
                continue
            name = row.speculation.method
            fill = row.fill.get(name)
            nodes = min(budget, MAX_TREE_NODES)
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
            )
            groups.setdefault(name, []).append((row, draft_row))
        for name, members in groups.items():
            self._propose_group(name, members)

    def _propose_group(self, name: str, members: list[tuple[Row, DraftRow]]) -> None:
        proposer = self._proposers[name]
        try:
            proposals = proposer.propose([draft_row for _, draft_row in members])
            assert len(proposals) == len(members), f"{len(proposals)} proposals for {len(members)} rows"
            proposals = [
                self._checked(p, draft_row) for p, (_, draft_row) in zip(proposals, members, strict=True)
            ]
        except Exception as error:
            if len(members) > 1:  # find out whose fault it is; the others go on drafting
                for member in members:
                    self._propose_group(name, [member])
                return
            self._failed(name, members[0][0], error)
            return
        for (row, draft_row), proposal in zip(members, proposals, strict=True):
            row.proposal = proposal
            if proposer.has_storage:
                self._record_fill(name, proposer, row, draft_row)

    def _record_fill(self, name: str, proposer: Proposer, row: Row, draft_row: DraftRow) -> None:
        self._fill(name, row, proposer.filled_after(draft_row))
        row.fill[name].drafts = proposer.drafts_stored(draft_row)

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

    def _failed(self, name: str, row: Row, error: Exception) -> None:
        row.drafting_failed = True
        logger.warning(
            "proposer %r failed for request %d, which goes on without speculation",
            name,
            row.rid,
            exc_info=error,
        )
        self._warnings.append(f"proposer {name!r} failed for request {row.rid}: {error}")

    def _checked(self, proposal: Proposal, row: DraftRow) -> Proposal:
        """The proposal under the row's grammar, if it has one. A proposer from outside may err: an invalid tree is its
        failure, not the engine's."""
        tokens, parents = proposal.tokens, proposal.parents
        n = len(tokens)
        if n or parents:
            if n > row.budget or len(parents) != n:
                raise ValueError(f"{n} tokens, {len(parents)} parents, budget {row.budget}")
            if min(tokens) < 0 or max(tokens) >= self._vocab_size:
                raise ValueError(f"tokens {tokens}, some of them outside of the vocabulary")
            depth = n
            if not proposal.is_chain:
                for i, parent in enumerate(parents):
                    if not -1 <= parent < i:
                        raise ValueError(f"node {i} has parent {parent}, which does not precede it")
                depth = tree_depth(parents)
            if depth > row.max_depth:
                raise ValueError(f"a node has depth {depth}, allowed are {row.max_depth}")
            if proposal.q is not None:
                self._check_q(proposal, proposal.q)
        return proposal if row.grammar is None else fit(proposal, row.grammar, row.forced)

    def _check_q(self, proposal: Proposal, q: torch.Tensor) -> None:
        if len(proposal.q_rows) != len(proposal.tokens):
            raise ValueError(f"{len(proposal.q_rows)} q_rows for {len(proposal.tokens)} tokens")
        rows, width = q.shape
        if min(proposal.q_rows) < 0 or max(proposal.q_rows) >= rows or width != self._vocab_size:
            raise ValueError(f"q_rows {proposal.q_rows} of a q of {rows} rows of {width} tokens")

    # ---------------------------------------------------------------------------------------------- reports

    def take_forward_time(self) -> float:
        """Seconds the proposers spent in their models' forward passes since the last call."""
        total = 0.0
        for proposer in self._proposers.values():
            total += proposer.forward_time
            proposer.forward_time = 0.0
        return total

    def take_warnings(self) -> tuple[str, ...]:
        warnings, self._warnings = tuple(self._warnings), []
        return warnings


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
