"""Linear layers to which the adapters of a pass add their low-rank products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.kernels.additions import Addition, Additions, AdditionSite, Up
from draftwise.kernels.base import Ops
from draftwise.kernels.handles import Linear
from draftwise.kernels.split import Summed
from draftwise.models.base import LinearSite, SitePart
from draftwise.models.lora.low_rank import LowRank
from draftwise.models.words import shorten


def additions_of(
    adapter: Mapping[str, LowRank], sites: Sequence[LinearSite], dtype: torch.dtype, device: torch.device
) -> list[Addition | None]:
    """What an adapter that was checked adds at each site; None: nothing."""
    return [_addition(adapter, site, dtype, device) for site in sites]


def check_fits(adapter: Mapping[str, LowRank], sites: Sequence[LinearSite]) -> None:
    """
    Raises:
        ModelLoadError: a layer that it changes is none of the model's, or has another shape.
    """
    places = {part.name: _whole(site, part) for site in sites for part in site.parts}
    unknown = sorted(adapter.keys() - places.keys())
    if unknown:
        raise ModelLoadError(f"the model has no linear layers of these names to add to: {shorten(unknown)}")
    present: dict[str, set[int]] = {}
    for site in sites:
        for one in site.parts:
            rows = range(one.outputs) if one.rows is None else one.rows.tolist()
            present.setdefault(one.name, set()).update(rows)
    own = {part.name: part.outputs for site in sites for part in site.parts}
    for name, part in adapter.items():
        inputs, outputs = places[name]
        if part.down.shape[1] != inputs or part.up.shape[0] != outputs:
            raise ModelLoadError(
                f"{name}: the adapter is for {part.up.shape[0]} outputs over {part.down.shape[1]} inputs, "
                f"the model's has {outputs} over {inputs}"
            )
        if len(present[name]) < own[name]:
            raise ModelLoadError(
                f"{name}: only some of its outputs are computed as a linear layer to which something can be added"
            )


def site_of(site: LinearSite) -> AdditionSite:
    """A site, as kernels know it."""
    summed = isinstance(site.weight, Summed)
    return AdditionSite(site.inputs, sum(part.size for part in site.parts), tuple(_parts(site)), summed)


def _parts(site: LinearSite) -> Iterator[tuple[int, slice]]:
    """Of each part of a site, which layer of the checkpoint it is of, and its outputs."""
    names = list(dict.fromkeys(part.name for part in site.parts))
    start = 0
    for part in site.parts:
        yield names.index(part.name), slice(start, start + part.size)
        start += part.size


class PackedAdapter:
    """An adapter's additions as layers, for passes call by call."""

    def __init__(self, additions: Sequence[Addition | None], sites: Sequence[LinearSite], ops: Ops) -> None:
        self._at: dict[int, _Packed] = {}
        for site, addition in zip(sites, additions, strict=True):
            if addition is not None:
                down = ops.pack_exact(addition.down)
                ups = tuple((up.low, up.outputs, ops.pack_exact(up.weight)) for up in addition.ups)
                packed = _Packed(Summed(down) if isinstance(site.weight, Summed) else down, ups)
                self._at[id(site.weight)] = packed

    def at(self, weight: Linear) -> _Packed | None:
        return self._at.get(id(weight))


class _Packed(NamedTuple):
    down: Linear
    ups: tuple[tuple[slice, slice, Linear], ...]  # columns of down's result, outputs, [outputs, r]


def _whole(site: LinearSite, part: SitePart) -> tuple[int, int]:
    """(inputs, outputs) of a layer as it is stored."""
    if part.cut is None:
        return site.inputs, part.outputs
    outputs, inputs = part.cut.shape
    return inputs, outputs


def _own(low: LowRank, part: SitePart) -> tuple[Tensor, Tensor]:
    """``down`` [r, inputs] and ``up`` [outputs, r] of what this rank has of a layer.

    Example: rank 1 of 2 has rows 4-7 of q's 8 and adds rows 4-7 of up to them, of a down that it has whole. Of o it has
    columns 4-7 of 8: it multiplies with these of down, all ranks sum what they got, and each has up whole.
    """
    if part.cut is None:
        return low.down, low.up
    rows, columns = part.cut.ranges
    down = torch.cat([low.down[:, start:end] for start, end in columns], dim=1)
    return down, torch.cat([low.up[start:end] for start, end in rows])


def _addition(
    adapter: Mapping[str, LowRank], site: LinearSite, dtype: torch.dtype, device: torch.device
) -> Addition | None:
    downs: list[Tensor] = []
    ups: list[Up] = []
    shared: dict[str, slice] = {}  # of a layer that stands there in several parts, down is computed once
    first = 0
    for part, (number, outputs) in zip(site.parts, _parts(site), strict=True):
        low = adapter.get(part.name)
        if low is None:
            continue
        down, own_up = _own(low, part)
        if part.name not in shared:
            shared[part.name] = slice(first, first + low.rank)
            downs.append(down.to(dtype))
            first += low.rank
        up = (own_up.float() * low.scale).to(dtype)
        up = up if part.rows is None else up[part.rows]
        ups.append(Up(number, shared[part.name], outputs, up.to(device).contiguous()))
    return Addition(torch.cat(downs).to(device).contiguous(), tuple(ups)) if downs else None


class _Wrapping:
    """Stands for ``inner`` as `Ops`, with linear layers of its own."""

    def __init__(self, inner: Ops) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def as_ops(self) -> Ops:
        """The same object."""
        return cast(Ops, self)


class AddingOps(_Wrapping):
    """``inner``, whose linear layers add what ``additions`` say: for passes that are recorded or captured. Which
    adapter a row has is looked up when such a pass is run."""

    def __init__(self, inner: Ops, additions: Additions, sites: Sequence[LinearSite]) -> None:
        super().__init__(inner)
        self._additions = additions
        self._numbers = {id(site.weight): number for number, site in enumerate(sites)}

    def linear(self, x: Tensor, weight: Linear, out: Tensor | None = None) -> Tensor:
        """As `Ops.linear`."""
        result = self._inner.linear(x, weight, out)
        number = self._numbers.get(id(weight))
        if number is not None:
            self._inner.add_low_rank(x, result, self._additions, number)
        return result


class AdaptedOps(_Wrapping):
    """``inner``, whose linear layers add the adapters of the pass under way, call by call.

    A row's sum is the layer's own product, rounded, plus the low-rank product, rounded: whatever else is in the batch.
    """

    def __init__(self, inner: Ops) -> None:
        super().__init__(inner)
        self._active: list[tuple[Tensor | None, PackedAdapter]] = []

    def begin(self, rows: Sequence[tuple[Tensor | None, PackedAdapter]]) -> None:
        """A pass begins: rows (int64 [n]; None: all) of each adapter."""
        self._active = list(rows)

    def end(self) -> None:
        """The pass is over, however it ended."""
        self._active = []

    def linear(self, x: Tensor, weight: Linear, out: Tensor | None = None) -> Tensor:
        """As `Ops.linear`."""
        inner = self._inner
        result = inner.linear(x, weight, out)
        for rows, adapter in self._active:
            packed = adapter.at(weight)
            if packed is None:
                continue
            low = inner.linear(x if rows is None else x[rows].contiguous(), packed.down)
            for part, outputs, up in packed.ups:
                added = inner.linear(low[:, part].contiguous(), up)
                if rows is None:
                    result[:, outputs] += added
                else:
                    result[rows, outputs] = result[rows, outputs] + added
        return result
