"""The parts of a recording: numbered buffers, symbols for tensors, and the list of operations.

Buffers are reused as soon as nobody holds their symbol any more; they lie in one arena, which grows with the largest
pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from draftwise.kernels.cpu.attention import DTYPES
from draftwise.kernels.cpu.library import NativeLibrary
from draftwise.kernels.cpu.linear import Epilogue
from draftwise.kernels.cpu.narrowing import with_narrowing
from draftwise.kernels.cpu.pass_records import Operation
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.cpu.program import ALIGNMENT, Program

LINEAR, ADAPT = 5, 22
"""dw::OpKind of the operation that others are fused with, and of that which adds to its result."""


class RecordingError(Exception):
    """The forward does something with a symbol that cannot be recorded."""


class Buffer:
    """A place for rows of ``width`` elements. When the last symbol of it is gone, its number may be given out again."""

    __slots__ = ("dtype", "gone", "number", "recording", "width")

    def __init__(self, recording: Tape, number: int, width: int, dtype: torch.dtype) -> None:
        self.recording = weakref.ref(recording)
        self.number = number
        self.width = width
        self.dtype = dtype
        self.gone = False  # fused away: nothing writes it any more

    def __del__(self) -> None:
        recording = self.recording()
        if recording is not None:
            recording.release(self)


class Symbol:
    """Stands for a tensor of a pass that is being recorded: [rows, width]. It does not keep the recording alive, which
    keeps symbols, and the weights of all its operations."""

    __slots__ = ("_buffer",)

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    @property
    def program(self) -> Tape:
        recording = self._buffer.recording()
        if recording is None:
            raise RecordingError("a symbol is used after its recording has ended")
        return recording

    @property
    def buffer(self) -> Buffer:
        if self._buffer.gone:
            raise RecordingError("a product that was fused with the operation after it is used again")
        return self._buffer


def buffer_of(value: object) -> Buffer:
    if not isinstance(value, Symbol):
        raise RecordingError(f"a symbol was expected, not {type(value).__name__}")
    return value.buffer


def as_tensor(symbol: Symbol) -> Tensor:
    """Symbols go where the model's code says Tensor."""
    return cast(Tensor, symbol)


class Tape:
    """A program in the making, without the operations that can be put on it (`recording.Recording`).

    ``feature_size``: the pass also gets rows of so many numbers, in the model's dtype: ``features``.
    """

    def __init__(self, dtype: torch.dtype, feature_size: int | None = None) -> None:
        self._dtype = dtype
        self._code = DTYPES[dtype]
        self._row_bytes: list[int] = []  # of each buffer in whole cache lines, 0 for the pass's inputs
        self._exact: list[int] = []  # as they are; a number is given out again for rows as wide
        self._free: dict[int, list[int]] = {}  # bytes per row -> unused buffers
        self._kept: list[object] = []  # what operations point to
        self._paired: set[int] = set()  # addresses of weights of products gate | up
        self._body: list[Operation] = []
        self._head: list[Operation] = []
        self._target = self._body
        self.token_ids = as_tensor(self._input())
        self.positions = as_tensor(self._input())
        self.slots = as_tensor(self._input())
        self._inputs = 3
        self.features: Tensor | None = None
        if feature_size is not None:
            self.features = as_tensor(self._input(feature_size, dtype))
            self._inputs += 1

    # ------------------------------------------------------------------------------------------- buffers

    def _input(self, width: int = 1, dtype: torch.dtype = torch.int64) -> Symbol:
        self._row_bytes.append(0)
        self._exact.append(width * dtype.itemsize)
        return Symbol(Buffer(self, len(self._row_bytes) - 1, width, dtype))

    def _new(self, width: int, dtype: torch.dtype) -> Symbol:
        # By exact size: results are tensors of their own width, which a wider predecessor in one buffer would overrun.
        exact = width * dtype.itemsize
        size = -(-exact // ALIGNMENT) * ALIGNMENT
        free = self._free.setdefault(exact, [])
        if free:
            number = free.pop()
        else:
            number = len(self._row_bytes)
            self._row_bytes.append(size)
            self._exact.append(exact)
        return Symbol(Buffer(self, number, width, dtype))

    def release(self, buffer: Buffer) -> None:
        if self._row_bytes[buffer.number]:
            self._free.setdefault(buffer.width * buffer.dtype.itemsize, []).append(buffer.number)

    def _append(self, kind: int, **fields: object) -> None:
        operation = Operation(kind=kind, dtype=self._code, out_dtype=self._code)
        for name, value in fields.items():
            setattr(operation, name, value)
        self._target.append(operation)

    def _pointer(self, value: Tensor | None) -> int | None:
        if value is None:
            return None
        self._kept.append(value)
        return value.data_ptr()

    def _product_of(self, buffer: Buffer) -> Operation | None:
        """The operation before, if it is a plain product into this buffer."""
        last = self._target[-1] if self._target else None
        if last is None or last.kind != LINEAR or last.out != buffer.number:
            return None
        return last if last.epilogue == Epilogue.STORE and last.out_dtype == self._code else None

    def _adapted_product(self, buffer: Buffer) -> Operation | None:
        """The operation before the last, if it is a product into this buffer and the last one added to it."""
        if len(self._target) < 2 or self._target[-1].kind != ADAPT or self._target[-1].out != buffer.number:
            return None
        product = self._target[-2]
        return product if product.kind == LINEAR and product.out == buffer.number else None

    def _add_product(self, source: Buffer, target: Buffer) -> bool:
        """Let the product that made ``source``, just recorded, add to ``target`` instead."""
        product = self._product_of(source)
        if product is None or product.x == target.number or source is target:
            return False
        product.epilogue = Epilogue.ADD
        product.out = target.number
        source.gone = True
        return True

    def _changed(self, value: object) -> Buffer:
        """The buffer of a symbol that is about to be changed in place: not one that the caller of a pass gave."""
        buffer = buffer_of(value)
        if self._row_bytes[buffer.number] == 0:
            raise RecordingError("an input of the pass would be changed; a copy can be")
        return buffer

    # -------------------------------------------------------------------------------------------- the end

    def finish(
        self,
        library: NativeLibrary,
        pool: ThreadPool,
        hidden: Tensor,
        captured: Mapping[int, Tensor],
        logits: Tensor,
    ) -> Program:
        """The program, with these symbols as its results."""
        results = [buffer_of(hidden), *(buffer_of(x) for x in captured.values()), buffer_of(logits)]
        external = [*range(self._inputs), *(buffer.number for buffer in results)]
        if len(set(external)) != len(external):
            raise RecordingError("two results of a pass are one buffer")
        body = with_narrowing(self._body, self._exact, self._inputs, external[self._inputs : -1])
        order = external + [i for i in range(len(self._row_bytes)) if i not in set(external)]
        place = {number: i for i, number in enumerate(order)}
        for operation in (*body, *self._head):
            operation.x = place[operation.x]
            operation.y = place[operation.y]
            operation.out = place[operation.out]
        offsets, total = [], 0
        for number in order[len(external) :]:
            offsets.append(total)
            total += self._row_bytes[number]
        return Program(
            library,
            pool,
            body=body,
            head=self._head,
            offsets=offsets,
            row_bytes=total,
            features=None if self.features is None else buffer_of(self.features).width,
            hidden=(results[0].width, results[0].dtype),
            captured={i: (buffer_of(x).width, buffer_of(x).dtype) for i, x in captured.items()},
            logits=(results[-1].width, results[-1].dtype),
            kept=self._kept,
        )
