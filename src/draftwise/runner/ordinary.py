"""Steps in columns: what lies in the books of requests is put together, and decided, in native calls.

Rows of all requests are one native call (``csrc/steps.cpp``). A request of which nothing but its draws has to be known
is *ordinary*: what verification is told of all ordinary ones, and what is taken in of its answer, are a native call
each. The others of the step, such as those with a grammar or with log-probabilities, and prompts whose ends it does not
reach, go one by one in the same step (`runner.apart`). `runner.batch`, `verify.native` and `runner.apart` do all of it
request by request, and are the reference: a step goes in columns if it can, and gives the same bits.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from draftwise.kernels.cpu.attention import address
from draftwise.kernels.cpu.checks import require
from draftwise.kernels.cpu.columns import RowPacker
from draftwise.kernels.cpu.library import NativeLibrary
from draftwise.kernels.cpu.records import check_record
from draftwise.kv.storage import KVStorage
from draftwise.runner.batch import StepBatch, StepRow
from draftwise.runner.laying import Laid, lay_out
from draftwise.runner.rows import DrafterFill, Row, RowBook
from draftwise.runner.side_by_side import Decided, OrdinaryStep, Read
from draftwise.sampling.state import SamplingState
from draftwise.sched.columns import NUMBERS, PROPOSED, PlanColumns, RowColumns
from draftwise.types import (
    EMPTY_PROPOSAL,
    Proposal,
    RowPlan,
    RowResult,
    StepInput,
)
from draftwise.verify.base import VerifyColumns
from draftwise.verify.native import RULES, NativeRules

_PTR, _I64 = ctypes.c_void_p, ctypes.c_int64
_NAMES_IN_C = {
    "tokens_at": "tokens",
    "blocks_at": "blocks",
    "stops_at": "stops",
    "native_rule": "rule",
    "num_waiting": "waiting",
    "q_at": "q",
    "method_number": "method",
    "fill_at": "fill",
    "marks_at": "marks",
}
"""Fields of `RowBook`."""
_IN_COLUMNS, _CHUNK = 0, 2
"""``dw::Part``."""


class OrdinarySteps:
    """Makes them, and decides them. One of an executor, whose target computes on a CPU and carries no state."""

    def __init__(
        self, library: NativeLibrary, rules: NativeRules, packer: RowPacker, block_size: int
    ) -> None:
        """``packer``: the executor's own (`own_packer`)."""
        self._rules = rules
        self._packer = packer
        self._block_size = block_size
        check_record(library, "FillBook", DrafterFill)
        check_record(library, "RowBook", RowBook, _NAMES_IN_C)
        self._members = Members((), {})
        self._laid: Laid | None = None
        self._size = library.function(
            "dw_step_size", ctypes.c_int, [_I64, _PTR, _I64, _PTR, _PTR, _PTR, _PTR]
        )
        self._rows = library.function("dw_step_rows", None, [_I64, _PTR, _I64, *[_PTR] * 17])
        self._taken = library.function(
            "dw_step_taken",
            _I64,
            [_I64, _I64, _PTR, _PTR, _I64, _PTR, _PTR, _I64, *[_PTR] * 9, _I64, _PTR, _PTR],
        )
        self._waiting = library.function("dw_step_waiting", None, [_I64, _PTR, _PTR])
        self._move = library.function("dw_move_slots", None, [_PTR, *[_I64] * 5, _PTR, _PTR])
        self.stale = False
        """Whether the sampling states of requests are behind their rows, see `catch_up`."""

    def changed(self) -> None:
        """Requests came or left."""
        self._members = Members((), {})

    def enters(self, row: Row) -> None:
        """Say of a request whether it is ordinary from now on."""
        plain = row.state.plain and row.grammar is None and row.error is None
        if plain and (row.prompt_logprobs is None or row.num_computed >= row.num_prompt - 1):
            row.native_rule = RULES.get(row.rule, -1)

    def catch_up(self, rows: Mapping[int, Row]) -> None:
        """Before a step that goes request by request: sampling states count the tokens that came in columns."""
        if self.stale:
            self.stale = False
            for row in rows.values():
                row.state.num_tokens = row.num_tokens

    def gather(self, plans: Sequence[RowPlan], rows: Mapping[int, Row]) -> OrdinaryStep | None:
        """A planned step, if somebody in it is ordinary; None: it goes request by request, and nothing has changed."""
        columns = PlanColumns.of(plans)
        rids, num_new, count = columns.rids, columns.num_new, len(columns.rids)
        members, places = self.members(rids, rows).rows, self._members.places
        size, places_at = self._block_size, self._members.places_at
        asked = num_new + columns.num_draft
        answers, facts = array("i", bytes(8 * count)), array("q", bytes(64))
        asked_at, own_at = asked.buffer_info()[0], answers.buffer_info()[0]
        facts_at = facts.buffer_info()[0]
        parts_at = own_at + 4 * count
        if not self._size(count, places_at, size, asked_at, own_at, parts_at, facts_at):
            if not facts[7]:
                return None
            going = [plan for plan in plans if not rows[plan.rid].is_full]
            return self.gather(going, rows) if going else None
        decided = facts[4]
        if not decided:
            return None
        laid = self._laid
        if laid is None or laid.facts != facts or laid.requests != count:
            laid = self._laid = lay_out(count, facts, self._packer)
        self._rows(count, places_at, size, asked_at, own_at, parts_at, facts_at, *laid.places)
        step_input = StepInput(*laid.rows, laid.attention(size))
        if self._members.adapters:
            step_input = replace(step_input, adapters=self._members.adapters)
        logit_rows = None if laid.logit_rows_np is None else laid.logit_rows_np.tolist()
        own = answers[:count]
        at_of: array[int] | None = None
        apart_at: list[int] = []
        apart: StepBatch | None = None
        members_decided = members
        if decided < count:
            starts = laid.laid_out.starts_np.tolist()
            parts = answers[count:].tolist()
            at_of = array("i", [i for i, part in enumerate(parts) if part == _IN_COLUMNS])
            apart_at = [i for i, part in enumerate(parts) if part != _IN_COLUMNS]
            first_rows = laid.first_rows_np.tolist()
            apart = _apart(
                [(columns[i], members[i], own[i], starts[i], first_rows[i], parts[i]) for i in apart_at],
                step_input,
                logit_rows,
            )
            own, places = array("i", [own[i] for i in at_of]), array("Q", [places[i] for i in at_of])
            members_decided = [members[i] for i in at_of]
        return OrdinaryStep(
            columns,
            members,
            self._members.places,
            step_input,
            logit_rows,
            facts[6],
            Decided(at_of, members_decided, places, own, laid.given, laid.inputs),
            apart,
            apart_at,
            self._members.method,
        )

    def members(self, rids: Sequence[int], rows: Mapping[int, Row]) -> Members:
        """These requests side by side."""
        if rids != self._members.rids:
            self._members = Members(rids, rows)
        return self._members

    def wait(self, members: Members, results: RowColumns) -> None:
        """Write into the results how many nodes wait for each of these requests now."""
        self._waiting(
            len(members.rows),
            members.places_at,
            results.numbers.buffer_info()[0] + 4 * PROPOSED * len(members.rows),
        )

    def decide(self, step: OrdinaryStep, logits: torch.Tensor, *, told: bool) -> tuple[list[int], list[int]]:
        """Decide the ordinary requests by ``logits`` [L, V] float32, raw, of the rows that have some, and take in what
        was decided: in their books, and in the step. ``told``: somebody has to know which rows became tokens.

        Returns:
            Slots of keys that have to be moved, from and to.
        """
        decided, count = step.decided, len(step.rows)
        number, nodes = len(decided.rows), decided.num_nodes
        draws_at, numbers_at, given_at, q_at, methods_at = decided.inputs
        found = array("i", bytes(4 * (2 * number + nodes)))
        found_at = found.buffer_info()[0]
        self._rules.decide_at(
            logits if logits.is_contiguous() else logits.contiguous(),
            number,
            draws_at,
            numbers_at,
            q_at,
            nodes,
            given_at,
            found_at,
            step.num_logits,
        )
        results, tokens = array("i", bytes(4 * NUMBERS * count)), array("i", bytes(4 * (number + nodes)))
        moves, goes_on = array("q", bytes(16 * nodes)), array("i", bytes(4 * number))
        read: Read | None = None
        room, read_at, counts_at, facts_at = 0, None, None, None
        if told:
            room = sum(step.plan.num_new) + nodes
            read = Read(array("i", bytes(4 * number)), array("q", bytes(24)), np.empty((3, room), np.int64))
            read_at, counts_at = address(read.rows_np), read.counts.buffer_info()[0]
            facts_at = read.facts.buffer_info()[0]
        at_of = decided.at
        moved = self._taken(
            count,
            number,
            decided.places.buffer_info()[0],
            None if at_of is None else at_of.buffer_info()[0],
            self._block_size,
            decided.own.buffer_info()[0],
            methods_at,
            nodes,
            given_at,
            found_at,
            results.buffer_info()[0],
            goes_on.buffer_info()[0],
            tokens.buffer_info()[0],
            moves.buffer_info()[0],
            step.plan.num_new.buffer_info()[0],
            address(step.input.attention.query_start_np),
            read_at,
            room,
            counts_at,
            facts_at,
        )
        self.stale = True
        decided.goes_on, decided.read = goes_on, read
        step.results = RowColumns(
            step.plan.rids, results, tokens, decided.given[: 2 * nodes], found[2 * number :], {}
        )
        return moves[:moved].tolist(), moves[nodes : nodes + moved].tolist()

    def results(self, step: OrdinaryStep, of_others: Sequence[RowResult]) -> RowColumns:
        """The results for the scheduler, once the requests have drafted. ``of_others``: of those apart."""
        found, count = step.results, len(step.rows)
        assert found is not None, "the step was decided"
        waiting_at = found.numbers.buffer_info()[0] + 4 * PROPOSED * count
        self._waiting(count, step.places.buffer_info()[0], waiting_at)
        if of_others:
            found.take(dict(zip(step.apart_at, of_others, strict=True)))
        return found

    def compact(self, storage: KVStorage, source: Sequence[int], target: Sequence[int]) -> None:
        """`KVStorage.move` of accepted paths: a node never goes to where a later one of its path still stands."""
        if not source:
            return
        moves = array("q", [*source, *target])
        at, count = moves.buffer_info()[0], len(source)
        for pool in storage.pools:
            require(pool[0].is_contiguous(), "a storage whose slots lie side by side")
            layers, slots = pool.shape[:2]
            size = pool.element_size()
            self._move(
                pool.data_ptr(),
                layers,
                pool.stride(0) * size,
                slots,
                pool.stride(1) * size,
                count,
                at,
                at + 8 * count,
            )


