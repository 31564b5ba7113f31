"""Graphs without a GPU: a capture writes down the operations and their tensors, a replay does them again.

As with a device's graphs, nothing of the function that was captured runs in a replay: what it read of the host is what
it was then, and results come in the tensors of the capture. What a device could not capture is refused: reading a value
of a tensor on the host, making a tensor from host data, and tensors that the function got from outside afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from draftwise.graphs.backend import Fence, Graph, GraphBackend

T = TypeVar("T")

_READS = {"aten::_local_scalar_dense", "aten::lift_fresh", "aten::nonzero", "aten::equal", "aten::is_nonzero"}


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_flatten(tree)[0] if isinstance(x, Tensor)]


def _memory(x: Tensor) -> int:
    try:
        return x.untyped_storage().data_ptr()
    except NotImplementedError:  # weights in a library's own layout
        return id(x)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in _READS:
            raise RuntimeError(f"{func._schema.name} in a captured function waits for the device")
        result = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, _tensors(result)))
        return result


class FakeGraph:
    def __init__(self, operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]]) -> None:
        self._operations = operations

    def replay(self) -> None:
        with torch.inference_mode():
            for func, args, kwargs, results in self._operations:
                inputs = {_memory(x) for x in _tensors((args, kwargs))}
                again = _tensors(func(*args, **kwargs))
                for old, new in zip(results, again, strict=True):
                    # a view, or an operation in place, has done its work in the memory of its inputs
                    if old.numel() and _memory(old) not in inputs:
                        old.copy_(new)


class _Here:
    def synchronize(self) -> None:
        return


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("a captured function reads or makes host data")


class FakeGraphs(GraphBackend):
    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.num_graphs = 0

    def capture(self, run: Callable[[], T]) -> tuple[Graph, T]:
        run()
        recorder = _Recorder()
        with ExitStack() as stack:
            for name in ("numpy", "tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__"):
                stack.enter_context(mock.patch.object(Tensor, name, _refuse))
            for name in ("from_numpy", "tensor", "as_tensor"):
                stack.enter_context(mock.patch.object(torch, name, _refuse))
            stack.enter_context(recorder)
            result = run()
        self.num_graphs += 1
        return FakeGraph(recorder.operations), result

    def host_buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int64)

    def fence(self) -> Fence:
        return _Here()
