"""What a recording writes down of work row by row; the rest is in `recording`."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwise.kernels.base import FUNCTIONS
from draftwise.kernels.cpu.attention import DTYPES
from draftwise.kernels.cpu.checks import require
from draftwise.kernels.cpu.experts import ACTIVATIONS
from draftwise.kernels.cpu.linear import Epilogue, NativeLinear
from draftwise.kernels.cpu.tape import LINEAR, RecordingError, Symbol, Tape, as_tensor, buffer_of
from draftwise.kernels.routing import Activation

# dw::OpKind of csrc/program.h
_GATHER, _COPY, _RMS_NORM, _ADD_RMS_NORM, _SILU_MUL, _, _, _, _PICK = range(9)
_CONCAT, _ADD, _CLEAR_FIRST, _, _GATED, _SCALE, _SOFTCAP, _LAYER_NORM, _UNARY, _MUL = range(9, 19)


class RowTape(Tape):
    """A program in the making, with what is done row by row, products included."""

    def gather(self, index: object, table: Tensor) -> Tensor:
        """Rows ``index`` of ``table`` [N, ...]."""
        require(table.is_contiguous(), "a contiguous table")
        width = table.stride(0)
        out = self._new(width, table.dtype)
        self._append(
            _GATHER,
            x=buffer_of(index).number,
            out=out.buffer.number,
            width=width * table.element_size(),
            out_width=table.shape[0],
            weight=self._pointer(table),
        )
        return as_tensor(out)

    def copy(self, x: object) -> Tensor:
        source = buffer_of(x)
        out = self._new(source.width, source.dtype)
        size = source.width * source.dtype.itemsize
        self._append(_COPY, x=source.number, out=out.buffer.number, width=size)
        return as_tensor(out)

    def concat(self, a: object, b: object) -> Tensor:
        left, right = buffer_of(a), buffer_of(b)
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
        return as_tensor(out)

    def add(self, x: object, residual: object) -> Tensor:
        source, target = buffer_of(x), self._changed(residual)
        if not self._add_product(source, target):
            self._append(_ADD, x=source.number, y=target.number, width=source.width)
        return as_tensor(Symbol(target))

    def clear_first(self, x: object, positions: object) -> Tensor:
        target = self._changed(x)
        size = target.width * target.dtype.itemsize
        self._append(_CLEAR_FIRST, x=target.number, y=buffer_of(positions).number, width=size)
        return as_tensor(Symbol(target))

    def pick(self, x: object) -> Tensor:
        """The rows of x that logits are wanted for; what follows is recorded for these alone."""
        source = buffer_of(x)
        self._target = self._head
        self._free.clear()  # a buffer of the body must not become the logits: they may not be there
        out = self._new(source.width, source.dtype)
        size = source.width * source.dtype.itemsize
        self._append(_PICK, x=source.number, out=out.buffer.number, width=size)
        return as_tensor(out)

    def rms_norm(self, x: object, weight: Tensor, eps: float) -> Tensor:
        source = buffer_of(x)
        out = self._new(source.width, self._dtype)
        self._append(
            _RMS_NORM,
            x=source.number,
            out=out.buffer.number,
            width=source.width,
            eps=eps,
            weight=self._pointer(weight),
        )
        return as_tensor(out)

    def add_rms_norm(self, x: object, residual: object, weight: Tensor, eps: float) -> Tensor:
        source, target = buffer_of(x), self._changed(residual)
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
        return as_tensor(out)

    def silu_mul(self, gate_up: object) -> Tensor:
        source = buffer_of(gate_up)
        size = source.width // 2
        out = self._new(size, self._dtype)
        product = self._product_of(source)
        if product is not None and product.weight in self._paired:
            product.epilogue = Epilogue.SILU_MUL
            product.out = out.buffer.number
            product.out_width = size
            source.gone = True
        else:
            # a product that was added to keeps the bits of those that were not
            adapted = self._adapted_product(source)
            paired = adapted is not None and adapted.weight in self._paired
            self._append(_SILU_MUL, x=source.number, out=out.buffer.number, width=size, epilogue=int(paired))
        return as_tensor(out)

    def linear(self, x: object, weight: NativeLinear, dtype: torch.dtype | None = None) -> Tensor:
        source = buffer_of(x)
        dtype = dtype or self._dtype
        out = self._new(weight.outputs, dtype)
        self._kept.append(weight)
        if weight.paired:
            self._paired.add(weight.pointer)
        self._append(
            LINEAR,
            x=source.number,
            out=out.buffer.number,
            out_dtype=DTYPES[dtype],
            width=source.width,
            out_width=weight.outputs,
            weight=weight.pointer,
        )
        return as_tensor(out)

    def gated(self, gate_up: object, activation: Activation) -> Tensor:
        source = buffer_of(gate_up)
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
        return as_tensor(out)

    def scale(self, x: object, factor: float) -> Tensor:
        target = self._changed(x)
        dtype = DTYPES[target.dtype]  # of logits, another than the model's
        self._append(_SCALE, x=target.number, width=target.width, scale=factor, dtype=dtype)
        return as_tensor(Symbol(target))

    def softcap(self, x: object, cap: float) -> Tensor:
        target = self._changed(x)
        require(target.dtype is torch.float32, "float32 numbers")
        self._append(_SOFTCAP, x=target.number, width=target.width, softcap=cap)
        return as_tensor(Symbol(target))

    def layer_norm(self, x: object, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        source = buffer_of(x)
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
        return as_tensor(out)

    def unary(self, x: object, function: str) -> Tensor:
        source = buffer_of(x)
        out = self._new(source.width, source.dtype)
        self._append(
            _UNARY,
            x=source.number,
            out=out.buffer.number,
            width=source.width,
            dtype=DTYPES[source.dtype],
            epilogue=list(FUNCTIONS).index(function),
        )
        return as_tensor(out)

    def mul(self, x: object, y: object) -> Tensor:
        left, right = buffer_of(x), buffer_of(y)
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
        return as_tensor(out)
