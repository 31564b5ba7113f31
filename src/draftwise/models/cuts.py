"""Which numbers of a checkpoint's tensors a rank reads.

Layers are divided as Megatron-LM divides them (Shoeybi et al. 2019, arXiv:1909.08053): what reads the hidden state (q,
k, v, gate, up) by outputs, what writes it (o, down) by inputs, so that a layer needs two sums over ranks. Where there
are fewer K/V heads than ranks, several ranks have the same one.

Example: 8 heads, 2 K/V heads of 16 numbers on 4 ranks. Rank 2 has heads 4 and 5, rows 64-95 of q's 128; K/V head 1,
rows 16-31 of k's 32; columns 64-95 of o.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.kernels.ranks import Part, vocabulary_step

Ranges = tuple[tuple[int, int], ...]
"""Places (start, end) along a dimension, one after the other."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of a stored tensor of ``shape``: ranges of each dimension."""

    shape: tuple[int, ...]
    ranges: tuple[Ranges, ...]

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of the part that is read."""
        return tuple(sum(end - start for start, end in ranges) for ranges in self.ranges)


@dataclass(frozen=True, slots=True)
class Run:
    """``rows`` outputs that a rank has of ``rows * size / copies`` that lie together; so many ranks have the same."""

    rows: int
    copies: int = 1


@dataclass(frozen=True, slots=True)
class Split:
    """How a linear layer is divided: by outputs, of which each of its parts has some runs; or by inputs."""

    runs: tuple[tuple[Run, ...], ...] = ()
    inputs: bool = False

    def outputs(self, part: Part, index: int, rows: int) -> tuple[int, Ranges]:
        """Rows of the stored tensor ``index``, of which the rank has ``rows``, and which these are."""
        if not self.runs:
            return rows, ((0, rows),)
        ranges, at = [], 0
        for run in self.runs[index]:
            start = at + part.rank // run.copies * run.rows
            ranges.append((start, start + run.rows))
            at += run.rows * part.size // run.copies
        assert sum(end - start for start, end in ranges) == rows, "runs of the part's own size"
        return at, tuple(ranges)

    def columns(self, part: Part, columns: int) -> tuple[int, Ranges]:
        """The same of the inputs."""
        if not self.inputs:
            return columns, ((0, columns),)
        return columns * part.size, ((part.rank * columns, (part.rank + 1) * columns),)


BY_INPUTS = Split(inputs=True)


def by_outputs(*rows: int) -> Split:
    """Parts that are divided as they are."""
    return Split(tuple((Run(count),) for count in rows))


def scaled(ranges: Ranges, size: int, stored: int, what: str) -> Ranges:
    """Ranges along ``size`` inputs or outputs as ranges along the dimension that stands for them in a stored tensor.

    Example: outputs 8-15 of 32 that are packed eight to a word: words 1-1 of 4, (1, 2).

    Raises:
        ModelLoadError: they begin or end inside one of its numbers.
    """
    out = []
    for start, end in ranges:
        if start * stored % size or end * stored % size:
            raise ModelLoadError(
                f"{what}: {size} numbers stored as {stored} cannot be divided at {start} and {end}"
            )
        out.append((start * stored // size, end * stored // size))
    return tuple(out)


def vocabulary_cut(part: Part, total: int, hidden: int) -> Cut:
    """The cut of an embedding or output layer [total, hidden]."""
    step = vocabulary_step(total, part.size)
    rows = (part.rank * step, min((part.rank + 1) * step, total))
    return Cut((total, hidden), ((rows,), ((0, hidden),)))


def axis_cut(part: Part, own: tuple[int, ...], axis: int) -> Cut:
    """The cut of a tensor whose dimension ``axis`` is divided evenly among ranks; ``own``: the shape of a rank's
    part.

    Example: own (2, 8), axis 0, rank 1 of 2: rows 2-3 of (4, 8).
    """
    whole = tuple(size * part.size if i == axis else size for i, size in enumerate(own))
    return Cut(
        whole,
        tuple(
            ((part.rank * size, (part.rank + 1) * size),) if i == axis else ((0, size),)
            for i, size in enumerate(own)
        ),
    )


Reader = Callable[..., Tensor]
"""``read(start, end, *columns)``: rows of a tensor, and of these the given slices along its other dimensions."""


def copy_part(read: Reader, cut: Cut, dest: Tensor, window: int) -> None:
    """Fill ``dest``, of ``cut.own_shape``, with a part of a tensor, some ``window`` bytes at a time."""
    step = max(1, window // (4 * max(1, math.prod(cut.own_shape[1:]))))
    columns = list(itertools.product(*(_places(ranges) for ranges in cut.ranges[1:])))
    for low, high, at in _places(cut.ranges[0]):
        for start in range(low, high, step):
            end = min(start + step, high)
            place = dest[at + start - low : at + end - low]
            for pieces in columns:
                into = tuple(slice(there, there + last - first) for first, last, there in pieces)
                found = read(start, end, *(slice(first, last) for first, last, _ in pieces))
                place[(slice(None), *into)].copy_(found)


def _places(ranges: Ranges) -> Iterator[tuple[int, int, int]]:
    """(start, end, where it goes) of ranges that are put side by side."""
    at = 0
    for low, high in ranges:
        yield low, high, at
        at += high - low
