"""Where K/V lives: one row per slot in every layer, slot = block * block_size + offset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from draftwise.kv.pages import zeros
from draftwise.kv.states import StateStore


@dataclass(frozen=True, slots=True)
class KVLayerSpec:
    """The storage of one layer per token: named tensors and the shape of one token's entry.

    Dense attention stores keys and values side by side, ``(("kv", (2 * Hkv, D)),)``, so that a token is written
    with one copy and gathered with one; see `KVLayerSpec.dense`. Latent attention (MLA) says
    ``(("latent", (1, 576)),)``: keys that are their own values.
    """

    tensors: tuple[tuple[str, tuple[int, ...]], ...]

    @staticmethod
    def dense(num_kv_heads: int, head_dim: int) -> KVLayerSpec:
        """Entry ``kv`` [2 * Hkv, D]: heads 0..Hkv-1 are keys (rotated), heads Hkv..2*Hkv-1 are values."""
        return KVLayerSpec((("kv", (2 * num_kv_heads, head_dim)),))

    @property
    def elements_per_token(self) -> int:
        return sum(prod(shape) for _, shape in self.tensors)


LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Types of a cache of codes, and the largest number of each: an entry's largest magnitude becomes that."""


def quantized(values: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Round float entries [n, ..., D] to codes: codes [n, ..., D], scales [n, ...] float32, one per token and head.

    A scale follows from its own D numbers, so that a token's codes depend on nothing else. int8 has even steps; fp8
    (four bits of exponent, three of fraction) has finer ones for small numbers and 1/16 of the number for large ones.
    """
    wide = values.float()
    top, largest = wide.abs().amax(-1), LARGEST[dtype]
    inverse = torch.where(top > 0, largest / top, 0.0)
    codes = wide * inverse.unsqueeze(-1)
    return (codes.round() if dtype is torch.int8 else codes).to(dtype), top / largest


def dequantized(taken: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """Entries [n, ...] as numbers of ``dtype``: of ``(entries,)``, or of ``(codes, scales)``."""
    if len(taken) == 1:
        return taken[0].to(dtype)
    codes, scales = taken
    return (codes.float() * scales.unsqueeze(-1)).to(dtype)


def narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to a cache's float dtype; numbers beyond float16's largest become that, not infinity."""
    if dtype is torch.float16 and values.dtype is not torch.float16:
        values = values.float().clamp(-65504.0, 65504.0)
    return values.to(dtype)


def write_entries(kv: tuple[Tensor, ...], slots: Tensor, entries: Tensor) -> None:
    """Write float ``entries`` [n, ..., D] to ``slots`` int64 [n] of a layer of a `KVStorage`, rounded as it is."""
    dtype = kv[0].dtype
    values = quantized(entries, dtype) if dtype in LARGEST else (narrowed(entries, dtype),)
    for part, value in zip(kv, values, strict=True):
        stored = (
            (part.view(torch.uint8), value.view(torch.uint8)) if part.dtype.itemsize == 1 else (part, value)
        )
        stored[0].index_copy_(0, slots, stored[1])  # torch copies no fp8 by index


class KVStorage:
    """The K/V tensors of one model. Contents start as zeros, so that an unwritten slot is finite.

    ``dtype`` need not be the model's. int8 and fp8 (float8_e4m3fn): each tensor of an entry, [slots, ..., D], holds
    codes, and is followed by their scales, [slots, ...] float32 (see `quantized`).

    Consecutive layers of equal layout share one allocation [layers, slots, ...]: `move` then costs two operations
    for all of them, whatever their number.

    With a spare block, every layer has one more than ``num_blocks``, whose first slot is `spare_slot`. Rows that fill
    up a captured batch are written there; nobody reads it.
    """

    def __init__(
        self,
        layout: Sequence[KVLayerSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        spare: bool = False,
        states: StateStore | None = None,
    ) -> None:
        """``states``: of a model with recurrent state, which has them besides."""
        assert num_blocks > 0 and block_size > 0
        self.layout = tuple(layout)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self.states = states
        self.spare_slot = num_blocks * block_size if spare else None
        slots = (num_blocks + spare) * block_size
        self._pools: list[
            Tensor
        ] = []  # each [layers of the run, slots, ...]; fp8 as bytes, which torch can move
        self._layers: list[tuple[Tensor, ...]] = []
        start = 0
        while start < len(self.layout):
            end = start + 1
            while end < len(self.layout) and self.layout[end] == self.layout[start]:
                end += 1
            pools = []
            for _, shape in self.layout[start].tensors:
                held = torch.uint8 if dtype is torch.float8_e4m3fn else dtype
                pools.append(zeros((end - start, slots, *shape), held, device))
                if dtype in LARGEST:
                    scales = (end - start, slots, *shape[:-1])
                    pools.append(zeros(scales, torch.float32, device))
            self._pools += pools
            self._layers += [tuple(self._of_layer(pool[i]) for pool in pools) for i in range(end - start)]
            start = end

    def _of_layer(self, part: Tensor) -> Tensor:
        return part.view(self.dtype) if part.dtype is torch.uint8 else part

    def layer(self, i: int) -> tuple[Tensor, ...]:
        """The tensors of layer i in the order of its `KVLayerSpec`, each [num_blocks * block_size, ...] (one row more
        with a spare slot), with scales behind each if they are codes."""
        return self._layers[i]

    def move(self, src: Tensor, dst: Tensor) -> None:
        """Copy rows ``src`` to rows ``dst`` in every layer, as if all were read before any is written.

        Args:
            src: int64 [n], slots on the storage's device.
            dst: int64 [n], distinct slots; may overlap ``src``.

        Example: a tree's accepted path in slots 10, 12, 15 is compacted by src = [12, 15], dst = [11, 12].
        """
        if src.numel() == 0:
            return
        for pool in self._pools:
            pool.index_copy_(1, dst, pool.index_select(1, src))

    @property
    def pools(self) -> tuple[Tensor, ...]:
        """The tensors that `move` moves: runs of equal layers, each [layers, slots, ...]."""
        return tuple(self._pools)

    @property
    def nbytes(self) -> int:
        """Bytes held by all layers, states included."""
        own = sum(pool.numel() * pool.element_size() for pool in self._pools)
        return own + (0 if self.states is None else self.states.nbytes)

    @staticmethod
    def bytes_per_block(layout: Sequence[KVLayerSpec], block_size: int, dtype: torch.dtype) -> int:
        """Bytes that one block of tokens takes in all layers."""
        size = sum(spec.elements_per_token for spec in layout) * dtype.itemsize
        if dtype in LARGEST:
            scales = sum(prod(shape[:-1]) for spec in layout for _, shape in spec.tensors)
            size += scales * torch.float32.itemsize
        return size * block_size
