"""The work of a suffix proposer in a step, in native code or in Python: take in new tokens, and draft."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from draftwise.kernels.cpu.library import NativeLibrary
from draftwise.kernels.cpu.rounds import RoundSuffixes
from draftwise.names import MAX_TREE_NODES
from draftwise.propose.base import DraftRow
from draftwise.propose.columns import DraftColumns
from draftwise.propose.lookup import suffix_python
from draftwise.propose.lookup.suffix_native import (
    BEST_FIRST,
    CHAIN,
    SHAPED,
    DraftStruct,
    LimitsStruct,
    NativeSuffixTree,
    address,
    native_draft,
    static_shape,
    suffix_functions,
)
from draftwise.propose.lookup.suffix_python import PythonSuffixTree, SuffixDraft, SuffixLimits
from draftwise.types import IntArray, chain_parents

Tree = NativeSuffixTree | PythonSuffixTree


class NativeEngine:
    """Takes in new tokens and drafts, in one native call."""

    def __init__(self, library: NativeLibrary, limits: SuffixLimits) -> None:
        self._call = suffix_functions(library).step
        self._calls = suffix_functions(library).steps
        self._limits = LimitsStruct(limits.factor, limits.offset, limits.min_prob)
        self._shape = BEST_FIRST if limits.best_first else CHAIN
        self._found = DraftStruct()

    def step(
        self, local: Tree, global_: Tree | None, output: int, token_ids_np: IntArray, row: DraftRow
    ) -> tuple[Sequence[int], Sequence[int] | None, int]:
        """Tokens and parents (None: a chain) of the draft, and the length of the match behind it."""
        assert isinstance(local, NativeSuffixTree) and not isinstance(global_, PythonSuffixTree)
        limits, found = self._limits, self._found
        limits.budget, limits.max_depth = row.budget, row.max_depth
        tree, dynamic = row.speculation.tree, row.speculation.dynamic
        if dynamic is not None:
            limits.shape = BEST_FIRST
        elif tree is None:
            limits.shape = self._shape
        else:
            limits.shape, limits.tree_size = SHAPED, len(tree)
            limits.parents, limits.ranks = _c_tree(tree, row.speculation.tree_ranks)
        size = self._call(
            local.handle,
            global_ and global_.handle,
            output,
            row.tokens_at or address(token_ids_np),
            len(token_ids_np),
            row.num_prompt,
            limits,
            found,
        )
        if not size:
            return (), None, 0
        parents = None if limits.shape == CHAIN else found.parents[:size]
        return found.tokens[:size], parents, found.match_len

    def steps(
        self, locals_: Sequence[Tree], global_: Tree | None, outputs: Sequence[int], rows: Sequence[DraftRow]
    ) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """`step` of R requests without trees of their own, one after the other: tokens and parents of each draft, and
        the length of the match behind it."""
        assert not isinstance(global_, PythonSuffixTree)
        count, chain_shape = len(rows), self._shape
        columns = array("q")
        columns.extend([local.handle for local in locals_])  # type: ignore[union-attr]
        columns.extend(outputs)
        columns.extend([row.tokens_at or address(row.token_ids_np) for row in rows])
        columns.extend([len(row.token_ids_np) for row in rows])
        columns.extend([row.num_prompt for row in rows])
        budgets = [row.budget for row in rows]
        columns.extend(budgets)
        columns.extend([row.max_depth for row in rows])
        shapes = [chain_shape if row.speculation.dynamic is None else BEST_FIRST for row in rows]
        columns.extend(shapes)
        width = min(max(budgets), MAX_TREE_NODES)
        found = array("i", bytes(4 * count * (2 + 2 * width)))
        self._calls(
            count,
            global_ and global_.handle,
            self._limits,
            columns.buffer_info()[0],
            width,
            found.buffer_info()[0],
        )
        answer = found.tolist()
        out = []
        at, behind = 2 * count, (2 + width) * count  # tokens, parents
        for r in range(count):
            size = answer[r]
            tokens = tuple(answer[at : at + size])
            parents = chain_parents(size)
            if shapes[r] != CHAIN:
                parents = tuple(answer[behind : behind + size])
            out.append((tokens, parents, answer[count + r]))
            at += width
            behind += width
        return out

    def columns(
        self, locals_: Sequence[Tree], global_: Tree | None, outputs: Sequence[int], columns: DraftColumns
    ) -> tuple[IntArray, list[int], list[int]]:
        """`steps` of requests in columns, which want chains: tokens [R, widest], how many of each were found, and the
        length of the match behind them."""
        assert not isinstance(global_, PythonSuffixTree)
        count = len(outputs)
        facts, budgets = columns.facts, columns.budgets
        width = max(budgets)
        given = array("q", [local.handle for local in locals_])  # type: ignore[union-attr]
        given.extend(
            [
                *outputs,
                *facts.tokens_at,
                *facts.known,
                *facts.num_prompt,
                *budgets,
                *facts.max_depths,
            ]
        )
        given.extend([CHAIN] * count)
        found: IntArray = np.zeros(count * (2 + 2 * width), np.int32)
        self._calls(
            count,
            global_ and global_.handle,
            self._limits,
            given.buffer_info()[0],
            width,
            found.__array_interface__["data"][0],
        )
        tokens = found[2 * count : (2 + width) * count].reshape(count, width)
        return tokens, found[:count].tolist(), found[count : 2 * count].tolist()

    def rounds(
        self, method: int, locals_: Sequence[Tree], global_: Tree | None, outputs: Sequence[int]
    ) -> RoundSuffixes:
        """`columns` again and again, as drafts of a method with this number."""
        assert not isinstance(global_, PythonSuffixTree)
        trees = [local.handle for local in locals_]  # type: ignore[union-attr]
        return RoundSuffixes(
            method, trees, None if global_ is None else global_.handle, outputs, self._limits
        )

    def draft(
        self, local: Tree, global_: Tree | None, context_np: IntArray, limits: SuffixLimits
    ) -> SuffixDraft:
        """The draft behind a context that is not the end of the request."""
        assert isinstance(local, NativeSuffixTree) and not isinstance(global_, PythonSuffixTree)
        return native_draft(local, global_, context_np, limits)


class PythonEngine:
    """The same without the native library."""

    def __init__(self, limits: SuffixLimits) -> None:
        self._limits = limits

    def step(
        self, local: Tree, global_: Tree | None, output: int, token_ids_np: IntArray, row: DraftRow
    ) -> tuple[Sequence[int], Sequence[int] | None, int]:
        assert isinstance(local, PythonSuffixTree) and not isinstance(global_, NativeSuffixTree)
        new = len(token_ids_np) - local.length(0)
        local.append(0, token_ids_np[local.length(0) :])
        if global_ is not None:
            if output >= 0:
                global_.append(output, token_ids_np[row.num_prompt + global_.length(output) :])
            global_.settle(16 + 4 * max(new, 0))
        tree, dynamic = row.speculation.tree, row.speculation.dynamic
        limits = replace(
            self._limits,
            budget=row.budget,
            max_depth=row.max_depth,
            best_first=self._limits.best_first or dynamic is not None,
            parents=tree,
            ranks=_ranks(tree, row.speculation.tree_ranks) if tree is not None else (),
        )
        context = token_ids_np[-local.depth :].tolist()
        found = suffix_python.draft(local, global_, context, limits)
        plain = tree is None and not limits.best_first
        return found.tokens, None if plain else found.parents, found.match_len

    def draft(
        self, local: Tree, global_: Tree | None, context_np: IntArray, limits: SuffixLimits
    ) -> SuffixDraft:
        assert isinstance(local, PythonSuffixTree) and not isinstance(global_, NativeSuffixTree)
        return suffix_python.draft(local, global_, context_np.tolist(), limits)


def _ranks(parents: tuple[int, ...], ranks: tuple[int, ...] | None) -> tuple[int, ...]:
    """Rank of each node among its siblings; by their order, where it is not given."""
    if ranks is not None:
        return ranks
    return tuple(parents[:i].count(parent) for i, parent in enumerate(parents))


@functools.lru_cache(maxsize=64)
def _c_tree(
    parents: tuple[int, ...], ranks: tuple[int, ...] | None
) -> tuple[ctypes.Array[ctypes.c_int32], ctypes.Array[ctypes.c_int32]]:
    return static_shape(parents, _ranks(parents, ranks))
