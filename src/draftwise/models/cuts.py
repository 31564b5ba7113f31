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
from collections.abc import Callable, Iterator, Mapping
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
        return tuple(map(count_of, self.ranges))


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


def ranges_of(places: Tensor) -> Ranges:
    """Ascending places, int64, as ranges. Example: (3, 4, 5, 9) are ((3, 6), (9, 10))."""
    found: list[tuple[int, int]] = []
    for place in places.tolist():
        if found and found[-1][1] == place:
            found[-1] = (found[-1][0], place + 1)
        else:
            found.append((place, place + 1))
    return tuple(found)


def between(ranges: Ranges, start: int, end: int) -> Ranges:
    """The places ``[start:end]`` of those in ``ranges``. Example: 2 to 4 of ((3, 6), (9, 12)) are ((5, 6), (9, 10))."""
    found, at = [], 0
    for low, high in ranges:
        first, last = max(low, low + start - at), min(high, low + end - at)
        if first < last:
            found.append((first, last))
        at += high - low
    return tuple(found)


def count_of(ranges: Ranges) -> int:
    """How many places they are."""
    return sum(end - start for start, end in ranges)


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


def raw_cuts(
    whole: Mapping[str, tuple[int, ...]],
    own: Mapping[str, tuple[int, ...]],
    size: int,
    ranges: Ranges,
    by_inputs: bool,
    what: str,
) -> tuple[dict[str, Cut], int]:
    """Which part of a quantised layer's tensors a rank reads: a dimension that is larger in the whole layer stands for
    the outputs or inputs that it is divided by.

    Example: AWQ's ``qweight`` [inputs, outputs / 8], divided by outputs in two: 64 x 4 words of 64 x 8.

    Args:
        whole, own: shapes by suffix, of the whole layer and of the rank's part.
        size: outputs (``by_inputs``: inputs) of the whole layer, of which the rank has ``ranges``.
        what: the layer, for errors.

    Returns:
        Cuts of the tensors that differ, and the first group of inputs that is read.

    Raises:
        ModelLoadError: the ranges begin or end inside a stored number.
    """
    cuts: dict[str, Cut] = {}
    first_group = 0
    for suffix, shape in whole.items():
        if own[suffix] == shape:
            continue
        cuts[suffix] = cut = Cut(
            shape,
            tuple(
                ((0, all_),) if all_ == few else scaled(ranges, size, all_, what + suffix)
                for few, all_ in zip(own[suffix], shape, strict=True)
            ),
        )
        if by_inputs and suffix.endswith(("scale", "scales")):
            first_group = max(first for ((first, _), *_) in cut.ranges)
    return cuts, first_group


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
