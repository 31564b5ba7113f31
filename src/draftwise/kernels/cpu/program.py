"""Record a decoder's pass once, replay it with one native call.

A model's forward is calls of `Ops` and nothing else. Run it with `Symbol`s instead of tensors and `NativeOps` writes
down what is to be done: a list of operations over numbered buffers. The number of rows is known only when a pass
runs, so one recording serves every batch. On the way, products are fused with what follows them: gate/up with SiLU, the
output projections with the residual addition.

Buffers are reused as soon as nobody holds their symbol any more; they lie in one arena, which grows with the largest
pass.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwise.kernels.base import HeadShape
from draftwise.kernels.cpu.attention import DTYPES, BatchView, address, fill_view
from draftwise.kernels.cpu.library import NativeLibrary
from draftwise.kernels.cpu.linear import Epilogue, NativeLinear
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.types import StepInput

_PTR, _I32, _I64, _F32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float

# dw::OpKind of csrc/program.h
_GATHER, _COPY, _RMS_NORM, _ADD_RMS_NORM, _SILU_MUL, _LINEAR, _ROPE_WRITE, _ATTENTION, _PICK = range(9)

_MIN_CAPACITY = 64
_ALIGNMENT = 64  # bytes; of each buffer's bytes per row, so that every buffer starts on a cache line


class RecordingError(Exception):
    """The forward does something with a symbol that cannot be recorded."""


class _Operation(ctypes.Structure):
    """``dw::ProgramOp``."""

    _fields_ = (
        ("kind", _I32),
        ("dtype", _I32),
        ("out_dtype", _I32),
        ("epilogue", _I32),
        ("x", _I32),
        ("y", _I32),
        ("out", _I32),
        ("num_heads", _I32),
        ("num_kv_heads", _I32),
        ("head_dim", _I32),
        ("window", _I32),
        ("scale", _F32),
        ("eps", _F32),
        ("reserved", _I32),
        ("width", _I64),
        ("out_width", _I64),
        ("weight", _PTR),
        ("weight2", _PTR),
        ("kv", _PTR),
    )


class _PassInput(ctypes.Structure):
    """``dw::PassInput``."""

    _fields_ = (
        ("rows", _I64),
        ("head_rows", _I64),
        ("head_index", _PTR),
        ("arena", _PTR),
        ("capacity", _I64),
        ("externals", _PTR),
        ("batch", BatchView),
    )


class _ChainOutput(ctypes.Structure):
    """``dw::ChainOutput``."""

    _fields_ = (("steps", _I64), ("vocab", _I64), ("tokens", _PTR), ("positions", _PTR))


class _Buffer:
    """A place for rows of ``width`` elements. When the last symbol of it is gone, its number may be given out again."""

    __slots__ = ("dtype", "gone", "number", "recording", "width")

    def __init__(self, recording: Recording, number: int, width: int, dtype: torch.dtype) -> None:
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
    """Stands for a tensor of a pass that is being recorded: [rows, width]."""

    __slots__ = ("_buffer", "program")

    def __init__(self, program: Recording, buffer: _Buffer) -> None:
        self.program = program
        self._buffer = buffer

    @property
    def buffer(self) -> _Buffer:
        if self._buffer.gone:
            raise RecordingError("a product that was fused with the operation after it is used again")
        return self._buffer


def _buffer_of(value: object) -> _Buffer:
    if not isinstance(value, Symbol):
        raise RecordingError(f"a symbol was expected, not {type(value).__name__}")
    return value.buffer


def _tensor(symbol: Symbol) -> Tensor:
    """Symbols go where the model's code says Tensor."""
    return cast(Tensor, symbol)


