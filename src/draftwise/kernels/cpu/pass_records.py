"""What a recorded pass is made of, what it is given, and what it gives."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from draftwise.kernels.cpu.attention import BatchView

_PTR, _I32, _I64, _F32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class Operation(ctypes.Structure):
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
        ("softcap", _F32),
        ("eps", _F32),
        ("kv_dtype", _I32),
        ("width", _I64),
        ("out_width", _I64),
        ("weight", _PTR),
        ("weight2", _PTR),
        ("kv", _PTR),
        ("kv_scales", _PTR),
    )


class PassInput(ctypes.Structure):
    """``dw::PassInput``."""

    _fields_ = (
        ("rows", _I64),
        ("head_rows", _I64),
        ("head_index", _PTR),
        ("head_only", _I64),
        ("arena", _PTR),
        ("capacity", _I64),
        ("externals", _PTR),
        ("adapters", _PTR),
        ("batch", BatchView),
    )


@dataclass(frozen=True, slots=True)
class PassOutput:
    """The results of a pass, in fresh tensors. ``logits``: of the requested rows, None if there are none."""

    hidden: Tensor  # [T, H]
    captured: dict[int, Tensor]  # layer -> [T, H]
    logits: Tensor | None  # [M, V] float32


class Results(NamedTuple):
    """What a pass writes, and where it lies: the addresses of ``hidden`` [T, H], of each of ``captured`` [T, H], and of
    ``logits`` [M, V]."""

    hidden: Tensor
    captured: list[Tensor]
    logits: Tensor
    places: list[int]

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return sum([value.nbytes for value in (self.hidden, *self.captured, self.logits)])


class PassRows(NamedTuple):
    """Tensors of a pass's rows that were checked, and their addresses."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    places: tuple[int, int, int]
