"""Quantised weights and rounding to the nearest.

The codes and scales here are plain tensors: kernels pack them, and `dequantize` says what they mean, so that any kernel
can be compared with a product of plain floats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftwise.quantization.scheme import Scheme

ReadRows = Callable[[int, int], Tensor]
"""``(start, end)`` -> rows ``[start:end]`` of a matrix, floats."""

INT8_MAX = 127
FP8 = torch.float8_e4m3fn
FP8_MAX = 448
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of the codes of a float of four bits: a sign, two bits of exponent, one of mantissa (OCP Microscaling
Formats 1.0)."""
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.07958029955625534, 0.0, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The values of NF4's codes (Dettmers et al. 2023, "QLoRA", appendix E), the two in the middle exchanged: code 8
is the number 0, with which kernels fill up."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A linear layer's weight [out, in]: ``w = (codes - zeros) * scales``, group by group of inputs, or, with
    ``offsets``, ``w = codes * scales + offsets``, or, with ``levels``, ``w = levels[codes] * scales``."""

    bits: int  # 8 or 4
    codes: Tensor  # [out, in]; 8 bits: int8, -127..127 (in groups from -128), or float8_e4m3fn; 4 bits: uint8, 0..15
    scales: Tensor  # 8 bits: [out] float32; in groups: [out, ceil(in / group)] float32
    zeros: Tensor | None = None  # 4 bits: [out, ceil(in / group)] uint8, 0..15; None: all 8
    group: int | None = None  # inputs that share a scale; 8 bits: None: all of an output's
    offsets: Tensor | None = None  # 4 bits: [out, ceil(in / group)] float32, in the place of zeros
    levels: tuple[float, ...] | None = (
        None  # 4 bits: what codes stand for, `E2M1` (MXFP4) or `NF4`; None: -8..7
    )

    def __post_init__(self) -> None:
        outputs, inputs = self.codes.shape
        if self.bits == 8 and self.group is None:
            assert self.codes.dtype in (torch.int8, FP8) and self.scales.shape == (outputs,)
            assert self.zeros is None and self.offsets is None
            return
        assert self.group is not None and self.scales.shape == (outputs, -(-inputs // self.group))
        if self.bits == 8:
            assert self.codes.dtype in (torch.int8, FP8) and self.zeros is None and self.offsets is None
            return
        assert self.bits == 4 and self.codes.dtype is torch.uint8
        assert self.zeros is None or self.zeros.shape == self.scales.shape
        assert self.offsets is None or (self.zeros is None and self.offsets.shape == self.scales.shape)
        assert self.levels is None or (self.zeros is None and self.offsets is None)

    @staticmethod
    def of_values(values: Tensor) -> QuantizedWeight:
        """Any weight [out, in] float32, each input a group of its own: of forms that no kernel has codes for, which
        take it as floats."""
        ones = torch.full(values.shape, 9, dtype=torch.uint8)
        return QuantizedWeight(4, ones, values, None, 1)

    @property
    def is_codes(self) -> bool:
        """Whether kernels of integers may have it: not, if its groups are smaller than theirs."""
        return not self.is_fp8 and (self.group is None or self.group % 8 == 0)

    @property
    def is_fp8(self) -> bool:
        return self.codes.dtype is FP8

    @property
    def is_exact_in_halves(self) -> bool:
        """Whether kernels that keep scales as float16 with one exponent for the layer lose nothing of them, if they are
        powers of two: they reach over 33 of them."""
        known = self.scales[self.scales != 0].abs()
        return known.numel() == 0 or float(known.min()) * 2.0**33 >= float(known.max())

    @property
    def is_wide(self) -> bool:
        """Whether kernels of four bits hold it as two matrices; see `doubled`."""
        return self.offsets is not None or (self.bits == 8 and self.group is not None)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight that the codes stand for, [out, in], computed in float32; some rows at a time, for what floats of
        four bytes take while they are computed is several times the codes."""
        outputs, inputs = self.codes.shape
        values = torch.empty((outputs, inputs), dtype=dtype, device=self.codes.device)
        for part in _row_pieces(outputs, inputs):
            values[part] = self._rows(part)._values()
        return values

    def _rows(self, part: slice) -> QuantizedWeight:
        return replace(
            self,
            codes=self.codes[part],
            scales=self.scales[part],
            zeros=None if self.zeros is None else self.zeros[part],
            offsets=None if self.offsets is None else self.offsets[part],
        )

    def _values(self) -> Tensor:
        if self.group is None:
            return self.codes.float() * self.scales[:, None]
        inputs = self.codes.shape[1]

        def spread(of_groups: Tensor) -> Tensor:
            assert self.group is not None
            return of_groups.repeat_interleave(self.group, dim=1)[:, :inputs]

        scales = spread(self.scales)
        if self.bits == 8:
            return self.codes.float() * scales
        if self.offsets is not None:
            return self.codes.float() * scales + spread(self.offsets)
        if self.levels is not None:
            return torch.tensor(self.levels, device=scales.device)[self.codes.long()] * scales
        if self.zeros is None:
            return (self.codes.float() - 8) * scales
        return (self.codes.float() - spread(self.zeros)) * scales

    def doubled(self) -> QuantizedWeight:
        """The same layer in codes of four bits with whole zero points, [out, 2 * in]: over rows ``x | x`` it gives what
        this one gives over ``x``. Nothing is rounded.

        Eight bits: c = 16 h + l. Example: c = -77 with scale 2 is h = -5, l = 3: ``16 * 2 * (-5) + 2 * 3 = -154``. The
        left half keeps h + 8 with zero point 8, the right one l with zero point 0. Offsets: the left half keeps the
        codes with zero point 0, the right one ones, whose scales are the offsets.
        """
        assert self.is_wide and self.group is not None and self.codes.shape[1] % self.group == 0
        codes, scales = self.codes, self.scales
        outputs, inputs = codes.shape
        both = torch.empty((outputs, 2 * inputs), dtype=torch.uint8)
        left, right = both[:, :inputs], both[:, inputs:]
        none = torch.zeros(scales.shape, dtype=torch.uint8)
        if self.offsets is not None:
            left.copy_(codes)
            right.fill_(9)
            return QuantizedWeight(
                4, both, torch.cat([scales, self.offsets], 1), torch.cat([none, none + 8], 1), self.group
            )
        for part in _row_pieces(outputs, inputs):
            left[part] = (codes[part] >> 4) + 8
            right[part] = codes[part] & 15
        return QuantizedWeight(
            4, both, torch.cat([16 * scales, scales], 1), torch.cat([none + 8, none], 1), self.group
        )

    def in_order(self, order: Tensor) -> QuantizedWeight:
        """With output ``order[i]`` int64 in place i, of all outputs or some of them."""
        order = order.to(self.codes.device)
        zeros = None if self.zeros is None else self.zeros[order]
        offsets = None if self.offsets is None else self.offsets[order]
        return replace(self, codes=self.codes[order], scales=self.scales[order], zeros=zeros, offsets=offsets)


