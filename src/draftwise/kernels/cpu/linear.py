"""Linear layers on the native library: packing of weights, and the product for any number of rows."""

from __future__ import annotations

import ctypes
import enum
import functools
import logging
import math

import torch
from torch import Tensor

from draftwise.kernels.cpu.checks import require
from draftwise.kernels.cpu.library import Isa, NativeLibrary, release_with
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.handles import Linear
from draftwise.quantization.scheme import Scheme
from draftwise.quantization.weights import E2M1, NF4, QuantizedWeight, quantize

logger = logging.getLogger("draftwise")

_I64, _PTR, _INT = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int


class Format(enum.IntEnum):
    """How weights are stored; the values of ``csrc/linear.h``."""

    F32 = 0
    BF16 = 1
    I8 = 2
    I8_DYNAMIC = 3
    I4 = 4
    I4_DYNAMIC = 5


class Epilogue(enum.IntEnum):
    """Operations on a row of results; the values of ``csrc/linear.h``."""

    STORE = 0
    ADD = 1  # added to what ``out`` holds
    SILU_MUL = 2  # silu(gate) * up, for weights packed as gate | up


MOST_SUMMED = 65_536
"""Inputs of `Format.I8_DYNAMIC`: the sum of more products of 127 and 255 might not fit into 31 bits."""
_OUT_DTYPES = (torch.float32, torch.bfloat16)
_NUMBERS: dict[tuple[float, ...], int] = {E2M1: 1, NF4: 2}  # csrc/linear.h, Numbers
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}  # csrc/linear.h, DType


class NativeLinear(Linear):
    """Packed weights. ``pointer`` is a ``dw::Linear*``, valid while this object lives."""

    __slots__ = ("__weakref__", "bytes", "dtype", "inputs", "outputs", "paired", "pointer")

    def __init__(
        self,
        pointer: int,
        outputs: int,
        inputs: int,
        dtype: torch.dtype,
        paired: bool,
        kernels: LinearKernels,
    ) -> None:
        self.pointer = pointer
        self.outputs = outputs
        self.inputs = inputs
        self.dtype = dtype  # of the rows that go in
        self.paired = paired
        self.bytes: int = kernels.bytes_of(pointer)  # what one pass reads
        release_with(self, kernels.free, pointer)

    @property
    def num_bytes(self) -> int:
        return self.bytes


class DoubledLinear(Linear):
    """A layer whose groups the kernels hold as two (`QuantizedWeight.doubled`): its rows go in twice, side by side."""

    __slots__ = ("inner",)

    def __init__(self, inner: NativeLinear) -> None:
        self.inner = inner

    @property
    def num_bytes(self) -> int:
        return self.inner.num_bytes


