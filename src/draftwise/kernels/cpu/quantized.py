"""Native kernels that quantise linear layers as they are packed."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from draftwise.errors import ConfigError
from draftwise.kernels.cpu.library import NativeLibrary
from draftwise.kernels.cpu.ops import NativeOps
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.handles import Linear
from draftwise.quantization.scheme import Scheme
from draftwise.quantization.weights import NF4, QuantizedWeight, ReadRows, quantize_read


class QuantizedOps(NativeOps):
    """`NativeOps` whose linear layers are stored in a scheme's format.

    The output layer has eight bits in every scheme: each of its rows decides about one token, and it is a small part
    of a large model. Embeddings, norms and biases stay as they are.

    Raises:
        ConfigError: The scheme keeps rows as they are, which the kernels can for bfloat16 rows only.
    """

    def __init__(self, library: NativeLibrary, pool: ThreadPool, dtype: torch.dtype, scheme: Scheme) -> None:
        if dtype is not torch.bfloat16 and not scheme.dynamic:
            raise ConfigError(
                f"quantization: {scheme.name} needs dtype bfloat16, not {str(dtype).removeprefix('torch.')}"
            )
        super().__init__(library, pool, dtype)
        self.scheme = scheme
        self._head_scheme = replace(scheme, bits=8, group=None)

    def pack_quantized(
        self, weight: QuantizedWeight, bias: Tensor | None = None, *, dynamic: bool, paired: bool = False
    ) -> Linear:
        if weight.levels == NF4:  # there is no product of such codes with bytes
            return self._linear.pack_as(weight.dequantize(self.dtype), bias, self.scheme, paired=paired)
        if weight.levels is not None:  # whatever the checkpoint says of rows, the user has the last word
            return super().pack_quantized(weight, bias, dynamic=self.scheme.dynamic, paired=paired)
        # weights that have this form already, or were rounded to it before and come back from disk
        return super().pack_quantized(weight, bias, dynamic=dynamic or self.scheme.dynamic, paired=paired)

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return self._linear.pack_as(weight, bias, self.scheme)

    def pack_read(
        self, read: ReadRows, shape: tuple[int, int], bias: Tensor | None = None, *, paired: bool = False
    ) -> Linear:
        codes = quantize_read(read, shape, self.scheme)
        return self._linear.pack_quantized(
            codes, bias, dynamic=self.scheme.dynamic, dtype=self.dtype, paired=paired
        )

    def pack_exact(self, weight: Tensor) -> Linear:
        return super().pack_linear(weight)

    def pack_gate_up(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return self._linear.pack_as(weight, bias, self.scheme, paired=True)

    def pack_router(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return self._linear.pack(weight, bias)

    def pack_head(self, weight: Tensor) -> Linear:
        return self._linear.pack_as(weight, None, self._head_scheme)

    def pack_tied_head(self, table: Tensor) -> Linear:
        return self.pack_head(table)
