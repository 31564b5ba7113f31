"""What native code is told of requests whose books it reads to draft for them (``csrc/book_drafts.h``)."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from draftwise.kernels.cpu.checks import refuse, require
from draftwise.names import DRAFT, MAX_TREE_NODES, SHARED, method_number

_PTR, _I64 = ctypes.c_void_p, ctypes.c_int64

ANY_LENGTH = 1 << 30
"""Most tokens that a drafter can draft in a row which does not know a limit."""
DRAFTED, NOT_SO, NO_ROOM = range(3)
"""``dw::BookAnswer``."""
Kind = Literal["argmax", "coupled", "sampled"]
STREAM_OF: dict[Kind, int] = {"argmax": -1, "coupled": SHARED, "sampled": DRAFT}
"""The noise that draws of each kind read; -1: none."""


class BookRecord(ctypes.Structure):
    """``dw::BookDrafts``."""

    _fields_ = (
        ("requests", _I64),
        ("books", _PTR),
        ("budgets", _PTR),
        ("block_size", _I64),
        ("max_len", _I64),
        ("most", _I64),
        ("most_rows", _I64),
        ("room", _I64),
        ("head_room", _I64),
        ("vocab", _I64),
        ("method", _I64),
        ("shares", _I64),
        ("q", _PTR),
        ("feature_rows", _I64),
        ("counts", _PTR),
        ("seen", _PTR),
        ("last", _PTR),
        ("gaps", _PTR),
        ("first_keys", _PTR),
        ("tree", _PTR),
        ("nodes", _I64),
        ("top_k", _I64),
        ("depth", _I64),
        ("noise", _PTR),
        ("scratch", _I64),
        ("scratch_each", _I64),
        ("together", _I64),
        ("rows", _I64),
        ("head_rows", _I64),
    )


class BookFeatures(NamedTuple):
    """Features that a drafter reads of R requests, one request after the other, and what it has read of each.

    ``values`` [n, F]; ``counts`` [R]: features of each, of its tokens ``seen``, ``seen + 1``, ...; ``seen`` [R]: how
    many tokens' features were read before; ``last`` [R]: the row of its newest feature; ``gaps`` [R]: leading tokens
    that others may reuse, -1: all that are stored; ``first_keys`` [R]: keys before it are seen by nobody. All int32.
    Where drafts were made, ``seen`` and ``last`` are written.
    """

    values: Tensor
    counts: array[int]
    seen: array[int]
    last: array[int]
    gaps: array[int]
    first_keys: array[int]


class BookTree(NamedTuple):
    """The trees that R requests want.

    A static one: ``parents`` (-1: the root) and ``ranks`` among the parent's best tokens, of which each request gets
    what its budget and its depth leave. A dynamic one, ``parents`` empty: ``top_k`` and ``depth``, see `TreeDraws`.
    ``noise`` [R] float32: by what the shared noise is multiplied; None: there is none.
    """

    parents: tuple[int, ...] = ()
    ranks: tuple[int, ...] | None = None
    top_k: int = 0
    depth: int = 0
    noise: array[float] | None = None


class InBooks(NamedTuple):
    """Drafts that stand in the books of their requests. ``q`` [n, V] float32: what they were drawn from, to which the
    books point; None: point masses."""

    q: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Scratch:
    """Blocks behind those of the cache, for nodes that are read and not verified: request i of ``together`` has blocks
    ``first + i * each`` and on."""

    first: int
    each: int
    together: int


class BookDrafts:
    """Asks for the drafts of one drafter, call after call.

    Where requests stand in books (``csrc/steps.h``), one native call reads what of them the drafter has not read, runs
    its passes and writes down what it drafted: rows are packed by the call that computes them.
    """

    def __init__(
        self,
        name: str,
        *,
        block_size: int,
        max_len: int,
        vocab_size: int,
        scratch: Scratch,
        most_rows: int = ANY_LENGTH,
        most: int = ANY_LENGTH,
        shares: bool = False,
    ) -> None:
        """``name``: of the drafter's method; ``max_len``: no token at this position or later is fed; ``vocab_size``: of
        the target; ``most_rows``: of one pass; ``most``: drafts in a row; ``shares``: it reads and writes the target's
        storage."""
        self.record = BookRecord(
            block_size=block_size,
            max_len=max_len,
            most_rows=most_rows,
            vocab=vocab_size,
            method=method_number(name),
            shares=shares,
            scratch=scratch.first,
            scratch_each=scratch.each,
            together=scratch.together,
        )
        self._most = min(most, MAX_TREE_NODES)
        self._kept: object = None
        self.count = 0
        self.deepest = 0
        """No request gets more drafts, or a deeper tree."""
        self.kind: Kind = "argmax"
        self.features: BookFeatures | None = None
        self.tree: BookTree | None = None

    def ask(
        self,
        places: array[int],
        budgets: array[int],
        kind: Kind,
        features: BookFeatures | None = None,
        tree: BookTree | None = None,
    ) -> None:
        """Say who wants drafts.

        Args:
            places: [R] where the books of the requests lie, uint64.
            budgets: [R] drafts of each, at most, int32.
            kind: how they are drawn, all alike.
            features: of drafters that read some.
            tree: None: they want chains.
        """
        record, count = self.record, len(places)
        if not count or len(budgets) != count or places.itemsize != 8 or budgets.itemsize != 4:
            refuse("a place and a budget for each request")
        self.count, self.kind, self.features, self.tree = count, kind, features, tree
        self.deepest = min(max(budgets), self._most)
        record.requests, record.most, record.q = count, self.deepest, None
        record.books, record.budgets = places.buffer_info()[0], budgets.buffer_info()[0]
        self._kept = places, budgets
        if features is None:
            record.counts = None
        else:
            self._read(features)
        if tree is not None:
            self._grow(tree)

    def _read(self, features: BookFeatures) -> None:
        record = self.record
        columns: Sequence[array[int]] = features[1:]
        for column in columns:
            if len(column) != self.count or column.itemsize != 4:
                refuse("columns of int32 numbers")
        record.feature_rows = features.values.shape[0]
        record.counts, record.seen, record.last, record.gaps, record.first_keys = [
            column.buffer_info()[0] for column in columns
        ]

    def _grow(self, tree: BookTree) -> None:
        record = self.record
        record.tree, record.nodes = None, len(tree.parents)
        if tree.parents:
            record.tree = _numbers_of(tree.parents, tree.ranks).buffer_info()[0]
        record.top_k, record.depth, record.noise = tree.top_k, tree.depth, None
        if tree.noise is not None:
            require(len(tree.noise) == self.count and tree.noise.itemsize == 4, "a number for each request")
            record.noise = tree.noise.buffer_info()[0]


@functools.cache
def _numbers_of(parents: tuple[int, ...], ranks: tuple[int, ...] | None) -> array[int]:
    """[2 * nodes] parents and ranks, which stay where they are; without ranks children stand best first."""
    if ranks is None:
        ranks = tuple(parents[:i].count(parent) for i, parent in enumerate(parents))
    return array("i", [*parents, *ranks])
