"""Graphs without a GPU: a capture writes down the operations and their tensors, a replay does them again.

As with a device's graphs, nothing of the function that was captured runs in a replay: what it read of the host is what
it was then, and results come in the tensors of the capture. What a device could not capture is refused: reading a value
of a tensor on the host, making a tensor from host data, and tensors that the function got from outside afterwards.

All graphs share their memory, as those of a device's pool do: what a capture made holds rubbish once another one was
replayed, or the same one again. Pieces of one function find what its earlier pieces made.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftwise.graphs.backend import Fence, Graph, GraphBackend, Pieces

T = TypeVar("T")

_READS = {"aten::_local_scalar_dense", "aten::lift_fresh", "aten::nonzero", "aten::equal", "aten::is_nonzero"}
_UNFILLED = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided"}


def _tensors(tree: Any) -> list[Tensor]:
    """Those of an operation's arguments or results. By hand: torch's own way through trees took a third of the time of
    the tests."""
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []
    for part in tree if isinstance(tree, (tuple, list)) else ():
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, (tuple, list)):
            found += _tensors(part)
    return found


def _memory(x: Tensor) -> int:
    try:
        return x.untyped_storage().data_ptr()
    except NotImplementedError:  # weights in a library's own layout
        return id(x)


class _Operation(NamedTuple):
    """What was called, and its results; None for those that are views of what it got, or were written there: these have
    done their work in the memory of the operation's inputs."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: Sequence[Tensor | None]

    @property
    def does_something(self) -> bool:
        """A view is there once and for all; memory that is not filled is the capture's, with whatever stands there."""
        name, changes = _facts(self.func)
        return name not in _UNFILLED and (changes or not self.made or any(x is not None for x in self.made))

    def in_place(self) -> _Operation:
        """The same, but written where the results of the capture are, if torch has a form of it that does so."""
        form = _form_with_outputs(self.func)
        if form is None or any(x is None for x in self.made):
            return self
        func, names = form
        return _Operation(func, self.args, self.kwargs | dict(zip(names, self.made, strict=True)), ())


@cache
def _facts(func: Any) -> tuple[str, bool]:
    """An operation's name, and whether it changes what it gets. Asking torch each time takes as long as the work."""
    return func._schema.name, func._schema.is_mutable


@cache
def _form_with_outputs(func: Any) -> tuple[Any, tuple[str, ...]] | None:
    """Of an operation that changes nothing: the same one that writes into tensors which it gets under these names.
    With a kernel of its own: others would make a result and copy it."""
    if func._schema.is_mutable:
        return None
    arguments = [(x.name, str(x.type)) for x in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        outputs = tuple(x.name for x in other._schema.arguments if x.is_out)
        same = [(x.name, str(x.type)) for x in other._schema.arguments if not x.is_out] == arguments
        if same and outputs and torch._C._dispatch_has_kernel_for_dispatch_key(other.name(), "CPU"):
            return other, outputs
    return None


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pieces: list[list[_Operation]] = [[]]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and the guard took a tenth of a capture

    def cut(self) -> None:
        self.pieces.append([])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name, _ = _facts(func)
        if name in _READS:
            raise RuntimeError(f"{name} in a captured function waits for the device")
        result = func(*args, **kwargs)
        inputs = {_memory(x) for x in (*_tensors(args), *_tensors(tuple(kwargs.values())))}
        made = [x if x.numel() and _memory(x) not in inputs else None for x in _tensors(result)]
        self.pieces[-1].append(_Operation(func, args, kwargs, made))
        return result


class FakeGraph:
    """``pool``: the graphs that share their memory, of which the last one that was replayed has its contents; weak
    references, since a graph of a closed engine has to go."""

    def __init__(self, pieces: list[list[_Operation]], pool: list[weakref.ref[FakeGraph]]) -> None:
        assert all(pieces), "an empty piece"
        self._pieces = [[x.in_place() for x in piece if x.does_something] for piece in pieces]
        self._pool = pool
        self._made = [x for piece in pieces for operation in piece for x in operation.made if x is not None]
        self.spoil()

    def spoil(self) -> None:
        for x in self._made:
            if x.dtype.is_floating_point:
                x.fill_(float("nan"))
            elif x.dtype is not torch.bool:
                x.fill_(torch.iinfo(x.dtype).max)

    def replay(self, between: Callable[[int], object] | None = None) -> None:
        with torch.inference_mode():
            for reference in self._pool:
                graph = reference()
                if graph is not None:
                    graph.spoil()
            self._pool[:] = [weakref.ref(self)]
            for i, piece in enumerate(self._pieces):
                if i:
                    assert between is not None
                    between(i - 1)
                    assert self._pool[0]() is self, "graphs of the pool were replayed between pieces"
                self._again(piece)

    def _again(self, piece: list[_Operation]) -> None:
        for func, args, kwargs, made in piece:
            result = func(*args, **kwargs)
            if not made:
                continue
            for old, new in zip(made, _tensors(result), strict=True):
                if old is not None:
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
        self._pool: list[weakref.ref[FakeGraph]] = []

    def capture(self, run: Callable[[], T]) -> tuple[Graph, T]:
        graph, result = self.capture_pieces(lambda cut: run())
        assert isinstance(graph, FakeGraph)
        return graph, result

    def capture_pieces(self, run: Callable[[Callable[[], None]], T]) -> tuple[Pieces, T]:
        run(lambda: None)
        recorder = _Recorder()
        with ExitStack() as stack:
            for name in ("numpy", "tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__"):
                stack.enter_context(mock.patch.object(Tensor, name, _refuse))
            for name in ("from_numpy", "tensor", "as_tensor"):
                stack.enter_context(mock.patch.object(torch, name, _refuse))
            stack.enter_context(recorder)
            result = run(recorder.cut)
        self.num_graphs += len(recorder.pieces)
        return FakeGraph(recorder.pieces, self._pool), result

    def host_buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int64)

    def fence(self) -> Fence:
        return _Here()