class LinearKernels:
    """The C functions of ``csrc/linear.h`` with a pool of threads."""

    def __init__(self, library: NativeLibrary, pool: ThreadPool) -> None:
        self.pool = pool
        self._library = library
        self._pack = library.function(
            "dw_linear_pack", _PTR, [_PTR, _INT, _PTR, _I64, _PTR, _I64, _I64, _INT]
        )
        self._pack_quantized = library.function(
            "dw_linear_pack_quantized",
            _PTR,
            [_PTR, _INT, _INT, _PTR, _PTR, _PTR, _INT, _PTR, _I64, _I64, _INT, _INT],
        )
        self._run = library.function(
            "dw_linear_run", None, [_PTR, _PTR, _PTR, _I64, _PTR, _I64, _INT, _I64, _INT]
        )
        self.free = library.function("dw_linear_free", None, [_PTR])
        self.release = library.function("dw_memory_release", None, [])
        self.bytes_of = library.function("dw_linear_bytes", _I64, [_PTR])

    def pack(self, weight: Tensor, bias: Tensor | None = None, *, paired: bool = False) -> NativeLinear:
        """Pack float32 or bfloat16 weights; the tensors are not kept.

        Args:
            weight: [out, in], rows of stride 1.
            bias: [out], any float dtype.
            paired: ``weight`` is gate | up, each [out / 2, in], and may be used with `Epilogue.SILU_MUL`.
        """
        formats = {torch.float32: Format.F32, torch.bfloat16: Format.BF16}
        require(weight.dtype in formats and weight.ndim == 2, "a float32 or bfloat16 matrix")
        outputs, inputs = weight.shape
        require(bias is None or bias.shape == (outputs,), "one bias per output")
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        wide = None if bias is None else bias.to(torch.float32).contiguous()
        pointer = self._pack(
            self.pool.pointer,
            formats[weight.dtype],
            weight.data_ptr(),
            weight.stride(0),
            None if wide is None else wide.data_ptr(),
            outputs,
            inputs,
            paired,
        )
        return NativeLinear(pointer, outputs, inputs, weight.dtype, paired, self)

    def pack_quantized(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None = None,
        *,
        dynamic: bool,
        dtype: torch.dtype = torch.bfloat16,
        paired: bool = False,
    ) -> NativeLinear:
        """Pack quantised weights; the tensors are not kept.

        Args:
            weight: The codes; groups of a multiple of 8 inputs.
            bias: [out], any float dtype.
            dynamic: Rows are quantised to int8 as they come; else they stay bfloat16.
            dtype: Of the rows: bfloat16, or float32 if ``dynamic``.
            paired: As in `pack`.
        """
        require(
            dtype is torch.bfloat16 or (dtype is torch.float32 and dynamic), "bfloat16 rows, or dynamic ones"
        )
        require(
            weight.levels is None
            or (weight.levels in _NUMBERS and weight.bits == 4 and not (dynamic and weight.levels == NF4)),
            "floats of four bits: E2M1, or NF4 over rows as they are",
        )
        require(weight.codes.ndim == 2 and weight.codes.element_size() == 1, "a matrix of bytes")
        outputs, inputs = weight.codes.shape
        groups = (outputs,) if weight.bits == 8 else (outputs, -(-inputs // (weight.group or inputs)))
        require(weight.scales.numel() == math.prod(groups), "a scale per output and group")
        require(
            weight.zeros is None or weight.zeros.numel() == math.prod(groups),
            "a zero point per output and group",
        )
        require(bias is None or bias.shape == (outputs,), "one bias per output")
        if dynamic and weight.bits == 8 and inputs > MOST_SUMMED:
            _say_wide(inputs)
            return self.pack(weight.dequantize(dtype), bias, paired=paired)
        codes = weight.codes.contiguous()
        scales = weight.scales.to(torch.float32).contiguous()
        zeros = None if weight.zeros is None else weight.zeros.to(torch.uint8).contiguous()
        wide = None if bias is None else bias.to(torch.float32).contiguous()
        if not dynamic and self._library.isa is not Isa.AMX:
            _say_slow()
        if weight.bits == 8:
            code = Format.I8_DYNAMIC if dynamic else Format.I8
            # only sign and magnitude of seven bits fit where rows are not quantised
            require(dynamic or bool((codes != -128).all()), "codes from -127 to 127")
        else:
            code = Format.I4_DYNAMIC if dynamic else Format.I4
        pointer = self._pack_quantized(
            self.pool.pointer,
            code,
            DTYPE_CODES[dtype],
            codes.data_ptr(),
            scales.data_ptr(),
            None if zeros is None else zeros.data_ptr(),
            weight.group or 0,
            None if wide is None else wide.data_ptr(),
            outputs,
            inputs,
            paired,
            0 if weight.levels is None else _NUMBERS[weight.levels],
        )
        return NativeLinear(pointer, outputs, inputs, dtype, paired, self)

    def pack_as(
        self, weight: Tensor, bias: Tensor | None, scheme: Scheme | None, *, paired: bool = False
    ) -> NativeLinear:
        """Quantise a float weight [out, in] to a scheme and pack it; None: pack it as it is."""
        if scheme is None:
            return self.pack(weight, bias, paired=paired)
        return self.pack_quantized(
            quantize(weight, scheme), bias, dynamic=scheme.dynamic, dtype=weight.dtype, paired=paired
        )

    def run(
        self,
        x: Tensor,
        weight: NativeLinear,
        out: Tensor | None = None,
        epilogue: Epilogue = Epilogue.STORE,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The product.

        Args:
            x: [T, in] of the weight's ``dtype``, rows of stride 1.
            weight: From `pack`.
            out: [T, out] (``SILU_MUL``: [T, out / 2]) float32 or bfloat16, rows of stride 1; needed for ``ADD``.
            epilogue: What to do with the results.
            dtype: Of ``out`` if that is to be made; the dtype of ``x`` by default.

        Returns:
            ``out``.
        """
        rows, inputs = x.shape
        require(
            x.dtype is weight.dtype and inputs == weight.inputs and (rows == 0 or x.stride(1) == 1),
            "rows of the weight's type and width",
        )
        columns = weight.outputs
        if epilogue is Epilogue.SILU_MUL:
            require(weight.paired, "weights packed as gate | up for this epilogue")
            columns //= 2
        if out is None:
            require(epilogue is not Epilogue.ADD, "something to add to")
            out = torch.empty((rows, columns), dtype=dtype or x.dtype)
        require(
            out.shape == (rows, columns) and (rows == 0 or out.stride(1) == 1) and out.dtype in _OUT_DTYPES,
            "a result of its own shape, float32 or bfloat16",
        )
        self._run(
            self.pool.pointer,
            weight.pointer,
            x.data_ptr(),
            x.stride(0),
            out.data_ptr(),
            out.stride(0),
            DTYPE_CODES[out.dtype],
            rows,
            epilogue,
        )
        return out


@functools.cache
def _say_wide(inputs: int) -> None:
    """Once per process and width."""
    logger.warning(
        "linear layers with %d inputs stay floats: products of int8 rows and codes are summed for at most %d inputs",
        inputs,
        MOST_SUMMED,
    )


@functools.cache
def _say_slow() -> None:
    """Once per process."""
    logger.warning(
        "quantised weights meet rows as they are (weight only): several rows at once, as in verification, batches and "
        "prompts, take 1.5 times as long, or longer, as with quantization='int8' or 'int4', which round rows to int8; "
        "`draftwise bench quality` shows what that costs"
    )
