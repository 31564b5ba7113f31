"""Low-rank additions of captured passes: two small kernels behind a linear layer. Rows of a request meet its adapter's
weights alone, in tiles of a fixed size, so that a row's bits do not depend on what else is in the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwise.kernels.stacked import StackedAdditions
from draftwise.kernels.triton import device
from draftwise.kernels.triton.availability import LAUNCH, interpreted
from draftwise.kernels.triton.rows import power_of_two

_BLOCK_M = 16
_BLOCK_R = 16
_BLOCK_N = 64
_BLOCK_K = 128
_PART_INPUTS = 1024
"""Inputs of a part of k that is a program of its own: a row of one request would else be one program's work."""


def add_low_rank(x: Tensor, out: Tensor, additions: StackedAdditions, site: int) -> None:
    """`Ops.add_low_rank`; rows of both may be strided."""
    stack, rows = additions.stacks[site], additions.rows
    columns, inputs = stack.down.shape[1:]
    requests = additions.places.shape[0]
    assert x.shape == (requests * rows, inputs) and x.stride(1) == 1 and out.stride(1) == 1
    tiles, parts = -(-rows // _BLOCK_M), -(-inputs // _PART_INPUTS)
    wide = interpreted() and x.dtype is torch.bfloat16  # the interpreter's product of bfloat16 is not one
    low = torch.empty((x.shape[0], parts, columns), dtype=torch.float32, device=x.device)
    shared = {"TILES": tiles, "PARTS": parts, "WIDE": wide, "BLOCK_M": _BLOCK_M, **LAUNCH}
    sizes = (rows, inputs, columns, _PART_INPUTS, x.stride(0))
    block_k = min(_BLOCK_K, max(16, power_of_two(inputs)))
    device.low_rank.low_rank_down[(requests * tiles, -(-columns // _BLOCK_R), parts)](
        x, stack.down, additions.places, low, *sizes, BLOCK_R=_BLOCK_R, BLOCK_K=block_k, **shared
    )
    widest = max(stop - start for start, stop, _ in stack.bounds)
    given = (low, stack.up, stack.parts, additions.places, out)
    strides = (rows, stack.up.shape[1], columns, out.stride(0))
    device.low_rank.low_rank_up[(requests * tiles, -(-widest // _BLOCK_N), len(stack.bounds))](
        *given, *strides, RANK=additions.rank, BLOCK_N=_BLOCK_N, **shared
    )