class Members:
    """The requests of a step. They stay the same for many steps."""

    def __init__(self, rids: Sequence[int], rows: Mapping[int, Row]) -> None:
        self.rids = rids
        self.rows = [rows[rid] for rid in rids]
        self.places = array("Q", [row.at for row in self.rows])
        self.places_at = self.places.buffer_info()[0]
        self.methods = frozenset(row.method for row in self.rows)
        self.method = next(iter(self.methods)) if len(self.methods) == 1 else None
        kinds = {row.kind for row in self.rows}
        self.kind = kinds.pop() if len(kinds) == 1 else 0
        """Their `Row.kind`; 0: they differ."""
        adapters = tuple([row.adapter for row in self.rows])
        self.adapters = adapters if any(adapters) else None
        self.adapters_np = np.array(adapters, np.int64) if self.adapters else None


def _apart(
    members: Sequence[tuple[RowPlan, Row, int, int, int, int]],
    step_input: StepInput,
    logit_rows: list[int] | None,
) -> StepBatch:
    """Those of a step that are not decided in columns, as `batch.assemble` describes them. Of each: its plan, nodes to
    verify, first row, first row among those with logits, and part in the step."""
    steps: list[StepRow] = []
    states: list[SamplingState] = []
    proposals: list[Proposal] = []
    firsts: list[int] = []
    rules: list[str] = []
    owners: list[int] = []
    roots: list[int] = []
    structured: list[int] = []
    prompt: list[tuple[int, int, int]] = []
    plain = True
    for i, (plan, row, nodes, start, first_row, part) in enumerate(members):
        proposal = EMPTY_PROPOSAL
        if nodes:
            proposal = row.proposal
            if nodes < len(proposal.tokens):
                proposal = proposal.prefix(nodes)
        steps.append(StepRow(row, plan, proposal))
        if row.prompt_logprobs is not None and row.num_computed < row.num_prompt - 1:
            prompt.append((i, start, min(plan.num_new, row.num_prompt - 1 - row.num_computed)))
        if part == _CHUNK:
            continue
        state = row.state
        state.num_tokens = row.num_tokens  # as `OrdinarySteps.catch_up`
        if row.grammar is not None:
            structured.append(len(owners))
        plain = plain and state.plain
        owners.append(i)
        roots.append(start + plan.num_new - 1)
        states.append(state)
        proposals.append(proposal)
        firsts.append(first_row)
        rules.append(row.rule)
    decided = VerifyColumns(states, proposals, firsts, rules)
    starts = [start for _, _, _, start, _, _ in members]
    return StepBatch(
        steps,
        starts,
        step_input,
        decided,
        owners,
        roots,
        structured,
        plain and not structured,
        logit_rows,
        prompt,
    )