def stack_rows(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """One layer of the outputs of several: their rows one after the other. Of several kinds, it is one of floats."""
    first = parts[0]
    if len(parts) == 1:
        return first
    kinds = {(p.bits, p.group, p.offsets is None, p.levels, p.codes.dtype) for p in parts}
    if len(kinds) > 1:
        return QuantizedWeight.of_values(torch.cat([part.dequantize() for part in parts]))
    zeros = None
    if any(part.zeros is not None for part in parts):
        eights = [torch.full(part.scales.shape, 8, dtype=torch.uint8) for part in parts]
        zeros = torch.cat(
            [e if part.zeros is None else part.zeros for part, e in zip(parts, eights, strict=True)]
        )
    return QuantizedWeight(
        first.bits,
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        zeros,
        first.group,
        None if first.offsets is None else torch.cat([p.offsets for p in parts if p.offsets is not None]),
        first.levels,
    )


def quantize(weight: Tensor, scheme: Scheme) -> QuantizedWeight:
    """Round a float weight [out, in] to a scheme's codes, to the nearest.

    int8: symmetric, one scale per output, ``max |w| / 127``. fp8 (e4m3): the same with 448. int4: one scale per group
    of inputs; the element of largest magnitude gets code 0, which stands for -8 (the scale is negative if that element
    is positive), so that all sixteen codes are in use, as in ggml's Q4_0. Scales are rounded to float16 first, and the
    codes are those nearest for the rounded scale.
    """
    weight = weight.detach()
    return quantize_read(lambda start, end: weight[start:end], weight.shape, scheme, weight.device)


def quantize_read(
    read: ReadRows, shape: Sequence[int], scheme: Scheme, device: torch.device | None = None
) -> QuantizedWeight:
    """`quantize` of a weight that is never in memory as floats: ``read`` gives its rows, in order, a few at a time;
    int4 reads all of them twice, since the scales of a layer share an exponent."""
    outputs, inputs = shape
    parts = _row_pieces(outputs, inputs)
    kind = torch.uint8 if scheme.bits == 4 else FP8 if scheme.floats else torch.int8
    codes = torch.empty((outputs, inputs), dtype=kind, device=device)  # in place: there is one copy
    if scheme.bits == 8:
        of_outputs = torch.empty(outputs, device=device)
        for part in parts:
            values = read(part.start, part.stop).float()
            codes[part], of_outputs[part] = (_to_fp8 if scheme.floats else _to_int8)(values)
        return QuantizedWeight(8, codes, of_outputs)
    group = scheme.group
    assert group is not None
    largest = [_largest(_in_groups(read(part.start, part.stop), group)) for part in parts]
    scales = _as_float16(torch.cat(largest).div_(-8))
    for part in parts:
        codes[part] = _to_int4(_in_groups(read(part.start, part.stop), group), scales[part])[:, :inputs]
    return QuantizedWeight(4, codes, scales, None, group)


_CHUNK = 1 << 18
"""Elements that are worked on at a time, so that temporary tensors stay in a cache."""


def _row_pieces(outputs: int, inputs: int) -> list[slice]:
    """Of a matrix, each of some `_CHUNK` elements. Example: 5 rows of half a chunk: 0-2, 2-4, 4-5."""
    step = max(1, _CHUNK // max(1, inputs))
    return [slice(start, min(start + step, outputs)) for start in range(0, outputs, step)]


def _to_int8(values: Tensor) -> tuple[Tensor, Tensor]:
    """[n, in] float32 -> codes [n, in] int8, scales [n]."""
    scales = values.abs().amax(dim=1) / INT8_MAX
    codes = values.div(_not_zero(scales)[:, None]).round_().clamp_(-INT8_MAX, INT8_MAX)
    return codes.to(torch.int8), scales


def _to_fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """[n, in] float32 -> codes [n, in] float8_e4m3fn, scales [n]."""
    scales = values.abs().amax(dim=1) / FP8_MAX
    codes = values.div(_not_zero(scales)[:, None]).clamp_(-FP8_MAX, FP8_MAX)
    return codes.to(FP8), scales


def _in_groups(values: Tensor, group: int) -> Tensor:
    """[n, in] -> [n, groups, group] float32, the last group padded with zeros."""
    rows, inputs = values.shape
    groups = -(-inputs // group)
    wide = values.float()
    if groups * group != inputs:
        wide = torch.nn.functional.pad(wide, (0, groups * group - inputs))
    return wide.view(rows, groups, group)


def _largest(grouped: Tensor) -> Tensor:
    """[n, groups, group] -> [n, groups]: the element of largest magnitude, with its sign."""
    low, high = grouped.amin(dim=2), grouped.amax(dim=2)
    return torch.where(-low > high, low, high)


def _to_int4(grouped: Tensor, scales: Tensor) -> Tensor:
    """[n, groups, group] and [n, groups] -> codes [n, groups * group] uint8."""
    codes = grouped.div(_not_zero(scales)[:, :, None]).round_().add_(8).clamp_(0, 15)
    return codes.view(grouped.shape[0], -1).to(torch.uint8)


def _not_zero(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, torch.ones_like(scales), scales)


def _as_float16(scales: Tensor) -> Tensor:
    """Rounded to the eleven digits of float16 with the layer's own exponent, as packed weights keep them."""
    top = float(scales.abs().max())
    if top == 0:
        return scales
    factor = 2.0 ** (10 - torch.frexp(torch.tensor(top)).exponent.item())
    return (scales * factor).half().float() / factor


def quantize_rows(x: Tensor, kind: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Rows to int8 or fp8 with a scale per row, as the dynamic kernels do: [T, K] -> codes [T, K] of ``kind``, scales
    [T] float32."""
    values = x.float()
    top = values.abs().amax(dim=1)
    largest = FP8_MAX if kind is FP8 else INT8_MAX
    # torch.div of two tensors: a number over a tensor would be the reciprocal times the number, rounded twice
    inverse = torch.where(top == 0, torch.zeros_like(top), torch.div(torch.full_like(top, largest), top))
    scaled = values * inverse[:, None]
    codes = scaled.clamp_(-FP8_MAX, FP8_MAX).to(FP8) if kind is FP8 else scaled.round_().to(torch.int8)
    return codes, top / largest
