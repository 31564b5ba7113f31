"""Low-rank additions on the native library (``csrc/adapters.h``)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftwise.kernels.additions import Addition, Additions, AdditionSite
from draftwise.kernels.cpu.attention import DTYPES
from draftwise.kernels.cpu.checks import require
from draftwise.kernels.cpu.library import NativeLibrary, release_with
from draftwise.kernels.cpu.linear import NativeLinear
from draftwise.kernels.handles import Linear
from draftwise.kernels.ranks import Ranks

_PTR, _I64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class NativeAdditions(Additions):
    """``pointer`` is a ``dw::Adapters*``, valid while this object lives; it keeps the layers of the adapters."""

    def __init__(
        self,
        library: NativeLibrary,
        sites: Sequence[AdditionSite],
        dtype: torch.dtype,
        pack: Callable[[Tensor], Linear],
        ranks: Ranks | None = None,
    ) -> None:
        """``pack``: makes layers of the adapters' weights.
        ``ranks``: those that have parts of the layers with `AdditionSite.summed`."""
        require(ranks is not None or not any(site.summed for site in sites), "ranks for what they sum up")
        create = library.function("dw_adapters_create", _PTR, [_I64, _PTR, _INT])
        self._put = library.function("dw_adapters_put", None, [_PTR, _I64, *[_PTR] * 5])
        self._drop = library.function("dw_adapters_drop", None, [_PTR, _I64])
        sizes = [size for site in sites for size in (site.inputs, site.outputs)]
        self.sites, self.ranks = tuple(sites), ranks
        self.pointer: int = create(len(sites), (_I64 * len(sizes))(*sizes), DTYPES[dtype])
        self._pack = pack
        self._kept: dict[int, list[NativeLinear]] = {}
        release_with(self, library.function("dw_adapters_free", None, [_PTR]), self.pointer)

    def put(self, number: int, additions: Sequence[Addition | None]) -> None:
        require(len(additions) == len(self.sites), "an addition, or None, for each site")
        ups = [up for addition in additions if addition is not None for up in addition.ups]
        downs = [None if addition is None else self._layer(addition.down) for addition in additions]
        layers = [self._layer(up.weight) for up in ups]
        self._put(
            self.pointer,
            number,
            (_PTR * len(downs))(*(None if layer is None else layer.pointer for layer in downs)),
            (_I64 * len(downs))(*(0 if a is None else len(a.ups) for a in additions)),
            (_PTR * len(ups))(*(layer.pointer for layer in layers)),
            (_I64 * len(ups))(*(up.low.start for up in ups)),
            (_I64 * len(ups))(*(up.outputs.start for up in ups)),
        )
        self._kept[number] = [*filter(None, downs), *layers]

    def drop(self, number: int) -> None:
        self._drop(self.pointer, number)
        self._kept.pop(number, None)

    def _layer(self, weight: Tensor) -> NativeLinear:
        layer = self._pack(weight)
        assert isinstance(layer, NativeLinear)
        return layer
