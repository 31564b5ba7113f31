"""Matrices that take next to no memory: every number is one of a short list (see `imagined`).

Worked example: a matrix of 3 rows and 4 columns with a step of 7 has 18 numbers in its list: row 0 is numbers 0-3, row
1 is 7-10, row 2 is 14-17. With 4,000 rows and columns it is 32,000 numbers instead of 16 million.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

_STEP = 7
_WINDOW = 4 << 20
"""Numbers of a matrix that are in memory at once where rows are multiplied with it."""


def imagined(
    name: str, outputs: int, inputs: int, dtype: torch.dtype, *, rows_of_one: bool = False
) -> Tensor:
    """[outputs, inputs], the same numbers for the same name; of a size at which rows keep theirs. A view of
    ``_STEP * outputs + inputs`` numbers. Their deviation is such that products of rows of deviation 1 have it, too;
    ``rows_of_one``: they have it themselves, as an embedding whose rows are not drowned by what layers add."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    # Not of torch's default type, which Transformers changes while it builds a model, maybe in another thread.
    numbers = torch.randn(_STEP * outputs + inputs, generator=generator, dtype=torch.float32)
    numbers /= 1.0 if rows_of_one else math.sqrt(inputs)
    return numbers.to(dtype).as_strided((outputs, inputs), (_STEP, 1))


def multiplied(rows: Tensor, matrix: Tensor) -> Tensor:
    """``rows`` [T, inputs] with a made-up ``matrix`` [outputs, inputs] -> [T, outputs], a window of it after the
    other."""
    out = rows.new_empty((rows.shape[0], matrix.shape[0]))
    step = max(1, _WINDOW // max(1, matrix.shape[1]))
    for start in range(0, matrix.shape[0], step):
        window = matrix[start : start + step].contiguous().to(rows)
        out[:, start : start + step] = rows @ window.t()
    return out
