"""Mixtures of experts on the native library (``csrc/experts.h``)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from draftwise.kernels.cpu.checks import require
from draftwise.kernels.cpu.library import NativeLibrary, release_with
from draftwise.kernels.cpu.linear import DTYPE_CODES, NativeLinear
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.handles import Experts, Linear
from draftwise.kernels.routing import Activation, Routing

_PTR, _INT, _I32, _I64, _F32 = (
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_int32,
    ctypes.c_int64,
    ctypes.c_float,
)

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "clamped": 2}  # csrc/experts.h, Activation
_SCORING = {"softmax": 0, "sigmoid": 1}
_SHARED = {"none": 0, "plain": 1, "gated": 2}


class Setting(ctypes.Structure):
    """``dw::ExpertsSetting``."""

    _fields_ = (
        ("experts", _I32),
        ("top_k", _I32),
        ("scoring", _I32),
        ("normalise", _I32),
        ("groups", _I32),
        ("top_groups", _I32),
        ("group_rank", _I32),
        ("shared", _I32),
        ("activation", _I32),
        ("scale", _F32),
        ("alpha", _F32),
        ("limit", _F32),
    )


class NativeExperts(Experts):
    """``pointer`` is a ``dw::Experts*``, valid while this object lives; it keeps its layers."""

    __slots__ = ("__weakref__", "dtype", "hidden", "layers", "pointer", "routing")

    def __init__(
        self, pointer: int, layers: Sequence[tuple[NativeLinear, NativeLinear]], routing: Routing
    ) -> None:
        self.pointer = pointer
        self.layers = tuple(layers)
        self.routing = routing
        self.hidden = layers[0][0].inputs
        self.dtype = layers[0][0].dtype

    @property
    def num_bytes(self) -> int:
        return sum(up.num_bytes + down.num_bytes for up, down in self.layers)


class ExpertsKernels:
    """The C functions of ``csrc/experts.h`` with a pool of threads."""

    def __init__(self, library: NativeLibrary, pool: ThreadPool) -> None:
        self._pool = pool
        self._create = library.function(
            "dw_experts_create", _PTR, [ctypes.POINTER(Setting), _PTR, _PTR, _PTR]
        )
        self._free = library.function("dw_experts_free", None, [_PTR])
        self._route = library.function("dw_experts_route", None, [_PTR, _PTR, _PTR, _I64, _PTR, _PTR])
        self._run = library.function("dw_experts_run", None, [_PTR, _PTR, _PTR, _PTR, _PTR, _PTR, _I64])
        self._gated = library.function(
            "dw_gated_rows", None, [_PTR, _INT, _INT, _F32, _F32, _PTR, _PTR, _I64, _I64]
        )

    def pack(
        self, layers: Sequence[tuple[Linear, Linear]], routing: Routing, correction: Tensor | None
    ) -> NativeExperts:
        """See `Ops.pack_experts`.

        Raises:
            ValueError: the layers do not fit together.
        """
        require(len(layers) == routing.num_layers, "a pair of layers for each expert")
        native: list[tuple[NativeLinear, NativeLinear]] = []
        for up, down in layers:
            assert isinstance(up, NativeLinear) and isinstance(down, NativeLinear)
            require(
                up.paired and up.dtype is down.dtype, "gate and up packed as such, and down for the same rows"
            )
            native.append((up, down))
        require(
            correction is None or correction.shape == (routing.num_experts,), "a correction for each expert"
        )
        wide = None if correction is None else correction.to(torch.float32).contiguous()
        activation = routing.activation
        setting = Setting(
            routing.num_experts,
            routing.top_k,
            _SCORING[routing.scoring],
            routing.normalise,
            routing.groups,
            routing.top_groups,
            routing.group_rank,
            _SHARED[routing.shared],
            ACTIVATIONS[activation.kind],
            routing.scale,
            activation.alpha,
            activation.limit,
        )
        pointers = _PTR * len(native)
        pointer = self._create(
            setting,
            pointers(*(up.pointer for up, _ in native)),
            pointers(*(down.pointer for _, down in native)),
            None if wide is None else wide.data_ptr(),
        )
        made = NativeExperts(pointer, native, routing)
        release_with(made, self._free, pointer)
        return made

    def route(self, scores: Tensor, experts: NativeExperts) -> tuple[Tensor, Tensor]:
        """``scores`` [T, num_scores] float32 -> experts [T, num_chosen] int32 and their weights, float32."""
        routing = experts.routing
        require(
            scores.dtype is torch.float32 and scores.ndim == 2 and scores.shape[1] == routing.num_scores,
            "a float32 score for each expert",
        )
        scores = scores.contiguous()
        chosen = torch.empty((len(scores), routing.num_chosen), dtype=torch.int32)
        weights = torch.empty((len(scores), routing.num_chosen), dtype=torch.float32)
        self._route(
            self._pool.pointer,
            experts.pointer,
            scores.data_ptr(),
            len(scores),
            chosen.data_ptr(),
            weights.data_ptr(),
        )
        return chosen, weights

    def run(
        self, x: Tensor, chosen: Tensor, weights: Tensor, experts: NativeExperts, out: Tensor | None = None
    ) -> Tensor:
        """See `Ops.mix_experts`; ``chosen`` of any integers, ``weights`` of any floats.

        Raises:
            ValueError: an expert that there is not, or tensors that do not fit.
        """
        rows, places = x.shape[0], (x.shape[0], experts.routing.num_chosen)
        require(
            x.dtype is experts.dtype and x.shape == (rows, experts.hidden),
            "rows of the experts' type and width",
        )
        require(
            chosen.shape == places and weights.shape == places, "the experts of each row and their weights"
        )
        if chosen.dtype is not torch.int32:  # the kernel looks at what is left of them
            require(bool(((chosen >= 0) & (chosen < len(experts.layers))).all()), "experts that there are")
        x, chosen = x.contiguous(), chosen.to(torch.int32).contiguous()
        weights = weights.to(torch.float32).contiguous()
        result = torch.empty_like(x) if out is None else out
        require(
            result.shape == x.shape and result.dtype is x.dtype and result.is_contiguous(),
            "a result like the rows",
        )
        self._run(
            self._pool.pointer,
            experts.pointer,
            x.data_ptr(),
            chosen.data_ptr(),
            weights.data_ptr(),
            result.data_ptr(),
            rows,
        )
        return result

    def gated(self, gate_up: Tensor, activation: Activation, out: Tensor | None = None) -> Tensor:
        """See `Ops.gated`."""
        require(gate_up.dtype in (torch.float32, torch.bfloat16) and gate_up.ndim == 2, "rows of floats")
        gate_up = gate_up.contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        result = gate_up.new_empty((rows, size)) if out is None else out
        require(
            result.shape == (rows, size) and result.dtype is gate_up.dtype and result.is_contiguous(),
            "a result half as wide",
        )
        self._gated(
            self._pool.pointer,
            DTYPE_CODES[gate_up.dtype],
            ACTIVATIONS[activation.kind],
            activation.alpha,
            activation.limit,
            gate_up.data_ptr(),
            result.data_ptr(),
            rows,
            size,
        )
        return result
