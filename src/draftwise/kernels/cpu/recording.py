"""Record a decoder's pass once, replay it with one native call.

A model's forward is calls of `Ops` and nothing else. Run it with `Symbol`s instead of tensors and `NativeOps` writes
down what is to be done: a list of operations over numbered buffers. The number of rows is known only when a pass
runs, so one recording serves every batch. On the way, products are fused with what follows them: gate/up with SiLU, the
output projections with the residual addition.

Buffers are reused as soon as nobody holds their symbol any more; they lie in one arena, which grows with the largest
pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from draftwise.kernels.base import FUNCTIONS, HeadShape
from draftwise.kernels.cpu.attention import DTYPES, KV_DTYPES, is_latent, kv_parts, sinks_of
from draftwise.kernels.cpu.checks import require
from draftwise.kernels.cpu.experts import ACTIVATIONS, NativeExperts
from draftwise.kernels.cpu.heads import NativeHeads
from draftwise.kernels.cpu.library import NativeLibrary
from draftwise.kernels.cpu.linear import Epilogue, NativeLinear
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.cpu.program import ALIGNMENT, Operation, Program
from draftwise.kernels.routing import Activation

# dw::OpKind of csrc/program.h
_GATHER, _COPY, _RMS_NORM, _ADD_RMS_NORM, _SILU_MUL, _LINEAR, _ROPE_WRITE, _ATTENTION, _PICK = range(9)
_CONCAT, _ADD, _CLEAR_FIRST, _EXPERTS, _GATED, _SCALE, _SOFTCAP, _LAYER_NORM, _UNARY, _MUL = range(9, 19)
_HEADS, _COLUMNS = 19, 20


class RecordingError(Exception):
    """The forward does something with a symbol that cannot be recorded."""


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
    """A program in the making; `NativeOps` appends to it what it would have done.

    ``feature_size``: the pass also gets rows of so many numbers, in the model's dtype: ``features``.
    """

    def __init__(self, dtype: torch.dtype, feature_size: int | None = None) -> None:
        self._dtype = dtype
        self._code = DTYPES[dtype]
        self._row_bytes: list[int] = []  # of each buffer, 0 for the pass's inputs
        self._free: dict[int, list[int]] = {}  # bytes per row -> buffers nobody uses
        self._kept: list[object] = []  # what operations point to
        self._body: list[Operation] = []
        self._head: list[Operation] = []
        self._target = self._body
        self.token_ids = _tensor(self._input())
        self.positions = _tensor(self._input())
        self.slots = _tensor(self._input())
        self._inputs = 3
        self.features: Tensor | None = None
        if feature_size is not None:
            self.features = _tensor(self._input(feature_size, dtype))
            self._inputs += 1

    # ------------------------------------------------------------------------------------------- buffers

    def _input(self, width: int = 1, dtype: torch.dtype = torch.int64) -> Symbol:
        self._row_bytes.append(0)
        return Symbol(self, _Buffer(self, len(self._row_bytes) - 1, width, dtype))

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
        return Symbol(self, _Buffer(self, number, width, dtype))

    def release(self, buffer: _Buffer) -> None:
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

    def _product_of(self, buffer: _Buffer) -> Operation | None:
        """The operation before, if it is a plain product into this buffer."""
        last = self._target[-1] if self._target else None
        if last is None or last.kind != _LINEAR or last.out != buffer.number:
            return None
        return last if last.epilogue == Epilogue.STORE and last.out_dtype == self._code else None

    def _add_product(self, source: _Buffer, target: _Buffer) -> bool:
        """Let the product that made ``source``, just recorded, add to ``target`` instead."""
        product = self._product_of(source)
        if product is None or product.x == target.number or source is target:
            return False
        product.epilogue = Epilogue.ADD
        product.out = target.number
        source.gone = True
        return True

    def _changed(self, value: object) -> _Buffer:
        """The buffer of a symbol that is about to be changed in place: not one that the caller of a pass gave."""
        buffer = _buffer_of(value)
        if self._row_bytes[buffer.number] == 0:
            raise RecordingError("an input of the pass would be changed; a copy can be")
        return buffer

    # ---------------------------------------------------------------------------------------- operations

    def gather(self, index: object, table: Tensor) -> Tensor:
        """Rows ``index`` of ``table`` [N, ...]."""
        require(table.is_contiguous(), "a contiguous table")
        width = table.stride(0)
        out = self._new(width, table.dtype)
        self._append(
            _GATHER,
            x=_buffer_of(index).number,
            out=out.buffer.number,
            width=width * table.element_size(),
            out_width=table.shape[0],
            weight=self._pointer(table),
        )
        return _tensor(out)

    def copy(self, x: object) -> Tensor:
        source = _buffer_of(x)
        out = self._new(source.width, source.dtype)
        size = source.width * source.dtype.itemsize
        self._append(_COPY, x=source.number, out=out.buffer.number, width=size)
        return _tensor(out)

    def concat(self, a: object, b: object) -> Tensor:
        left, right = _buffer_of(a), _buffer_of(b)
        if left.dtype is not right.dtype:
            raise RecordingError("rows of different types side by side")
        out = self._new(left.width + right.width, left.dtype)
        self._append(
            _CONCAT,
            x=left.number,
            y=right.number,
            out=out.buffer.number,
            width=left.width * left.dtype.itemsize,
            out_width=right.width * right.dtype.itemsize,
        )
        return _tensor(out)

    def add(self, x: object, residual: object) -> Tensor:
        source, target = _buffer_of(x), self._changed(residual)
        if not self._add_product(source, target):
            self._append(_ADD, x=source.number, y=target.number, width=source.width)
        return _tensor(Symbol(self, target))

    def clear_first(self, x: object, positions: object) -> Tensor:
        target = self._changed(x)
        size = target.width * target.dtype.itemsize
        self._append(_CLEAR_FIRST, x=target.number, y=_buffer_of(positions).number, width=size)
        return _tensor(Symbol(self, target))

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
        source, target = _buffer_of(x), self._changed(residual)
        if self._add_product(source, target):
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

    def gated(self, gate_up: object, activation: Activation) -> Tensor:
        source = _buffer_of(gate_up)
        out = self._new(source.width // 2, self._dtype)
        self._append(
            _GATED,
            x=source.number,
            out=out.buffer.number,
            width=source.width // 2,
            epilogue=ACTIVATIONS[activation.kind],
            scale=activation.alpha,
            softcap=activation.limit,
        )
        return _tensor(out)

    def scale(self, x: object, factor: float) -> Tensor:
        target = self._changed(x)
        dtype = DTYPES[target.dtype]  # of logits, another than the model's
        self._append(_SCALE, x=target.number, width=target.width, scale=factor, dtype=dtype)
        return _tensor(Symbol(self, target))

    def softcap(self, x: object, cap: float) -> Tensor:
        target = self._changed(x)
        require(target.dtype is torch.float32, "float32 numbers")
        self._append(_SOFTCAP, x=target.number, width=target.width, softcap=cap)
        return _tensor(Symbol(self, target))

    def layer_norm(self, x: object, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        source = _buffer_of(x)
        require(weight.numel() == source.width, "rows as wide as the norm")
        out = self._new(source.width, self._dtype)
        self._append(
            _LAYER_NORM,
            x=source.number,
            out=out.buffer.number,
            width=source.width,
            eps=eps,
            weight=self._pointer(weight),
            weight2=self._pointer(bias),
        )
        return _tensor(out)

    def unary(self, x: object, function: str) -> Tensor:
        source = _buffer_of(x)
        out = self._new(source.width, source.dtype)
        self._append(
            _UNARY,
            x=source.number,
            out=out.buffer.number,
            width=source.width,
            dtype=DTYPES[source.dtype],
            epilogue=list(FUNCTIONS).index(function),
        )
        return _tensor(out)

    def mul(self, x: object, y: object) -> Tensor:
        left, right = _buffer_of(x), _buffer_of(y)
        require(left.width == right.width and left.dtype is right.dtype, "rows of one width and type")
        out = self._new(left.width, left.dtype)
        self._append(
            _MUL,
            x=left.number,
            y=right.number,
            out=out.buffer.number,
            width=left.width,
            dtype=DTYPES[left.dtype],
        )
        return _tensor(out)

    def experts(self, x: object, scores: object, experts: NativeExperts) -> Tensor:
        source, choosing = _buffer_of(x), _buffer_of(scores)
        require(
            source.dtype is experts.dtype and source.width == experts.hidden,
            "rows of the experts' type and width",
        )
        require(
            choosing.dtype is torch.float32 and choosing.width == experts.routing.num_scores,
            "a float32 score for each expert",
        )
        out = self._new(source.width, self._dtype)
        self._kept.append(experts)
        self._append(
            _EXPERTS,
            x=source.number,
            y=choosing.number,
            out=out.buffer.number,
            width=source.width,
            weight=experts.pointer,
        )
        return _tensor(out)

    def heads(self, x: object, weight: NativeHeads) -> Tensor:
        source = _buffer_of(x)
        require(
            source.dtype is weight.dtype and source.width == weight.count * weight.inputs, "rows of all heads"
        )
        out = self._new(weight.count * weight.outputs, self._dtype)
        self._kept.append(weight)
        self._append(
            _HEADS,
            x=source.number,
            out=out.buffer.number,
            width=source.width,
            out_width=weight.count * weight.outputs,
            weight=weight.pointer,
        )
        return _tensor(out)

    def columns(self, x: object, start: int, count: int) -> Tensor:
        source = _buffer_of(x)
        require(start >= 0 and count > 0 and start + count <= source.width, "columns that there are")
        out, size = self._new(count, source.dtype), source.dtype.itemsize
        self._append(
            _COLUMNS,
            x=source.number,
            out=out.buffer.number,
            width=source.width * size,
            out_width=count * size,
            head_dim=start * size,
        )
        return _tensor(out)

    def qkv_rope_write(
        self,
        qkv: object,
        heads: HeadShape,
        rotation: object,
        kv: tuple[Tensor, ...],
        slots: object,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Queries are rotated where they stand: the result is the same buffer."""
        if slots is not self.slots:
            raise RecordingError("rows are written to the slots of the batch and to no others")
        packed = _buffer_of(qkv)
        entries, scales = kv_parts(kv)
        require(
            packed.width == (heads.num_heads + entries.shape[1]) * heads.head_dim,
            "rows and a cache of the same heads",
        )
        self._append(
            _ROPE_WRITE,
            x=packed.number,
            y=_buffer_of(rotation).number,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            eps=eps,
            width=entries.shape[0],
            weight=self._pointer(q_norm),
            weight2=self._pointer(k_norm),
            kv=self._pointer(entries),
            kv_scales=self._pointer(scales),
            kv_dtype=KV_DTYPES[entries.dtype],
            epilogue=is_latent(entries, heads.num_kv_heads, heads.head_dim),
        )
        return _tensor(Symbol(self, packed))

    def attention(
        self,
        q: object,
        kv: tuple[Tensor, ...],
        heads: HeadShape,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        packed = _buffer_of(q)
        entries, scales = kv_parts(kv)
        sinks_of(sinks, heads.num_heads)
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
            softcap=softcap or 0.0,
            weight=self._pointer(sinks),
            width=packed.width,
            kv=self._pointer(entries),
            kv_scales=self._pointer(scales),
            kv_dtype=KV_DTYPES[entries.dtype],
            epilogue=is_latent(entries, heads.num_kv_heads, heads.head_dim),
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
        external = [*range(self._inputs), *(buffer.number for buffer in results)]
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
            features=None if self.features is None else _buffer_of(self.features).width,
            hidden=(results[0].width, results[0].dtype),
            captured={i: (_buffer_of(x).width, _buffer_of(x).dtype) for i, x in captured.items()},
            logits=(results[-1].width, results[-1].dtype),
            kept=self._kept,
        )
