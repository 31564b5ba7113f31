"""Handles of packed norms and rotations, and what native calls need of them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from draftwise.kernels.cpu.checks import require
from draftwise.kernels.handles import Norm, Rope

_PTR, _INT, _I64, _F32 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float


class NativeNorm(Norm):
    """``weight`` [H] float32, ``eps``."""

    __slots__ = ("eps", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps


class NativeRope(Rope):
    """``table`` [positions, 2, D / 2] float32: cosines, sines."""

    __slots__ = ("table",)

    def __init__(self, table: Tensor) -> None:
        self.table = table


class RopeCall(ctypes.Structure):
    """``dw::RopeCall`` of ``csrc/ops.h``."""

    _fields_ = (
        ("qkv", _PTR),
        ("rotation", _PTR),
        ("slots", _PTR),
        ("kv", _PTR),
        ("kv_scales", _PTR),
        ("q_norm", _PTR),
        ("k_norm", _PTR),
        ("eps", _F32),
        ("rows", _I64),
        ("num_heads", _INT),
        ("num_kv_heads", _INT),
        ("head_dim", _INT),
        ("kv_dtype", _INT),
        ("num_slots", _I64),
        ("latent", _I64),
    )


def result_of(out: Tensor | None, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
    """``out``, which must fit, or a new tensor."""
    if out is None:
        return torch.empty(shape, dtype=dtype)
    require(
        out.shape == tuple(shape) and out.dtype is dtype and out.is_contiguous(),
        "a contiguous result of its own shape and type",
    )
    return out


def norms_of(q_norm: Norm | None, k_norm: Norm | None) -> tuple[Tensor | None, Tensor | None, float]:
    """The weights of the norms of queries and of keys, and their epsilon.

    Raises:
        ValueError: They have different ones.
    """
    weights: list[Tensor | None] = []
    found: list[float] = []
    for norm in (q_norm, k_norm):
        assert norm is None or isinstance(norm, NativeNorm)
        weights.append(None if norm is None else norm.weight)
        found += [] if norm is None else [norm.eps]
    require(len(set(found)) <= 1, "one epsilon for both norms")
    return weights[0], weights[1], found[0] if found else 0.0
