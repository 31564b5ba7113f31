"""The native index of n-grams (``kernels/cpu/csrc/ngram.cpp``): all requests of a call in one."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import numpy as np

from draftwise.kernels.cpu.library import NativeLibrary, release_with
from draftwise.propose.lookup.suffix_native import address
from draftwise.types import IntArray

_PTR, _I64 = ctypes.c_void_p, ctypes.c_int64


class NativeIndex:
    """The index of one request. Not safe for calls from two threads at a time."""

    __slots__ = ("__weakref__", "done", "handle")

    def __init__(self, functions: NativeNgrams) -> None:
        self.handle: int = functions.new(functions.longest, functions.shortest)
        release_with(self, functions.free, self.handle)
        self.done = 0  # n-grams that end before this token are in; rounds may have taken in more


class NativeNgrams:
    """Makes indexes, and looks up in many of them at once."""

    def __init__(self, library: NativeLibrary, longest: int, shortest: int) -> None:
        """Raises AttributeError if the library was built without it."""
        self.longest, self.shortest = longest, shortest
        self.new = library.function("dw_ngram_new", _PTR, [_I64, _I64])
        self.free = library.function("dw_ngram_free", None, [_PTR])
        self._step = library.function("dw_ngram_step", None, [_I64, _PTR, _I64, _PTR])

    def index(self) -> NativeIndex:
        """A new index, for a request that enters."""
        return NativeIndex(self)

    def step(
        self,
        indexes: Sequence[NativeIndex],
        tokens: Sequence[IntArray],
        known: Sequence[int],
        wanted: Sequence[int],
        tokens_at: Sequence[int],
    ) -> list[tuple[list[int], int]]:
        """The tokens that followed the longest suffix of each request's tokens, and the length of that suffix;
        nothing and 0 where
        none occurred before.

        Args:
            indexes: of R requests; they take in the n-grams of known tokens, all but the last one's.
            tokens: [n] int32 each.
            known: how many of the tokens are the request's; a grammar forces those behind them.
            wanted: how many to copy, 0 or more.
            tokens_at: where the tokens lie in memory; 0: look.
        """
        count, width = len(indexes), max(wanted)
        columns = array("q", [index.handle for index in indexes])
        columns.extend([at or address(own) for at, own in zip(tokens_at, tokens, strict=True)])
        columns.extend([*known, *map(len, tokens), *wanted])
        found = array("i", bytes(4 * count * (1 + width)))
        self._step(count, columns.buffer_info()[0], width, found.buffer_info()[0])
        answer = found.tolist()
        out: list[tuple[list[int], int]] = []
        at = count
        for index, end, length, size in zip(indexes, known, answer[:count], wanted, strict=True):
            index.done = end - 1
            out.append((answer[at : at + size] if length else [], length))
            at += width
        return out

    def columns(
        self,
        indexes: Sequence[NativeIndex],
        known: Sequence[int],
        wanted: Sequence[int],
        tokens_at: Sequence[int],
    ) -> tuple[IntArray, list[int], list[int]]:
        """`step` of requests whose known tokens lie somewhere: tokens [R, widest], how many of each were found, and the
        length of the match behind them."""
        count, width = len(indexes), max(wanted)
        columns = array("q", [index.handle for index in indexes])
        columns.extend([*tokens_at, *known, *known, *wanted])
        found: IntArray = np.zeros(count * (1 + width), np.int32)
        self._step(count, columns.buffer_info()[0], width, address(found))
        for index, end in zip(indexes, known, strict=True):
            index.done = end - 1
        matches = found[:count].tolist()
        sizes = [size if length else 0 for size, length in zip(wanted, matches, strict=True)]
        return found[count:].reshape(count, width), sizes, matches
