"""Ordinary steps, in columns: every request decodes, and nothing but its draws has to be known of it.

Rows, what verification is told, and what is taken in of its answer are a native call each (``csrc/steps.cpp``), over
the books of the requests (`RowBook`). `runner.batch`, `verify.native` and `LocalExecutor` do the same for other steps,
and are the reference: a step is ordinary if it can be, and gives the same bits.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from draftwise.kernels.cpu.attention import address
from draftwise.kernels.cpu.checks import require
from draftwise.kernels.cpu.columns import RowPacker
from draftwise.kernels.cpu.library import NativeLibrary
from draftwise.kv.storage import KVStorage
from draftwise.runner.rows import Row, method_name
from draftwise.sampling.state import DRAW
from draftwise.types import AttentionBatch, IntArray, RowPlan, RowResult, StepInput, chain_parents, new_record
from draftwise.verify.native import RULES, NativeRules

_PTR, _I64 = ctypes.c_void_p, ctypes.c_int64
_NOT_FINITE = "RequestError: the model's logits are not finite"
_NO_TREES = np.zeros(0, np.bool_)


@dataclass(slots=True)
class OrdinaryStep:
    """A step of R requests with N nodes to verify. ``own`` [R]: nodes of each; ``starts`` [R + 1]: first row of each;
    ``places``: where their books lie. Of the answer: ``sizes`` [R] tokens of each, 0: there was none; ``goes_on`` [R]:
    whether it has not ended; ``tokens``: of all, side by side."""

    rows: list[Row]
    rids: Sequence[int]
    budgets: Sequence[int]
    follow: Sequence[bool]
    input: StepInput
    places: array[int]
    own: array[int]
    starts: list[int]
    contexts: list[int]
    methods: list[int]
    draws: bytearray
    numbers: array[int]
    given: array[int]
    q_at: array[int] | None
    trees: bool
    sizes: list[int]
    goes_on: list[int]
    tokens: list[int]
    paths: list[tuple[int, ...]]

    @property
    def num_nodes(self) -> int:
        """N"""
        return len(self.given) // 3

    def read(self) -> list[tuple[Row, int, Sequence[int]]]:
        """The committed tokens for drafters that follow, see `Drafting.committed`."""
        found: list[tuple[Row, int, Sequence[int]]] = []
        columns = zip(
            self.rows, self.contexts, self.starts, self.sizes, self.paths, self.follow, strict=False
        )
        for row, context, start, size, path, follows in columns:
            if follows and size:
                if path is _paths(size - 1):
                    found.append((row, context, range(start, start + size)))
                else:
                    found.append((row, context, [start, *[start + 1 + node for node in path]]))
        return found

    def drafting(self) -> list[tuple[Row, int]]:
        """The requests that draft after this step, and how much."""
        columns = zip(self.rows, self.budgets, self.goes_on, strict=True)
        return [(row, budget) for row, budget, goes_on in columns if budget and goes_on]

    def results(self) -> tuple[RowResult, ...]:
        """The results for the scheduler, once the requests have drafted."""
        total, own, tokens = self.num_nodes, self.own.tolist(), self.tokens
        given = self.given.tolist()
        waiting = [row.num_waiting for row in self.rows]
        results = []
        first = node = 0
        for rid, size, n, path, method, proposed in zip(
            self.rids, self.sizes, own, self.paths, self.methods, waiting, strict=True
        ):
            if not size:
                results.append(RowResult(rid, error=_NOT_FINITE))
                node += n
                continue
            drafts: tuple[int, ...] = ()
            parents: tuple[int, ...] = ()
            name = "none"
            if n:
                drafts = tuple(given[node : node + n])
                parents = tuple(given[total + node : total + node + n]) if self.trees else chain_parents(n)
                name = method_name(method)
            results.append(
                new_record(
                    RowResult,
                    (
                        rid,
                        tuple(tokens[first : first + size]),
                        n,
                        size - 1,
                        path,
                        drafts,
                        parents,
                        name,
                        proposed,
                        None,
                        None,
                        None,
                        None,
                    ),
                )
            )
            first += size
            node += n
        return tuple(results)


class OrdinarySteps:
    """Makes them, and decides them. One of an executor, whose target computes on a CPU and carries no state."""

    def __init__(
        self, library: NativeLibrary, rules: NativeRules, packer: RowPacker, block_size: int
    ) -> None:
        """``packer``: the executor's own (`own_packer`)."""
        self._rules = rules
        self._packer = packer
        self._block_size = block_size
        self._members: tuple[Sequence[int], list[Row], array[int]] = ((), [], array("Q"))
        self._size = library.function("dw_step_size", ctypes.c_int, [_I64, _PTR, _I64, _PTR, _PTR, _PTR])
        self._rows = library.function(
            "dw_step_rows", None, [_I64, _PTR, _I64, _PTR, _I64, _I64, *[_PTR] * 11]
        )
        self._taken = library.function(
            "dw_step_taken", _I64, [_I64, _PTR, _I64, _PTR, _I64, _PTR, _PTR, _PTR, _PTR, _PTR, _PTR]
        )
        self._move = library.function("dw_move_slots", None, [_PTR, *[_I64] * 5, _PTR, _PTR])
        self.stale = False
        """Whether the sampling states of requests are behind their rows, see `catch_up`."""

    def changed(self) -> None:
        """Requests came or left."""
        self._members = ((), [], array("Q"))

    def enters(self, row: Row) -> None:
        """Say of a request whether it may ever be part of such a step."""
        plain = row.state.plain and row.grammar is None and row.error is None
        if plain and row.prompt_logprobs is None and not row.adapter:
            row.native_rule = RULES.get(row.rule, -1)

    def catch_up(self, rows: Mapping[int, Row]) -> None:
        """Before a step that is not ordinary: sampling states count the tokens of those that were."""
        if self.stale:
            self.stale = False
            for row in rows.values():
                row.state.num_tokens = row.num_tokens

    def gather(self, plans: Sequence[RowPlan], rows: Mapping[int, Row]) -> OrdinaryStep | None:
        """A planned step, if it is ordinary; None: it is not, and nothing has changed."""
        rids, num_new, num_draft, budgets, _, follow = zip(*plans, strict=True)
        count = len(rids)
        if num_new.count(1) != count:
            return None
        if rids != self._members[0]:
            members = [rows[rid] for rid in rids]
            self._members = rids, members, array("Q", [row.at for row in members])
        _, members, places = self._members
        size, places_at = self._block_size, places.buffer_info()[0]
        wanted = array("i", num_draft)
        own, facts = array("i", bytes(4 * count)), array("q", bytes(32))
        if not self._size(
            count,
            places_at,
            size,
            wanted.buffer_info()[0],
            own.buffer_info()[0],
            facts.buffer_info()[0],
        ):
            return None
        nodes, width, trees, sampled = facts
        total = count + nodes
        (token_ids, positions, slots), rows_at = self._packer.room(total)
        ints: IntArray = np.empty(2 * count + 1 + count * width, np.int32)
        at = address(ints)
        is_tree_np = np.zeros(count, np.bool_)
        ancestors_np = np.zeros(total, np.uint64) if trees else None
        draws = bytearray(DRAW.size * count)
        numbers, given = array("i", bytes(4 * 5 * count)), array("i", bytes(4 * 3 * nodes))
        methods, q_at = array("i", bytes(4 * count)), array("Q", bytes(8 * count))
        self._rows(
            count,
            places_at,
            size,
            own.buffer_info()[0],
            nodes,
            width,
            rows_at,
            at,
            at + 4 * (count + 1),
            at + 4 * (2 * count + 1),
            address(is_tree_np),
            None if ancestors_np is None else address(ancestors_np),
            _address(draws),
            numbers.buffer_info()[0],
            given.buffer_info()[0],
            q_at.buffer_info()[0],
            methods.buffer_info()[0],
        )
        starts_np, contexts_np = ints[: count + 1], ints[count + 1 : 2 * count + 1]
        attention = AttentionBatch(
            starts_np,
            contexts_np,
            is_tree_np,
            ints[2 * count + 1 :].reshape(count, width),
            ancestors_np,
            size,
        )
        return OrdinaryStep(
            members,
            rids,
            budgets,
            follow,
            StepInput(token_ids, positions, slots, attention),
            places,
            own,
            starts_np.tolist(),
            contexts_np.tolist(),
            methods.tolist(),
            draws,
            numbers,
            given,
            q_at if sampled else None,
            bool(trees),
            [],
            [],
            [],
            [],
        )

    def decide(self, step: OrdinaryStep, logits: torch.Tensor) -> tuple[list[int], list[int]]:
        """Decide all requests by ``logits`` [R + N, V] float32, raw, of all rows, and take in what was decided: in
        their books, and in the step.

        Returns:
            Slots of keys that have to be moved, from and to.
        """
        count, nodes = len(step.rows), step.num_nodes
        found = array("i", bytes(4 * (2 * count + nodes)))
        self._rules.decide_at(
            logits if logits.is_contiguous() else logits.contiguous(),
            count,
            _address(step.draws),
            step.numbers.buffer_info()[0],
            None if step.q_at is None else step.q_at.buffer_info()[0],
            nodes,
            step.given.buffer_info()[0],
            found.buffer_info()[0],
        )
        answers, tokens = array("i", bytes(8 * count)), array("i", bytes(4 * (count + nodes)))
        moves = array("q", bytes(16 * nodes))
        at = answers.buffer_info()[0]
        moved = self._taken(
            count,
            step.places.buffer_info()[0],
            self._block_size,
            step.own.buffer_info()[0],
            nodes,
            step.given.buffer_info()[0],
            found.buffer_info()[0],
            at,
            at + 4 * count,
            tokens.buffer_info()[0],
            moves.buffer_info()[0],
        )
        self.stale = True
        step.sizes, step.goes_on, step.tokens = (
            answers[:count].tolist(),
            answers[count:].tolist(),
            tokens.tolist(),
        )
        if step.trees:
            paths = found[2 * count :].tolist()
            first = 0
            for size, n in zip(step.sizes, step.own, strict=True):
                path = tuple(paths[first : first + max(size - 1, 0)])
                straight = _paths(len(path))
                step.paths.append(straight if path == straight else path)
                first += n
        else:
            step.paths = [_paths(size - 1) if size else () for size in step.sizes]
        return moves[:moved].tolist(), moves[nodes : nodes + moved].tolist()

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


_PATHS = [tuple(range(n)) for n in range(65)]


def _paths(length: int) -> tuple[int, ...]:
    """The path of nodes 0, 1, ...; always the same object for a length."""
    return _PATHS[length]


def _address(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
