"""Steps of several rounds: target, verification and drafts again and again, in one native call.

Where passes are short, most of what a step takes is Python between them, which finds the caches full of weights. A step
whose requests all decode, are ordinary (`runner.ordinary`) and draft with something that native code runs by itself is
one call of ``csrc/rounds.cpp``, and goes on for as many rounds as the plan allows. `LocalExecutor` does a round part by
part, and is the reference: it computes every other step, and drafts where the call could not.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from draftwise.kernels.cpu.attention import address
from draftwise.kernels.cpu.checks import require
from draftwise.kernels.cpu.library import NativeLibrary
from draftwise.kernels.cpu.pass_records import Results
from draftwise.kernels.cpu.program import Program
from draftwise.kernels.cpu.rounds import (
    FeatureJoin,
    RoundDrafts,
    RoundElsewhere,
    RoundFeatures,
    RoundsCall,
    RoundsRecord,
    SlotPool,
    fits,
)
from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel
from draftwise.names import MAX_TREE_NODES
from draftwise.propose.columns import RoundAnswer, RoundDrafter, drafts_rounds
from draftwise.runner.drafting import Drafting
from draftwise.runner.ordinary import Members, OrdinarySteps
from draftwise.runner.placing import NOBODY, Placing, Wanted
from draftwise.runner.rows import Row
from draftwise.sched.columns import NUMBERS, PlanColumns, RowColumns
from draftwise.types import CUT_BYTES, StepPlan
from draftwise.verify.native import NativeRules

MOST_ROUNDS = 64
"""Of a step."""
_KEPT_BYTES = 32 << 20
"""Results of the target's passes that are used again; larger ones are made for each step."""
_MOST_ROWS = 512
"""Rows of a pass, at most: longer ones take so long that nothing is won."""


class _Drafter(NamedTuple):
    """Who drafts for all requests of a step, and how; ``drafts`` None: nobody does."""

    proposer: RoundDrafter | None
    drafts: RoundDrafts | None
    features: RoundFeatures | None


class ComputedRounds(NamedTuple):
    """The rounds of a step of these ``members``, and the times of `StepResult`. Drafts have been made but for those
    that are ``wanted`` of `Drafting.propose`; who proposed nothing yet counts as proposing nothing."""

    rounds: list[RowColumns]
    members: Members
    wanted: Wanted
    forward_time: float
    verify_time: float
    draft_time: float
    draft_forward_time: float
    steady_time: float


_NOBODY = _Drafter(None, None, None)
_ELSEWHERE = _Drafter(None, RoundElsewhere(), None)


@dataclass(slots=True)
class _Room:
    """Results of the target's passes, of up to so many rows, and where features come from."""

    program: Program
    results: Results
    rows: int
    _sources: tuple[FeatureJoin, Tensor, Sequence[Tensor]] | None = None

    def sources(self, features: RoundFeatures) -> Sequence[Tensor] | None:
        """Results of which these features are made: always the same object for the same join and memory. None: they
        cannot be made of them."""
        join, values = features.join, features.values
        known = self._sources
        if known is not None and known[0] is join and known[1] is values:
            return known[2]
        found: Sequence[Tensor] = (self.results.hidden,)
        if join.layers is not None:
            layers = self.program.layers
            found = [self.results.captured[layers.index(layer)] for layer in join.layers]
        if not fits(join, found, values.shape[2], values.dtype):
            return None
        self._sources = join, values, found
        return found


