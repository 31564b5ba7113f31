"""Handles of weights, packed once at load in whatever layout the kernels want: made and read by the same `Ops`."""

from __future__ import annotations

from torch import Tensor


class Linear:
    """Handle of a packed linear layer; made by `Ops.pack_linear`, read only by the same Ops."""

    __slots__ = ()

    @property
    def num_bytes(self) -> int:
        """Bytes kept for it: as packed, scales and padding included; 0 if the memory is another parameter's."""
        raise NotImplementedError(f"{type(self).__name__} does not report its size")


class Experts:
    """Handle of a mixture of experts; made by `Ops.pack_experts`, read only by the same Ops."""

    __slots__ = ()

    @property
    def num_bytes(self) -> int:
        """Bytes kept for all its layers."""
        raise NotImplementedError(f"{type(self).__name__} does not report its size")


class Heads:
    """Handle of a linear layer for each head; made by `Ops.pack_heads`, read only by the same Ops."""

    __slots__ = ()

    @property
    def num_bytes(self) -> int:
        """Bytes kept for all of them."""
        raise NotImplementedError(f"{type(self).__name__} does not report its size")


class Norm:
    """Handle of a packed RMSNorm weight with its epsilon; made by `Ops.pack_norm`."""

    __slots__ = ()


class LayerNorm(Norm):
    """``weight`` [H] float32, ``bias`` [H] float32 or None, ``eps``."""

    __slots__ = ("bias", "eps", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self.weight, self.bias, self.eps = (
            weight.contiguous(),
            None if bias is None else bias.contiguous(),
            eps,
        )


class Rope:
    """Handle of the rotations of every position a model can reach; made by `Ops.pack_rope`."""

    __slots__ = ()