class Recording:
    """A program in the making; `NativeOps` appends to it what it would have done."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._code = DTYPES[dtype]
        self._row_bytes: list[int] = []  # of each buffer, 0 for the pass's inputs
        self._free: dict[int, list[int]] = {}  # bytes per row -> buffers nobody uses
        self._kept: list[object] = []  # what operations point to
        self._body: list[_Operation] = []
        self._head: list[_Operation] = []
        self._target = self._body
        self.token_ids = _tensor(self._input())
        self.positions = _tensor(self._input())
        self.slots = _tensor(self._input())

    # ------------------------------------------------------------------------------------------- buffers

    def _input(self) -> Symbol:
        self._row_bytes.append(0)
        return Symbol(self, _Buffer(self, len(self._row_bytes) - 1, 1, torch.int64))

    def _new(self, width: int, dtype: torch.dtype) -> Symbol:
        size = -(-width * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        free = self._free.setdefault(size, [])
        if free:
            number = free.pop()
        else:
            number = len(self._row_bytes)
            self._row_bytes.append(size)
        return Symbol(self, _Buffer(self, number, width, dtype))

    def release(self, buffer: _Buffer) -> None:
        size = self._row_bytes[buffer.number]
        if size:
            self._free.setdefault(size, []).append(buffer.number)

    def _append(self, kind: int, **fields: object) -> None:
        operation = _Operation(kind=kind, dtype=self._code, out_dtype=self._code)
        for name, value in fields.items():
            setattr(operation, name, value)
        self._target.append(operation)

    def _pointer(self, value: Tensor | None) -> int | None:
        if value is None:
            return None
        self._kept.append(value)
        return value.data_ptr()

    def _product_of(self, buffer: _Buffer) -> _Operation | None:
        """The operation before, if it is a plain product into this buffer."""
        last = self._target[-1] if self._target else None
        if last is None or last.kind != _LINEAR or last.out != buffer.number:
            return None
        return last if last.epilogue == Epilogue.STORE and last.out_dtype == self._code else None

    # ---------------------------------------------------------------------------------------- operations

    def gather(self, index: object, table: Tensor) -> Tensor:
        """Rows ``index`` of ``table`` [N, ...]."""
        assert table.is_contiguous()
        width = table.stride(0)
        out = self._new(width, table.dtype)
        self._append(
            _GATHER,
            x=_buffer_of(index).number,
            out=out.buffer.number,
            width=width * table.element_size(),
            weight=self._pointer(table),
        )
        return _tensor(out)

    def copy(self, x: object) -> Tensor:
        source = _buffer_of(x)
        out = self._new(source.width, source.dtype)
        size = source.width * source.dtype.itemsize
        self._append(_COPY, x=source.number, out=out.buffer.number, width=size)
        return _tensor(out)

    def pick(self, x: object) -> Tensor:
        """The rows of x that logits are wanted for; what follows is recorded for these alone."""
        source = _buffer_of(x)
        self._target = self._head
        self._free.clear()  # a buffer of the body must not become the logits: they may not be there
        out = self._new(source.width, source.dtype)
        size = source.width * source.dtype.itemsize
        self._append(_PICK, x=source.number, out=out.buffer.number, width=size)
        return _tensor(out)

    def rms_norm(self, x: object, weight: Tensor, eps: float) -> Tensor:
        source = _buffer_of(x)
        out = self._new(source.width, self._dtype)
        self._append(
            _RMS_NORM,
            x=source.number,
            out=out.buffer.number,
            width=source.width,
            eps=eps,
            weight=self._pointer(weight),
        )
        return _tensor(out)

    def add_rms_norm(self, x: object, residual: object, weight: Tensor, eps: float) -> Tensor:
        source, target = _buffer_of(x), _buffer_of(residual)
        product = self._product_of(source)
        if product is not None:
            product.epilogue = Epilogue.ADD
            product.out = target.number
            source.gone = True
            return self.rms_norm(residual, weight, eps)
        out = self._new(source.width, self._dtype)
        self._append(
            _ADD_RMS_NORM,
            x=source.number,
            y=target.number,
            out=out.buffer.number,
            width=source.width,
            eps=eps,
            weight=self._pointer(weight),
        )
        return _tensor(out)

    def silu_mul(self, gate_up: object) -> Tensor:
        source = _buffer_of(gate_up)
        size = source.width // 2
        out = self._new(size, self._dtype)
        product = self._product_of(source)
        if product is not None and any(
            isinstance(kept, NativeLinear) and kept.paired and kept.pointer == product.weight
            for kept in self._kept[-1:]
        ):
            product.epilogue = Epilogue.SILU_MUL
            product.out = out.buffer.number
            product.out_width = size
            source.gone = True
        else:
            self._append(_SILU_MUL, x=source.number, out=out.buffer.number, width=size)
        return _tensor(out)

    def linear(self, x: object, weight: NativeLinear, dtype: torch.dtype | None = None) -> Tensor:
        source = _buffer_of(x)
        dtype = dtype or self._dtype
        out = self._new(weight.outputs, dtype)
        self._kept.append(weight)
        self._append(
            _LINEAR,
            x=source.number,
            out=out.buffer.number,
            out_dtype=DTYPES[dtype],
            width=source.width,
            out_width=weight.outputs,
            weight=weight.pointer,
        )
        return _tensor(out)

    def qkv_rope_write(
        self,
        qkv: object,
        heads: HeadShape,
        rotation: object,
        entries: Tensor,
        slots: object,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Queries are rotated where they stand: the result is the same buffer."""
        if slots is not self.slots:
            raise RecordingError("rows are written to the slots of the batch and to no others")
        packed = _buffer_of(qkv)
        assert packed.width == (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
        self._append(
            _ROPE_WRITE,
            x=packed.number,
            y=_buffer_of(rotation).number,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            eps=eps,
            weight=self._pointer(q_norm),
            weight2=self._pointer(k_norm),
            kv=self._pointer(entries),
        )
        return _tensor(Symbol(self, packed))

    def attention(
        self, q: object, entries: Tensor, heads: HeadShape, scale: float, window: int | None
    ) -> Tensor:
        packed = _buffer_of(q)
        out = self._new(heads.num_heads * heads.head_dim, self._dtype)
        self._append(
            _ATTENTION,
            x=packed.number,
            out=out.buffer.number,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            window=window or 0,
            scale=scale,
            width=packed.width,
            kv=self._pointer(entries),
        )
        return _tensor(out)

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
        results = [_buffer_of(hidden), *(_buffer_of(x) for x in captured.values()), _buffer_of(logits)]
        external = [0, 1, 2, *(buffer.number for buffer in results)]
        if len(set(external)) != len(external):
            raise RecordingError("two results of a pass are one buffer")
        order = external + [i for i in range(len(self._row_bytes)) if i not in set(external)]
        place = {number: i for i, number in enumerate(order)}
        for operation in (*self._body, *self._head):
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
            body=self._body,
            head=self._head,
            offsets=offsets,
            row_bytes=total,
            hidden=(results[0].width, results[0].dtype),
            captured={i: (_buffer_of(x).width, _buffer_of(x).dtype) for i, x in captured.items()},
            logits=(results[-1].width, results[-1].dtype),
            kept=self._kept,
        )


