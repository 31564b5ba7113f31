"""Tensors of a checkpoint that are read when their numbers are needed.

Transformers stacks, joins and turns tensors on their way from a checkpoint into its modules, above all the experts of a
mixture. What it does to a `Deferred` is written down, and done when its numbers are asked for: those of the whole, or
those of one expert. So the experts of a layer are never in memory all at once, and an expert that is nothing but rows
of layers of the checkpoint can be packed from these, its codes as they are.

Worked example: gates a, b and ups c, d of two experts, each [I, H], become ``cat((stack((a, b)), stack((c, d))), 1)``,
[2, 2 * I, H]. Its part 1 is ``cat((b, d), 0)``: the rows of b, and below them those of d.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from draftwise.models.general.stored import StoredLayer

_aten = torch.ops.aten
_COPIES = frozenset({_aten._to_copy.default, _aten.clone.default, _aten.detach.default, _aten.alias.default})
_TURNS = frozenset({_aten.t.default, _aten.transpose.int})
_JOINS = frozenset({_aten.stack.default, _aten.cat.default})
_NOTED = _COPIES | _TURNS | _JOINS | {
    _aten.view.default, _aten._unsafe_view.default, _aten._reshape_alias.default, _aten.permute.default,
    _aten.select.int, _aten.slice.Tensor, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.expand.default,
    _aten.split.Tensor, _aten.split_with_sizes.default, _aten.unbind.int,
}  # fmt: skip
"""What is written down; whatever else is done to one is done to its numbers at once."""

LayerRows = list[tuple[StoredLayer, Tensor | None]]
"""Rows of layers below each other, as `stored.pack_stored` takes them."""


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of a checkpoint.

    Attributes:
        read: its numbers.
        layer: the linear layer that it is the weight of, if it is a matrix.
        part: entry i of its first dimension; None: it is read as a whole.
    """

    read: Callable[[], Tensor]
    layer: StoredLayer | None = None
    part: Callable[[int], Source] | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """``func(*args, **kwargs)``; ``item``: which of its results, if it gives several."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    item: int | None = None


class Deferred(Tensor):
    """A tensor of known shape and type. ``made``: where its numbers come from."""

    made: Source | Step
    shell: Tensor  # of its shape and type, without numbers

    @staticmethod
    def __new__(cls, made: Source | Step, shell: Tensor) -> Deferred:
        # Its strides are the shell's: torch decides by them whether a reshape can be a view.
        found: Deferred = torch.Tensor._make_wrapper_subclass(
            cls, shell.shape, strides=shell.stride(), dtype=shell.dtype
        )
        found.made = made
        found.shell = shell
        return found

    def __init__(self, made: Source | Step, shell: Tensor) -> None:
        """``shell``: a tensor on torch's meta device of its shape and type."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _NOTED:
            return func(*tree_map_only(Deferred, numbers, args), **tree_map_only(Deferred, numbers, kwargs))
        if func is _aten._to_copy.default:
            (of,) = args
            shell: Any = torch.empty_like(of.shell, dtype=kwargs.get("dtype") or of.dtype)
        else:
            shells = tree_map_only(Tensor, _shell, args)
            shell = func(*shells, **tree_map_only(Tensor, _shell, kwargs))
        if not isinstance(shell, Tensor):
            return [cls(Step(func, args, kwargs, i), each) for i, each in enumerate(shell)]
        return cls(Step(func, args, kwargs), shell)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Deferred({list(self.shape)}, {self.dtype})"


def deferred(shape: Sequence[int], dtype: torch.dtype, source: Source) -> Deferred:
    """A tensor of a checkpoint; ``source`` gives numbers of this type."""
    return Deferred(source, torch.empty(tuple(shape), dtype=dtype, device="meta"))


def numbers(of: Tensor) -> Tensor:
    """Read it. What is joined is read piece by piece into its place.

    Raises:
        ModelLoadError: a file cannot be read.
    """
    if not isinstance(of, Deferred):
        return of
    made = of.made
    if isinstance(made, Source):
        return made.read()
    if made.func not in _JOINS:
        found: Any = made.func(*tree_map_only(Deferred, numbers, made.args), **made.kwargs)
        value: Tensor = found if made.item is None else found[made.item]
        return value
    whole = torch.empty(of.shape, dtype=of.dtype)
    dim, start = _dim(made, of.ndim), 0
    for piece in made.args[0]:
        if made.func is _aten.stack.default:
            whole.select(dim, start).copy_(numbers(piece))
            start += 1
        else:
            whole.narrow(dim, start, piece.shape[dim]).copy_(numbers(piece))
            start += piece.shape[dim]
    return whole


def part(of: Tensor, i: int) -> Tensor:
    """``of[i]``, made of as little as it takes."""
    if isinstance(of, Deferred):
        made = of.made
        if isinstance(made, Source):
            if made.part is not None:
                return deferred(of.shape[1:], of.dtype, made.part(i))
        elif made.func in _COPIES:
            found = part(made.args[0], i)
            return found if found.dtype is of.dtype else found.to(of.dtype)
        elif made.func is _aten.stack.default and _dim(made, of.ndim) == 0:
            piece: Tensor = made.args[0][i]
            return piece
        elif made.func is _aten.cat.default and (dim := _dim(made, of.ndim)) > 0:
            return torch.cat([part(piece, i) for piece in made.args[0]], dim - 1)
        elif made.func is _aten.transpose.int:
            a, b = (each % of.ndim for each in made.args[1:3])
            if a > 0 and b > 0:
                return part(made.args[0], i).transpose(a - 1, b - 1)
    return of[i]


def rows_of(of: Tensor) -> LayerRows | None:
    """A matrix as rows of layers of the checkpoint; None: it is something else."""
    if not isinstance(of, Deferred):
        return None
    made = of.made
    if isinstance(made, Source):
        return None if made.layer is None else [(made.layer, None)]
    if made.func in _COPIES:
        return rows_of(made.args[0])
    if made.func is _aten.cat.default and _dim(made, 2) == 0:
        found = [rows_of(piece) for piece in made.args[0]]
        return (
            None if any(each is None for each in found) else [pair for each in found for pair in each or ()]
        )
    if made.func in _TURNS:
        inner = made.args[0]
        while isinstance(inner, Deferred) and isinstance(inner.made, Step) and inner.made.func in _COPIES:
            inner = inner.made.args[0]
        if isinstance(inner, Deferred) and isinstance(inner.made, Step) and inner.made.func in _TURNS:
            return rows_of(inner.made.args[0])
    return None


def _shell(tensor: Tensor) -> Tensor:
    return tensor.shell if isinstance(tensor, Deferred) else torch.empty_like(tensor, device="meta")


def _dim(made: Step, ndim: int) -> int:
    """Where pieces are joined."""
    dim: int = made.args[1] if len(made.args) > 1 else made.kwargs.get("dim", 0)
    return dim % ndim
