"""Linear layers through oneDNN with weights packed ahead, where this build of torch and this CPU have it.

``torch.mm`` gives a product of 2 to 16 rows, which is what verifying a draft is, three to five times the time of one
row; with packed weights it takes little more than one (measured: 256 x 1408 in float32 on AVX-512, 5 rows: 80 us
against 31). The operators are the ones torch's own compiler emits; they are no public interface, so they are tried on a
small product first, and plain products serve wherever that fails.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

_ROWS_HINT = 8  # rows that the packed layout is chosen for; any number is computed
_NO_SCALARS: list[Any] = []
_SMALL = 1 << 16
"""Elements of a float32 weight up to which plain products are faster, with any number of rows: a call of oneDNN takes
17 us, and its first one with a number of rows compiles, which takes half a millisecond (measured: 32 x 64, 2 us
against 17; 256 x 256, 5 rows: 8 us against 25). Plain products in bfloat16 are not."""


def pack(weight: Tensor) -> Tensor | None:
    """``weight`` [out, in] -> an opaque packed copy for `linear`, or None where that does not exist or not pay."""
    if weight.device.type != "cpu" or weight.dim() != 2 or not _works(weight.dtype):
        return None
    if weight.dtype == torch.float32 and weight.numel() <= _SMALL:
        return None
    return _pack(weight)


def linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """``x`` [T, in], T > 0 -> [T, out] with weights from `pack`."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", _NO_SCALARS, "")
    return result


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
    return packed


@cache
def _works(dtype: torch.dtype) -> bool:
    """Whether the operators exist, run and give the right numbers for a dtype here."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not available:
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 64), (48, 64), (48,))
    )
    try:
        actual = linear(x, _pack(weight), bias).float()
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    expected = x.float() @ weight.float().T + bias.float()
    return actual.shape == expected.shape and bool((actual - expected).abs().max() < 0.1)