@dataclass(frozen=True, slots=True)
class PassOutput:
    """What a pass gives; fresh tensors. ``logits``: of the rows that were asked for, None if none were."""

    hidden: Tensor  # [T, H]
    captured: dict[int, Tensor]  # layer -> [T, H]
    logits: Tensor | None  # [M, V] float32


class Program:
    """A recorded pass. Made by `Recording.finish`; runs on one thread at a time."""

    def __init__(
        self,
        library: NativeLibrary,
        pool: ThreadPool,
        *,
        body: Sequence[_Operation],
        head: Sequence[_Operation],
        offsets: Sequence[int],
        row_bytes: int,
        hidden: tuple[int, torch.dtype],
        captured: Mapping[int, tuple[int, torch.dtype]],
        logits: tuple[int, torch.dtype],
        kept: list[object],
    ) -> None:
        create = library.function("dw_program_create", _PTR, [_PTR, _I64, _PTR, _I64, _PTR, _I64, _I32])
        destroy = library.function("dw_program_destroy", None, [_PTR])
        self._call = library.function("dw_program_run", None, [_PTR, _PTR, ctypes.POINTER(_PassInput)])
        self._chains = library.function(
            "dw_program_chains",
            None,
            [_PTR, _PTR, ctypes.POINTER(_PassInput), ctypes.POINTER(_ChainOutput)],
        )
        self.num_operations = len(body) + len(head)
        self._pool = pool
        self._kept = kept
        self._row_bytes = row_bytes
        self._hidden, self._captured, self._logits = hidden, dict(captured), logits
        self._externals = (_PTR * (5 + len(captured)))()
        places = np.array(offsets, np.int64)
        self._pointer: int = create(
            (_Operation * len(body))(*body),
            len(body),
            (_Operation * len(head))(*head),
            len(head),
            address(places),
            len(places),
            len(self._externals),
        )
        self._finalizer = weakref.finalize(self, destroy, self._pointer)
        self._input = _PassInput()
        self._input.externals = ctypes.addressof(self._externals)
        self._arena = torch.empty(0, dtype=torch.uint8)

    def run(self, batch: StepInput, head_rows: npt.NDArray[np.int64] | int = 0) -> PassOutput:
        """One pass.

        Args:
            batch: T rows.
            head_rows: rows that logits are wanted for, int64 [M]; or the number of them if they are the first ones.
        """
        hidden, captured, logits, kept = self._prepare(batch, head_rows)
        self._call(self._pointer, self._pool.pointer, self._input)
        del kept
        return PassOutput(hidden, captured, logits)

    def chains(
        self, batch: StepInput, head_rows: npt.NDArray[np.int64] | int, steps: int
    ) -> npt.NDArray[np.int64]:
        """Continue each request greedily: a pass over ``batch``, then passes of one row each, in one native call.

        Args:
            batch: R requests without trees; block tables must reach ``steps - 1`` tokens further.
            head_rows: the last row of each request, as in `run`.
            steps: tokens per request.

        Returns:
            int64 [R, steps]: the most likely tokens, the lowest of those that tie.
        """
        tables = batch.attention
        assert tables.ancestors_np is None
        tokens = np.empty((len(tables.context_len_np), steps), np.int64)
        positions = (tables.context_len_np + np.diff(tables.query_start_np)).astype(np.int64)
        *outputs, kept = self._prepare(batch, head_rows)
        out = _ChainOutput(steps, self._logits[0], address(tokens), address(positions))
        self._chains(self._pointer, self._pool.pointer, self._input, out)
        del kept, outputs
        return tokens

    def _prepare(
        self, batch: StepInput, head_rows: npt.NDArray[np.int64] | int
    ) -> tuple[Tensor, dict[int, Tensor], Tensor | None, object]:
        """Fill in the input of a pass: its results, and what must be kept until it has run."""
        rows = batch.token_ids.shape[0]
        call, externals = self._input, self._externals
        if rows > call.capacity:
            self._grow(rows)
        token_ids, positions, slots = batch.token_ids, batch.positions, batch.slots
        assert token_ids.is_contiguous() and positions.is_contiguous() and slots.is_contiguous()
        width, dtype = self._hidden
        hidden = torch.empty((rows, width), dtype=dtype)
        externals[0] = token_ids.data_ptr()
        externals[1] = positions.data_ptr()
        externals[2] = slots.data_ptr()
        externals[3] = hidden.data_ptr()
        captured: dict[int, Tensor] = {}
        for i, (layer, (width, dtype)) in enumerate(self._captured.items()):
            captured[layer] = value = torch.empty((rows, width), dtype=dtype)
            externals[4 + i] = value.data_ptr()
        index: npt.NDArray[np.int64] | None = None
        if isinstance(head_rows, int):
            count = head_rows
        else:
            index, count = head_rows, len(head_rows)
        logits = None
        if count:
            if count > call.capacity:
                self._grow(count)
            width, dtype = self._logits
            logits = torch.empty((count, width), dtype=dtype)
            externals[4 + len(captured)] = logits.data_ptr()
        call.rows = rows
        call.head_rows = count
        call.head_index = None if index is None else address(index)
        kept = fill_view(call.batch, batch.attention)
        return hidden, captured, logits, (kept, index)

    def _grow(self, rows: int) -> None:
        capacity = _MIN_CAPACITY
        while capacity < rows:
            capacity *= 2
        self._arena = torch.empty(self._row_bytes * capacity + _ALIGNMENT, dtype=torch.uint8)
        start = self._arena.data_ptr()
        self._input.arena = -(-start // _ALIGNMENT) * _ALIGNMENT
        self._input.capacity = capacity