class RoundSteps:
    """Makes them. One of an executor, whose target computes on a CPU and carries no state."""

    def __init__(
        self,
        library: NativeLibrary,
        rules: NativeRules,
        model: DecoderModel,
        storage: KVStorage,
        drafting: Drafting,
        ordinary: OrdinarySteps,
        block_size: int,
    ) -> None:
        self._call = RoundsCall(library, rules.pool)
        self._model, self._storage, self._drafting = model, storage, drafting
        self._ordinary, self._placing = ordinary, Placing(library, block_size)
        self._block_size = block_size
        self._room: _Room | None = None
        self._asked: tuple[Members, bool] | None = None
        """The newest requests, and whether their drafters must be shown steps."""
        self._pools = _slot_pools(storage)
        self._hurry = array("i", [0])

    def hurry(self, now: bool) -> None:
        """See `Executor.hurry`."""
        self._hurry[0] = now

    def run(self, plan: StepPlan, rows: Mapping[int, Row]) -> ComputedRounds | None:
        """Compute a step, if it can be computed so; None: it cannot, and nothing has changed."""
        columns = plan.rows
        if not isinstance(columns, PlanColumns) or columns.num_new.count(1) < len(columns.rids):
            return None
        members = self._ordinary.members(columns.rids, rows)
        if self._asked is None or self._asked[0] is not members:
            self._asked = members, self._must_show(members)
        if self._asked[1] or self._drafting.transfers:
            return None
        count, budgets = len(members.rows), columns.budgets
        nodes = count * min(max(max(budgets), max(columns.num_draft)), MAX_TREE_NODES)
        if count + nodes > _MOST_ROWS:
            return None
        drafter = self._drafter(members, columns, plan.rounds, count + nodes)
        if drafter is None:
            return None
        room = self._room_for(count + nodes, adapted=members.adapters is not None)
        if room is None:
            return None
        record, answers = RoundsRecord(), _Answers(plan.rounds, count, nodes)
        kept = self._tell(record, plan, members, nodes, room, drafter)
        if kept is None:
            return None
        answers.tell(record)
        self._call.run(record)
        del kept
        if not record.done:
            return None
        self._ordinary.stale = True
        return self._taken(plan, record, answers, members, drafter)

    def _must_show(self, members: Members) -> bool:
        """Whether a drafter of these requests looks at what the target computes, and native code cannot do that."""
        drafting, method = self._drafting, members.method
        if not drafting.observes_for(members.methods):
            return False
        proposer: object = None if method is None else drafting.native(method)
        return not (drafts_rounds(proposer) and proposer.in_rounds)

    def _drafter(self, members: Members, columns: PlanColumns, rounds: int, rows: int) -> _Drafter | None:
        """Who drafts behind each round, of at most so many rows; None: what the target computes has to be shown to
        somebody."""
        drafting, budgets = self._drafting, columns.budgets
        watched = drafting.observes_for(members.methods) and len(columns.resting) < len(members.rows)
        if not any(budgets):
            return None if watched and any(map(self._reads_every_step, members.methods)) else _NOBODY
        found = None
        told_only = watched and 0 in budgets  # some are told of tokens, and do not draft
        if not columns.resting and not told_only:
            found = self._native(members, budgets, rounds, rows)
        if watched and (found is None or found.features is None):
            return None
        return found or _ELSEWHERE

    def _reads_every_step(self, method: str) -> bool:
        if not self._drafting.observes_for({method}):
            return False
        proposer = self._drafting.native(method)
        return not drafts_rounds(proposer) or proposer.reads_every_step

    def _native(self, members: Members, budgets: array[int], rounds: int, rows: int) -> _Drafter | None:
        """The drafter of all of them, if native code can draft for it."""
        method = members.method
        proposer: object = None if method is None or members.kind < 1 else self._drafting.native(method)
        if method is None or not drafts_rounds(proposer):
            return None
        guard = self._drafting.guard
        if guard.failed_once and False not in [row.drafting_failed for row in members.rows]:
            return None
        wanted = Wanted(members.rows, budgets, members.places)
        try:
            found = proposer.round_drafts(self._placing.columns(wanted), rounds, rows)
        except Exception as error:
            guard.failed(method, "round_drafts", members.rows, error)
            return None
        return None if found is None else _Drafter(proposer, *found)

    def _room_for(self, rows: int, *, adapted: bool) -> _Room | None:
        """Results with room for so many rows, of the pass that captures what drafters look at; with or without
        adapters."""
        program = self._model.pass_of(self._storage, self._drafting.capture_layers, adapted=adapted)
        if program is None:
            return None
        room = self._room
        if room is None or room.program is not program or room.rows < rows:
            room = _Room(program, program.results(rows), rows)
            # With a large vocabulary many rows of logits are more than should be kept from step to step.
            self._room = room if room.results.nbytes <= _KEPT_BYTES else None
        return room

    def _tell(
        self,
        record: RoundsRecord,
        plan: StepPlan,
        members: Members,
        nodes: int,
        room: _Room,
        drafter: _Drafter,
    ) -> object | None:
        """Write down what the call is told. Answers with what it points to; None: features cannot be made there."""
        columns = plan.rows
        assert isinstance(columns, PlanColumns), "looked at before"
        record.requests, record.books = len(members.rows), members.places_at
        record.block_size = self._block_size
        record.rounds, record.most_ns = plan.rounds, int(1e9 * plan.round_seconds)
        record.hurry, record.most_nodes = self._hurry.buffer_info()[0], nodes
        record.wanted, record.budgets = columns.num_draft.buffer_info()[0], columns.budgets.buffer_info()[0]
        results = room.results
        record.program, record.room = room.program.pointer, room.rows
        own = members.adapters_np
        passes = room.program.goes_to(
            results, head_only=drafter.features is None, adapters=None if own is None else address(own)
        )
        record.passes = ctypes.pointer(passes)
        record.logits, record.vocab = results.logits.data_ptr(), results.logits.shape[1]
        record.pools, record.num_pools = ctypes.addressof(self._pools), len(self._pools)
        cuts = None
        if plan.cuts is not None:
            require(len(plan.cuts.tables) == CUT_BYTES * len(members.rows), "a table for each request")
            cuts = array("B", plan.cuts.tables), array("B", plan.cuts.outcomes), array("B", plan.cuts.once)
            record.cuts, record.outcomes = cuts[0].buffer_info()[0], cuts[1].buffer_info()[0]
        if drafter.drafts is None:
            return (cuts,)
        features = drafter.features
        try:
            drafter.drafts.tell(record)
            sources = None if features is None else room.sources(features)
            if features is not None and sources is not None:
                features.tell(record, sources)
        except Exception as error:
            assert members.method is not None, "one drafts for all of them"
            self._drafting.guard.failed(members.method, "round_drafts", members.rows, error)
            return None
        if features is not None and sources is None:
            return None
        if cuts is not None and any(cuts[2]):
            if drafter.drafts.stops:
                record.once = cuts[2].buffer_info()[0]
            else:  # whoever has read features or tokens goes on drafting
                record.rounds = 1
        return (cuts, drafter.drafts)

    def _taken(
        self, plan: StepPlan, record: RoundsRecord, answers: _Answers, members: Members, drafter: _Drafter
    ) -> ComputedRounds:
        columns = plan.rows
        assert isinstance(columns, PlanColumns)
        done, drafted = record.done, bool(record.drafted)
        if drafter.proposer is not None:
            try:
                drafter.proposer.after_rounds(RoundAnswer(done, drafted))
            except Exception as error:  # what was computed is whole all the same
                assert members.method is not None, "one drafts for all of them"
                self._drafting.guard.failed(members.method, "after_rounds", members.rows, error)
            told = None if drafter.drafts is None else drafter.drafts.told
            if told is not None:
                for row in members.rows:
                    row.keep_q(told)
        rounds = [answers.of(i, columns.rids) for i in range(done)]
        wanted = NOBODY
        if not drafted:
            budgets = columns.budgets
            wanted = Wanted.of([(members.rows[i], budgets[i]) for i in answers.going if budgets[i]])
        spent = 1e-9 * record.draft_ns
        return ComputedRounds(
            rounds,
            members,
            wanted,
            1e-9 * record.forward_ns,
            1e-9 * record.verify_ns,
            spent,
            spent if drafter.drafts is not None and drafter.drafts.computes else 0.0,
            1e-9 * record.steady_ns,
        )


