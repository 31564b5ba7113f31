"""DFlash2's convolutions: short causal ones over the rows of a block, around attention and around the MLP of a layer.

::

    normed rows x -> kernels = kernel_projection(x)  [2 x taps x groups]: one half for the way in, one for the way out
    in:   y_t = sum over j < taps of (base[0][j] + kernels_in[t, j]) * x_{t-j}      then attention, or the MLP
    out:  z_t = sum over j < taps of (base[1][j] + kernels_out[t, j]) * y_{t-j}     then it is added

A kernel of a row has one number for each group of neighbouring channels; ``base`` has one for each channel. Rows before
the block's first are zero.

Example: taps 2, a block of rows a b c: a gives b_0 a, b gives k_0 b + k_1 a.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.kernels.base import Ops
from draftwise.kernels.handles import Linear
from draftwise.models.layers import DenseLayer, Projections
from draftwise.models.mlp import Mlp
from draftwise.models.weights import WeightPlan


@dataclass(frozen=True, slots=True)
class ConvShape:
    """``taps``: rows that a row reads, itself included; ``groups``: of channels with one dynamic number each."""

    taps: int
    groups: int


@dataclass(slots=True)
class _Places:
    """The pass that runs: each row's number in its block, int64 [T, 1]. One writer: `BlockConvs.begin`."""

    now: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass(slots=True)
class _Conv:
    """One pair of convolutions, packed. The way in leaves the kernels for the way out."""

    places: _Places
    shape: ConvShape
    base: Tensor  # [2, taps, H] float32
    projection: Linear  # [2 * taps * groups, H]
    out: Tensor = field(default_factory=lambda: torch.empty(0))

    def enter(self, ops: Ops, x: Tensor) -> Tensor:
        taps, groups = self.shape.taps, self.shape.groups
        kernels = ops.linear(x, self.projection).float().view(x.shape[0], 2, taps, groups)
        self.out = kernels[:, 1]
        return self._run(x, kernels[:, 0], self.base[0])

    def leave(self, x: Tensor) -> Tensor:
        return self._run(x, self.out, self.base[1])

    def _run(self, x: Tensor, kernels: Tensor, base: Tensor) -> Tensor:
        """x [T, H], kernels [T, taps, groups], base [taps, H] -> [T, H] in x's type; sums in float32, tap by tap."""
        width = x.shape[1] // self.shape.groups
        wide, places = x.float(), self.places.now
        out = torch.zeros_like(wide)
        for tap in range(self.shape.taps):
            shifted = wide if tap == 0 else torch.cat((wide.new_zeros(tap, x.shape[1]), wide))[: len(wide)]
            weight = base[tap] + kernels[:, tap].repeat_interleave(width, dim=1)
            out = out + torch.where(places >= tap, shifted * weight, 0.0)
        return out.to(x.dtype)


@dataclass(slots=True)
class _In:
    conv: _Conv
    inner: Linear | Projections

    def run(self, ops: Ops, x: Tensor) -> Tensor:
        x, inner = self.conv.enter(ops, x), self.inner
        return ops.linear(x, inner) if isinstance(inner, Linear) else inner.run(ops, x)

    @property
    def num_bytes(self) -> int:
        return self.inner.num_bytes + self.conv.projection.num_bytes


@dataclass(slots=True)
class _Out:
    conv: _Conv
    inner: Linear | Projections

    def run(self, ops: Ops, x: Tensor) -> Tensor:
        inner = self.inner
        return self.conv.leave(ops.linear(x, inner) if isinstance(inner, Linear) else inner.run(ops, x))

    @property
    def num_bytes(self) -> int:
        return self.inner.num_bytes


@dataclass(slots=True)
class _Around(Mlp):
    conv: _Conv
    inner: Mlp

    def run(self, ops: Ops, hidden: Tensor) -> Tensor:
        return self.conv.leave(self.inner.run(ops, self.conv.enter(ops, hidden)))

    @property
    def num_bytes(self) -> int:
        return self.inner.num_bytes + self.conv.projection.num_bytes


class BlockConvs:
    """The convolutions of all layers: declared, filled, and put around packed layers."""

    def __init__(self, shape: ConvShape, layers: int, hidden_size: int, plan: WeightPlan) -> None:
        """Declare the parameters.

        Raises:
            ModelLoadError: groups that do not divide the hidden size.
        """
        if shape.groups < 1 or hidden_size % shape.groups:
            raise ModelLoadError(f"{shape.groups} groups of channels do not divide hidden_size {hidden_size}")
        self._shape = shape
        self._places = _Places()
        self._loaded = [
            {
                part: (
                    plan.tensor(f"layers.{i}.{part}.base_kernel", (2, shape.taps, hidden_size)),
                    plan.tensor(
                        f"layers.{i}.{part}.kernel_projection.weight",
                        (2 * shape.taps * shape.groups, hidden_size),
                    ),
                )
                for part in ("attention_conv", "mlp_conv")
            }
            for i in range(layers)
        ]

    def wrap(self, i: int, layer: DenseLayer, ops: Ops, plan: WeightPlan) -> DenseLayer:
        """Layer ``i`` with its convolutions around attention and MLP."""
        convs = []
        for base, projection in self._loaded[i].values():
            plan.fill(base)
            plan.fill(projection)
            convs.append(_Conv(self._places, self._shape, base.float(), ops.pack_exact(projection)))
        around, mlp = convs
        return replace(
            layer, qkv=_In(around, layer.qkv), o=_Out(around, layer.o), mlp=_Around(mlp, layer.mlp)
        )

    def begin(self, starts: Tensor, rows: int) -> None:
        """A pass begins: blocks start at rows ``starts`` [R] int64 of ``rows``."""
        row = torch.arange(rows, device=starts.device)
        self._places.now = (row - starts[torch.searchsorted(starts, row, right=True) - 1])[:, None]
