"""The native suffix tree (``kernels/cpu/csrc/suffix.h``) as a Python object. Same methods as `PythonSuffixTree`."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import numpy as np

from draftwise.kernels.cpu.checks import require
from draftwise.kernels.cpu.library import NativeLibrary, release_with
from draftwise.names import MAX_TREE_NODES
from draftwise.propose.lookup.suffix_python import SuffixDraft, SuffixLimits
from draftwise.types import IntArray

_PTR, _I32, _I64, _U32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32
_NODES = _I32 * MAX_TREE_NODES
CHAIN, BEST_FIRST, SHAPED = 0, 1, 2


class LimitsStruct(ctypes.Structure):
    """``dw::SuffixLimits``."""

    _fields_ = (
        ("factor", ctypes.c_double),
        ("offset", ctypes.c_double),
        ("min_prob", ctypes.c_double),
        ("budget", _I32),
        ("max_depth", _I32),
        ("shape", _I32),
        ("tree_size", _I32),
        ("parents", ctypes.POINTER(_I32)),
        ("ranks", ctypes.POINTER(_I32)),
    )


class DraftStruct(ctypes.Structure):
    """``dw::SuffixDraft``."""

    _fields_ = (
        ("score", ctypes.c_double),
        ("match_len", _I32),
        ("source", _I32),
        ("size", _I32),
        ("tokens", _NODES),
        ("parents", _NODES),
    )


def static_shape(
    parents: Sequence[int], ranks: Sequence[int]
) -> tuple[ctypes.Array[ctypes.c_int32], ctypes.Array[ctypes.c_int32]]:
    """A given tree as C arrays [nodes]; they must outlive the structure that points to them."""
    return (_I32 * len(parents))(*parents), (_I32 * len(ranks))(*ranks)


class _Functions:
    """The library's functions, with their types."""

    def __init__(self, library: NativeLibrary) -> None:
        def declare(name: str, result: type | None, *arguments: type) -> ctypes._NamedFuncPointer:
            return library.function(f"dw_suffix_{name}", result, arguments)

        self.new = declare("new", _PTR, _U32)
        self.free = declare("free", None, _PTR)
        self.begin = declare("begin", _U32, _PTR)
        self.append = declare("append", None, _PTR, _U32, _PTR, _I64)
        self.close = declare("close", None, _PTR, _U32)
        self.remove = declare("remove", ctypes.c_int, _PTR, _U32)
        self.settle = declare("settle", _I64, _PTR, _I64)
        self.count = declare("count", _I64, _PTR, _PTR, _I64)
        self.length = declare("length", _I64, _PTR, _U32)
        self.agree = declare("agree", _I64, _PTR, _U32, _PTR, _I64)
        self.num_tokens = declare("num_tokens", _I64, _PTR)
        self.num_nodes = declare("num_nodes", _I64, _PTR)
        self.bytes = declare("bytes", _I64, _PTR)
        self.check = declare("check", ctypes.c_int, _PTR)
        pointers = (ctypes.POINTER(LimitsStruct), ctypes.POINTER(DraftStruct))
        self.draft = declare("draft", _I32, _PTR, _I64, _PTR, _I64, _PTR, _I64, *pointers)
        self.step = declare("step", _I32, _PTR, _PTR, _I64, _PTR, _I64, _I64, *pointers)
        self.steps = declare("steps", None, _I64, _PTR, pointers[0], _PTR, _I64, _PTR)


@functools.lru_cache(maxsize=4)
def suffix_functions(library: NativeLibrary) -> _Functions:
    """Declared once per library."""
    return _Functions(library)


def address(token_ids_np: IntArray) -> int:
    """Where the tokens (int32 [n], contiguous) lie. The caller keeps them alive."""
    require(token_ids_np.dtype == np.int32 and token_ids_np.flags.c_contiguous, "tokens in int32")
    data: int = token_ids_np.__array_interface__["data"][0]
    return data


class NativeSuffixTree:
    """See `PythonSuffixTree` for what the methods mean. Not safe for calls from two threads at a time."""

    def __init__(self, library: NativeLibrary, depth: int) -> None:
        self.depth = depth
        self._functions = suffix_functions(library)
        self.handle: int = self._functions.new(depth)
        release_with(self, self._functions.free, self.handle)

    def begin(self) -> int:
        seq: int = self._functions.begin(self.handle)
        return seq

    def append(self, seq: int, token_ids_np: IntArray) -> None:
        self._functions.append(self.handle, seq, address(token_ids_np), len(token_ids_np))

    def close(self, seq: int) -> None:
        self._functions.close(self.handle, seq)

    def remove(self, seq: int) -> None:
        if not self._functions.remove(self.handle, seq):
            raise ValueError(f"sequence {seq} is not the oldest one")

    def settle(self, most: int) -> int:
        left: int = self._functions.settle(self.handle, most)
        return left

    @property
    def num_tokens(self) -> int:
        tokens: int = self._functions.num_tokens(self.handle)
        return tokens

    @property
    def num_nodes(self) -> int:
        nodes: int = self._functions.num_nodes(self.handle)
        return nodes

    @property
    def num_bytes(self) -> int:
        """Memory that the tree holds."""
        held: int = self._functions.bytes(self.handle)
        return held

    def length(self, seq: int) -> int:
        tokens: int = self._functions.length(self.handle, seq)
        return tokens

    def agree(self, seq: int, token_ids_np: IntArray) -> int:
        equal: int = self._functions.agree(self.handle, seq, address(token_ids_np), len(token_ids_np))
        return equal

    def count(self, tokens: Sequence[int]) -> int:
        require(1 <= len(tokens) <= self.depth, "as many tokens as the tree is deep")
        found: int = self._functions.count(self.handle, (_I32 * len(tokens))(*tokens), len(tokens))
        return found

    def check(self) -> None:
        """Raise AssertionError, with the line of the broken rule in suffix.cpp, if the tree is not sound. Slow."""
        line = self._functions.check(self.handle)
        assert line == 0, f"suffix.cpp:{line}"


def native_limits(limits: SuffixLimits) -> tuple[LimitsStruct, object]:
    """The structure, and what it points to (which must be kept as long)."""
    out = LimitsStruct(limits.factor, limits.offset, limits.min_prob, limits.budget, limits.max_depth)
    out.shape = BEST_FIRST if limits.best_first else CHAIN
    if limits.parents is None:
        return out, None
    kept = static_shape(limits.parents, limits.ranks)
    out.shape, out.tree_size = SHAPED, len(limits.parents)
    out.parents, out.ranks = kept
    return out, kept


def native_draft(
    local: NativeSuffixTree | None,
    global_: NativeSuffixTree | None,
    context_np: IntArray,  # [n]
    limits: SuffixLimits,
    *,
    local_seq: int = -1,
    global_seq: int = -1,
) -> SuffixDraft:
    """As `suffix_python.draft`. ``local_seq``, ``global_seq``: sequences whose tokens end the context (-1: none),
    which saves the search."""
    tree = local or global_
    assert tree is not None
    found = DraftStruct()
    structure, _kept = native_limits(limits)
    size = tree._functions.draft(
        local and local.handle, local_seq, global_ and global_.handle, global_seq,
        address(context_np), len(context_np), structure, found,
    )  # fmt: skip
    return SuffixDraft(
        tuple(found.tokens[:size]), tuple(found.parents[:size]), found.score, found.match_len, found.source
    )
