"""Modules of a Transformers model that our kernels compute instead."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from draftwise.kernels.base import Ops
from draftwise.kernels.handles import Linear
from draftwise.models.weights import Freed


class PackedLinear(nn.Module):
    """``nn.Linear`` on our kernels, in whatever format they keep weights.

    ``known``: what it answers in the next call, computed before; ``waits``: it answers with what it is given, and is
    computed later (`general.hoisting`).
    """

    def __init__(self, ops: Ops, weight: Linear, inputs: int, outputs: int) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.packed = weight
        self.known: Tensor | None = None
        self.waits = False
        self._ops = ops

    def compute_with(self, ops: Ops) -> None:
        """From now on by other operations, which take the same handle."""
        self._ops = ops

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., inputs] -> [..., outputs]."""
        if self.known is not None:
            return self.known
        if self.waits:
            return x
        rows = x.reshape(-1, self.in_features).contiguous()  # a transposed one may be a view still
        return self._product(rows).view(*x.shape[:-1], self.out_features)

    def _product(self, rows: Tensor) -> Tensor:
        return self._ops.linear(rows, self.packed)


class LinearUse:
    """Finds which linear layers are called and nothing else: some models read ``module.weight`` themselves.

    While it watches, every ``nn.Linear`` of the model is of a class whose ``weight`` can tell who reads it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._watched = [module for module in model.modules() if type(module) is nn.Linear]
        self.called: set[nn.Module] = set()
        self.read: set[nn.Module] = set()

    def __enter__(self) -> LinearUse:
        for module in self._watched:
            module.__class__ = _WatchedLinear
            object.__setattr__(module, "_use", self)
        return self

    def __exit__(self, *_: object) -> None:
        for module in self._watched:
            module.__class__ = nn.Linear
            object.__delattr__(module, "_use")

    @property
    def exchangeable(self) -> list[nn.Linear]:
        """In the order of the model."""
        used = (m for m in self._watched if m in self.called and m not in self.read)
        return [m for m in used if m.in_features and m.out_features]  # no shared expert is one of no rows


class _WatchedLinear(nn.Linear):
    _use: LinearUse

    def forward(self, input: Tensor) -> Tensor:
        self._use.called.add(self)
        parameters: dict[str, Any] = self._parameters
        if input.dtype is not parameters["weight"].dtype:
            self._use.read.add(self)  # what autocasting would do is not ours to do
        return nn.functional.linear(input, parameters["weight"], parameters["bias"])

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        self._use.read.add(self)
        weight: Any = self._parameters["weight"]
        return weight  # type: ignore[no-any-return]


def exchange(model: nn.Module, layers: list[nn.Linear], ops: Ops, head: nn.Module | None) -> int:
    """Pack linear layers and put the packed ones in their places; each float weight is freed before the next is packed.

    Args:
        head: the output layer, of which formats with few bits keep more.

    Returns:
        Bytes of the packed weights.
    """
    wanted, freed = set(layers), Freed()
    total = 0
    places = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    packed: dict[nn.Module, PackedLinear] = {}
    places.sort(key=lambda place: place[2] is not head)  # the largest one first, while little else is packed
    for parent, name, child in places:
        if child not in wanted:
            continue
        assert isinstance(child, nn.Linear)
        if child not in packed:
            weight, bias = child.weight.detach(), None if child.bias is None else child.bias.detach()
            handle = (
                ops.pack_head(weight) if child is head and bias is None else ops.pack_linear(weight, bias)
            )
            packed[child] = PackedLinear(ops, handle, child.in_features, child.out_features)
            total += handle.num_bytes
            freed.count(weight)
            del weight
            child.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        setattr(parent, name, packed[child])
    return total
