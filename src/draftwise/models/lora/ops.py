"""Linear layers to which the adapters of a pass add their low-rank products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.kernels.additions import Addition, Additions, AdditionSite
from draftwise.kernels.base import Ops
from draftwise.kernels.handles import Linear
from draftwise.kernels.split import Summed
from draftwise.models.base import LinearSite, SitePart
from draftwise.models.lora.low_rank import LowRank
from draftwise.models.words import shorten


class PackedAdapter:
    """An adapter, packed for the kernels of a model."""

    def __init__(self, adapter: Mapping[str, LowRank], sites: Sequence[LinearSite], ops: Ops) -> None:
        """
        Raises:
            ModelLoadError: a layer that it changes is none of the model's, or has another shape.
        """
        places = {part.name: _whole(site, part) for site in sites for part in site.parts}
        unknown = sorted(adapter.keys() - places.keys())
        if unknown:
            raise ModelLoadError(
                f"the model has no linear layers of these names to add to: {shorten(unknown)}"
            )
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
        self.additions = [_pack(adapter, site, ops) for site in sites]
        """Of each site."""
        self._at = {id(site.weight): one for site, one in zip(sites, self.additions, strict=True)}

    def at(self, weight: Linear) -> Addition | None:
        return self._at.get(id(weight))


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


def _pack(adapter: Mapping[str, LowRank], site: LinearSite, ops: Ops) -> Addition | None:
    downs, ups, start, first = [], [], 0, 0
    shared: dict[str, slice] = {}  # of a layer that stands there in several parts, down is computed once
    for part in site.parts:
        low = adapter.get(part.name)
        if low is not None:
            down, own_up = _own(low, part)
            if part.name not in shared:
                shared[part.name] = slice(first, first + low.rank)
                downs.append(down.to(ops.dtype))
                first += low.rank
            up = (own_up.float() * low.scale).to(ops.dtype)
            up = up if part.rows is None else up[part.rows]
            ups.append((shared[part.name], slice(start, start + part.size), ops.pack_exact(_on(up, ops))))
        start += part.size
    if not downs:
        return None
    packed = ops.pack_exact(_on(torch.cat(downs), ops))
    return Addition(Summed(packed) if isinstance(site.weight, Summed) else packed, tuple(ups))


def _on(weight: Tensor, ops: Ops) -> Tensor:
    return weight.to(ops.device).contiguous()


class AdaptedOps:
    """``inner``, whose linear layers add the adapters of the pass under way; stands for it as `Ops`.

    A row's sum is the layer's own product, rounded, plus the low-rank product, rounded: whatever else is in the batch.
    A pass that is recorded says itself which adapters its rows have, when it is run.
    """

    def __init__(self, inner: Ops) -> None:
        self._inner = inner
        self._active: list[tuple[Tensor | None, PackedAdapter]] = []
        self._recorded: tuple[Additions, dict[int, int]] | None = None

    @staticmethod
    def over(inner: Ops) -> tuple[Ops, AdaptedOps]:
        """The same object as operations, and as what is told of passes."""
        found = AdaptedOps(inner)
        return cast(Ops, found), found

    def record(self, sites: Sequence[LinearSite]) -> Additions | None:
        """From now on passes are recorded and nothing else: the adapters that these will add. None: the kernels record
        no additions, and nothing has changed."""
        found = self._inner.pack_additions(
            [
                AdditionSite(
                    site.inputs, sum(part.size for part in site.parts), isinstance(site.weight, Summed)
                )
                for site in sites
            ]
        )
        if found is not None:
            self._recorded = found, {id(site.weight): number for number, site in enumerate(sites)}
        return found

    def begin(self, rows: Sequence[tuple[Tensor | None, PackedAdapter]]) -> None:
        """A pass begins: rows (int64 [n]; None: all) of each adapter."""
        self._active = list(rows)

    def end(self) -> None:
        """The pass is over, however it ended."""
        self._active = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def linear(self, x: Tensor, weight: Linear, out: Tensor | None = None) -> Tensor:
        """As `Ops.linear`."""
        inner = self._inner
        result = inner.linear(x, weight, out)
        if self._recorded is not None:
            additions, numbers = self._recorded
            if id(weight) in numbers:
                inner.add_low_rank(x, result, additions, numbers[id(weight)])
            return result
        for rows, adapter in self._active:
            addition = adapter.at(weight)
            if addition is None:
                continue
            low = inner.linear(x if rows is None else x[rows].contiguous(), addition.down)
            for part, outputs, up in addition.ups:
                added = inner.linear(low[:, part].contiguous(), up)
                if rows is None:
                    result[:, outputs] += added
                else:
                    result[rows, outputs] = result[rows, outputs] + added
        return result