class _Answers:
    """What the call writes, of each round one behind the other."""

    def __init__(self, rounds: int, requests: int, nodes: int) -> None:
        self._requests, self._nodes = requests, nodes
        self._numbers = array("i", bytes(4 * rounds * NUMBERS * requests))
        self._tokens = array("i", bytes(4 * rounds * (requests + nodes)))
        self._given = array("i", bytes(4 * rounds * 3 * nodes))
        self._paths = array("i", bytes(4 * rounds * nodes))
        self._sizes, self._going = array("i", bytes(8 * rounds)), array("i", bytes(4 * requests))

    def tell(self, record: RoundsRecord) -> None:
        own = self._numbers, self._tokens, self._given, self._paths, self._sizes, self._going
        record.numbers, record.tokens, record.nodes, record.paths, record.sizes, record.going = [
            column.buffer_info()[0] for column in own
        ]

    def of(self, i: int, rids: Sequence[int]) -> RowColumns:
        """The results of round i."""
        size, first = NUMBERS * self._requests, i * (self._requests + self._nodes)
        nodes, tokens = self._sizes[2 * i], self._sizes[2 * i + 1]
        given, paths = 3 * i * self._nodes, i * self._nodes
        return RowColumns(
            rids,
            self._numbers[i * size : (i + 1) * size],
            self._tokens[first : first + tokens],
            self._given[given : given + 2 * nodes],
            self._paths[paths : paths + nodes],
            {},
        )

    @property
    def going(self) -> list[int]:
        """Which requests have not ended."""
        return [place for place, going in enumerate(self._going) if going]


def _slot_pools(storage: KVStorage) -> ctypes.Array[SlotPool]:
    """Where accepted nodes of trees move."""
    pools = []
    for pool in storage.pools:
        require(pool[0].is_contiguous(), "a storage whose slots lie side by side")
        layers, slots = pool.shape[:2]
        size = pool.element_size()
        pools.append(SlotPool(pool.data_ptr(), layers, pool.stride(0) * size, slots, pool.stride(1) * size))
    return (SlotPool * len(pools))(*pools)
