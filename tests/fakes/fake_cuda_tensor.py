"""Tensors that say they lie on ``cuda:0``: see `fake_cuda`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

DEVICE = torch.device("cuda", 0)


class DeviceError(RuntimeError):
    """What a device, or torch on one, would not do."""


class Memory:
    """An allocation: alive as long as some tensor looks into it."""

    __slots__ = ("__weakref__", "graph", "life")

    def __init__(self, graph: Any) -> None:
        self.graph = graph  # in whose capture it was made; None: in none
        self.life = Life()


class Life:
    """``ended``: when an allocation was given back, by the device's clock; None: it was not."""

    __slots__ = ("ended",)

    def __init__(self) -> None:
        self.ended: int | None = None


class CudaTensor(Tensor):
    """``inner``: the tensor on the host that holds the numbers."""

    inner: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, inner: Tensor, memory: Memory) -> CudaTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=DEVICE,
        )  # fmt: skip
        made.inner, made.memory = inner, memory
        return made  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return now().dispatch(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"CudaTensor({tuple(self.shape)}, {self.dtype})"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return repr(self)

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    # What torch's own methods ask of a device before they call an operation that could be caught.

    def __getitem__(self, index: Any) -> Any:
        return now().index(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        now().put(self, index, value)

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(self.shape[0])])

    def unbind(self, dim: int = 0) -> Any:
        return tuple(self.select(dim, i) for i in range(self.shape[dim]))

    def __invert__(self) -> Any:
        return torch.bitwise_not(self)

    def contiguous(self, *args: Any, **kwargs: Any) -> Any:
        return self if self.inner.is_contiguous() else self.clone(memory_format=torch.contiguous_format)

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return now().to_host(self, False)

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        return now().convert(self, args, kwargs)

    def item(self) -> Any:
        return now().to_host(self, False).item()

    def tolist(self) -> Any:
        return now().to_host(self, False).tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    __array__ = numpy

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    __index__ = __int__


class Device(Protocol):
    """What a tensor asks of the device that holds it."""

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any: ...

    def index(self, x: CudaTensor, index: Any) -> Any: ...

    def put(self, x: CudaTensor, index: Any, value: Any) -> None: ...

    def to_host(self, x: CudaTensor, non_blocking: bool) -> Tensor: ...

    def convert(self, x: CudaTensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor: ...


active: list[Device] = []
"""The devices that are there; the last one counts."""


def now() -> Device:
    """The device."""
    if not active:
        raise DeviceError("the device is gone")
    return active[-1]


def spoil(x: Tensor) -> None:
    """Write what nobody expects."""
    if x.dtype.is_floating_point:
        x.fill_(float("nan"))
    elif x.dtype is not torch.bool:
        x.fill_(101 if x.dtype.itemsize == 1 else 10101)
