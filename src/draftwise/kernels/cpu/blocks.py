"""Drafts of a block drafter in one native call: the structures of ``csrc/block.h`` and ``csrc/corrections.h``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwise.kernels.cpu.attention import DTYPES, address
from draftwise.kernels.cpu.chains import ChainOutput, fill_draws, target_ids_at
from draftwise.kernels.cpu.checks import require
from draftwise.kernels.cpu.library import NativeLibrary
from draftwise.kernels.cpu.linear import NativeLinear
from draftwise.kernels.cpu.pass_records import PassInput
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.cpu.program import Program
from draftwise.kernels.cpu.trees import NativeTrees, TreeOutput
from draftwise.kernels.handles import Linear
from draftwise.types import ChainDraws, DraftedTree, StepInput, TreeDraws

_PTR, _I32, _I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64

KINDS: Final = ("vanilla", "gated", "rnn", "domino", "selector")
"""``dw::CorrectionKind``."""
_PASS_NUMBERS = 1 << 24
"""Logits of a pass, at most, where one request alone has not more: 64 MB. More requests are drafted for in turns."""


class CorrectionStruct(ctypes.Structure):
    """``dw::Correction``."""

    _fields_ = (
        ("kind", _I32),
        ("number", _I32),
        ("width", _I64),
        ("table_rows", _I64),
        ("state_width", _I64),
        ("table", _PTR),
        ("table2", _PTR),
        ("join", _PTR),
        ("state_join", _PTR),
        ("inner", _PTR),
        ("out", _PTR),
        ("bias", _PTR),
    )


class BlockPlan(ctypes.Structure):
    """``dw::BlockPlan``."""

    _fields_ = (
        ("rows", _I64),
        ("places", _I64),
        ("first_row", _I64),
        ("mask_token", _I64),
        ("vocab", _I64),
        ("hidden", _I64),
        ("together", _I64),
        ("scratch_first", _I64),
        ("scratch_each", _I64),
        ("dtype", _I64),
        ("correction", ctypes.POINTER(CorrectionStruct)),
    )


@dataclass(frozen=True, slots=True)
class CorrectionParts:
    """The parts of a correction of a block's logits; ``csrc/corrections.h`` says what each kind needs.

    ``kind``: one of `KINDS`. ``number``: Domino's first draft that is corrected, or a path selector's candidates.
    ``state_width``: of what is carried from place to place, 0: nothing. Tables are of the model's type, biases float32.
    """

    kind: str
    table: Tensor  # [V, width]
    table2: Tensor | None = None
    join: Linear | None = None
    state_join: Linear | None = None
    inner: Linear | None = None
    out: Linear | None = None
    bias: Tensor | None = None
    number: int = 0
    state_width: int = 0

    def native(self, dtype: torch.dtype, vocab_size: int) -> CorrectionStruct | None:
        """For the native library, which keeps nothing of it alive; None: it cannot compute with these parts, such as a
        table of which each rank has some of the target's ``vocab_size`` rows."""
        layers = self.join, self.state_join, self.inner, self.out
        tables = self.table, self.table2
        if self.table.shape[0] < vocab_size:
            return None
        if any(layer is not None and not isinstance(layer, NativeLinear) for layer in layers):
            return None
        if any(
            table is not None and (table.dtype is not dtype or not table.is_contiguous()) for table in tables
        ):
            return None
        require(
            self.table2 is None or self.table2.shape == self.table.shape,
            "tables of one size, a row for each token",
        )
        require(
            self.bias is None or (self.bias.dtype is torch.float32 and self.bias.is_contiguous()),
            "a float32 bias",
        )
        pointers = [layer.pointer if isinstance(layer, NativeLinear) else None for layer in layers]
        return CorrectionStruct(
            KINDS.index(self.kind),
            self.number,
            self.table.shape[1],
            self.table.shape[0],
            self.state_width,
            self.table.data_ptr(),
            None if self.table2 is None else self.table2.data_ptr(),
            *pointers,
            None if self.bias is None else self.bias.data_ptr(),
        )


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The parts of a block, and where its rows are stored.

    ``places``: drafts; ``first_row``: which row says the first one, 0 or 1. Rows stand behind a request's known tokens,
    in its last block and then in scratch ones: request i of a pass, which has ``together`` at most, has
    ``scratch_each`` blocks from ``scratch_first + i * scratch_each`` on.
    """

    places: int
    first_row: int
    mask_token: int
    scratch_first: int
    scratch_each: int
    together: int

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.places + self.first_row


class NativeBlocks:
    """Drafts blocks with two recorded passes: ``store`` puts features of tokens into the cache, ``block`` reads root
    and masks. Runs on one thread at a time."""

    def __init__(
        self,
        library: NativeLibrary,
        pool: ThreadPool,
        store: Program,
        block: Program,
        layout: BlockLayout,
        correction: CorrectionStruct | None,
        target_ids_np: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """
        Args:
            correction: of the logits; what it points to lives at least as long.
            target_ids_np: int64 [Vd], contiguous: the token that each drawn id stands for; None: itself.
        """
        calls: list[type] = [_PTR, _PTR, _PTR, *map(ctypes.POINTER, (PassInput, PassInput, BlockPlan))]
        self._chains = library.function("dw_block_chains", None, [*calls, ctypes.POINTER(ChainOutput)])
        self._trees = library.function("dw_block_trees", None, [*calls, ctypes.POINTER(TreeOutput)])
        self._pool, self._store, self._block = pool, store, block
        (hidden, dtype), vocab = block.widths
        together = max(1, min(layout.together, _PASS_NUMBERS // (layout.places * vocab)))
        self._correction, self.target_ids_np, self.vocab_size = correction, target_ids_np, vocab
        self._room = together * layout.rows, together * layout.places
        self._plan = BlockPlan(
            layout.rows,
            layout.places,
            layout.first_row,
            layout.mask_token,
            vocab,
            hidden,
            together,
            layout.scratch_first,
            layout.scratch_each,
            DTYPES[dtype],
            None if correction is None else ctypes.pointer(correction),
        )

    def chains(
        self, batch: StepInput, features: Tensor, steps: int, draws: ChainDraws | None = None
    ) -> tuple[npt.NDArray[np.int64], Tensor | None]:
        """Store features, and draft a chain behind each request.

        Args:
            batch: R requests without trees: rows up to the last known token of each, whose slots hold them; positions
                are one less than keys.
            features: [T, F] of the token before each row's.
            steps: tokens per request, at most the places of a block.
            draws: how tokens are drawn; None: the most likely, the lowest of those that tie.

        Returns:
            As `Program.chains`.
        """
        given, kept = self._given(batch, features)
        count = len(batch.attention.context_len_np)
        tokens = np.empty((count, steps), np.int64)
        out = ChainOutput(steps, self._plan.vocab, address(tokens))
        out.target_ids = target_ids_at(self.target_ids_np, self._plan.vocab)
        q = fill_draws(out, draws, count)
        own = self._block.room_for(*self._room)
        self._chains(
            self._store.pointer, self._block.pointer, self._pool.pointer, given, own, self._plan, out
        )
        del kept
        return tokens, q

    def trees(self, batch: StepInput, features: Tensor, draws: Sequence[TreeDraws]) -> Sequence[DraftedTree]:
        """Store features, and draft a tree below each request. ``batch``, ``features``: as in `chains`; ``draws``: one
        per request, no deeper than a block has places."""
        given, kept = self._given(batch, features)
        tables = batch.attention
        contexts = tables.context_len_np + np.diff(tables.query_start_np)
        trees = NativeTrees.make(draws, contexts, self._plan.vocab)
        require(len(draws) == len(contexts), "a tree per request")
        trees.output.target_ids = target_ids_at(self.target_ids_np, self._plan.vocab)
        own = self._block.room_for(*self._room)
        self._trees(
            self._store.pointer, self._block.pointer, self._pool.pointer, given, own, self._plan, trees.output
        )
        del kept
        return trees.result()

    def own_pass(self) -> tuple[int, PassInput, BlockPlan]:
        """What native code is told of the pass over root and masks."""
        return self._block.pointer, self._block.room_for(*self._room), self._plan

    def _given(self, batch: StepInput, features: Tensor) -> tuple[PassInput, object]:
        tables = batch.attention
        require(tables.ancestors_np is None, "requests without trees")
        return self._store.given(batch, features)
