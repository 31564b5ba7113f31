"""Mixtures of experts of a Transformers model on our kernels.

Transformers keeps the experts of a layer in one module, as stacked parameters: ``gate_up_proj`` and ``down_proj``, and
biases if there are any. Gate and up may stand one behind the other or take turns, matrices may be transposed, and the
activation is the module's own code. None of that is asked of the class: what the module makes of a few rows is
compared with each of the forms that our kernels know, and a module that is none of them stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from draftwise.errors import ModelLoadError
from draftwise.kernels.base import Ops
from draftwise.kernels.handles import Experts, Linear
from draftwise.kernels.mixture import gated
from draftwise.kernels.ranks import Part
from draftwise.kernels.routing import Activation, Routing
from draftwise.kernels.split import summed_experts
from draftwise.models.general.expert_weights import ExpertWeights, Form, tensor_of

_ROWS = 6  # of the sample
_GATES = (1.0, 9.0)  # mean size of the gates that the sample makes: also such as a limit would cut
_LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.03, torch.float16: 0.01}
"""Mean difference over the deviation. Another activation makes a tenth, another order of the weights more than one."""
_PARAMETERS = frozenset({"gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"})


@dataclass(frozen=True)
class Call:
    """A call of a module as it was seen: names of its arguments, and their values, [T, H], [T, K], [T, K]."""

    names: tuple[str, ...]
    x: Tensor
    chosen: Tensor
    weights: Tensor


class ExpertsMisread(ModelLoadError):
    """Experts that were packed as the model was built are called in a way that these do not understand."""


class ExpertsUse:
    """While it watches, the last call of every module that may be a mixture of experts is kept.

    Calls of what is packed already must be understood: `ExpertsMisread` is raised in them else.
    """

    def __init__(self, model: nn.Module) -> None:
        self._watched = [
            module
            for module in model.modules()
            if isinstance(module, PackedExperts) or may_be_experts(module)
        ]
        self._seen: dict[nn.Module, Call | None] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> ExpertsUse:
        self._handles = [m.register_forward_pre_hook(self._note, with_kwargs=True) for m in self._watched]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def calls(self) -> dict[nn.Module, Call]:
        """In the order of the model."""
        seen = ((module, self._seen.get(module)) for module in self._watched)
        return {module: call for module, call in seen if call is not None}

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = _understood(module, args, kwargs)
        if call is None and isinstance(module, PackedExperts):
            raise ExpertsMisread(
                "it calls its experts with more than rows, numbers of experts and their weights"
            )
        before = self._seen.get(module, call)
        same = call is not None and before is not None and before.chosen.shape[1] == call.chosen.shape[1]
        self._seen[module] = call if same else None


class PackedExperts(nn.Module):
    """Experts on our kernels, in whatever format they keep weights. ``layers``: gate and up, and down, of each."""

    def __init__(
        self,
        ops: Ops,
        layers: Sequence[tuple[Linear, Linear]],
        activation: Activation,
        names: tuple[str, ...],
    ) -> None:
        super().__init__()
        self.layers = list(layers)
        self.activation = activation
        self.names = names
        self.dtype = ops.dtype
        self._ops = ops
        self._packed: dict[int, Experts] = {}  # by how many a row takes

    @property
    def count(self) -> int:
        """Experts."""
        return len(self.layers)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(up.num_bytes + down.num_bytes for up, down in self.layers)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """Rows [..., H], the experts of each [T, K] and their weights, under the names that the model knows."""
        x, chosen, weights = (*args, *(kwargs[name] for name in self.names[len(args) :]))
        rows = x.reshape(-1, x.shape[-1])
        return self._mixed(rows, chosen, weights).view(x.shape)

    def _mixed(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        top_k = chosen.shape[-1]
        if top_k not in self._packed:
            routing = Routing(self.count, top_k, activation=self.activation)
            self._packed[top_k] = self._ops.pack_experts(self.layers, routing, None)
        return self._ops.mix_experts(rows, chosen, weights.float(), self._packed[top_k])


class ImaginedExperts(PackedExperts):
    """Experts that compute with made-up numbers (`imagined`); ``weights``: theirs in the checkpoint."""

    def __init__(self, ops: Ops, weights: ExpertWeights, names: tuple[str, ...]) -> None:
        super().__init__(ops, (), weights.form.activation, names)
        self.weights = weights
        self._numbers = weights.as_imagined()

    @property
    def count(self) -> int:
        return self.weights.count

    def _mixed(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        for e in sorted(set(chosen.flatten().tolist())):
            hit, place = (chosen == e).nonzero(as_tuple=True)
            up, up_bias = self._numbers.gate_up(e)
            down, down_bias = self._numbers.down(e)
            inner = gated(_product(rows[hit], up, up_bias), self.activation)
            found = _product(inner.to(rows.dtype), down, down_bias)
            total.index_add_(0, hit, found.float() * weights[hit, place, None].float())
        return total.to(rows.dtype)


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return nn.functional.linear(rows, weight.to(rows), None if bias is None else bias.to(rows))


@dataclass(frozen=True, eq=False)
class Stack:
    """A module whose form is understood, and the names of its arguments. ``weights`` is None if it is packed
    already."""

    module: nn.Module
    weights: ExpertWeights | None
    names: tuple[str, ...]

    @property
    def count(self) -> int:
        """Experts."""
        return _count(self.module)

    def layers(self, ops: Ops) -> tuple[list[tuple[Linear, Linear]], Activation]:
        """Gate and up, and down, of each expert on our kernels; packed one after the other."""
        if self.weights is None:
            assert isinstance(self.module, PackedExperts)
            return self.module.layers, self.module.activation
        return [self.weights.packed(ops, e) for e in range(self.count)], self.weights.form.activation

    def pack(self, ops: Ops, routing: Routing, correction: Tensor | None = None) -> Experts:
        """On our kernels. ``routing`` without the activation."""
        layers, activation = self.layers(ops)
        packed = ops.pack_experts(layers, replace(routing, activation=activation), correction)
        return packed if self.weights is None else summed_experts(self.weights.share.part, packed)

    def of_rank(self, part: Part, *, by_rank: bool) -> Stack:
        """What one of several ranks computes. Experts that cannot have equal parts are divided by rank, too."""
        assert self.weights is not None, "ranks' experts are not packed as the model is built"
        by_rank = by_rank or not self.weights.has_parts(part)
        return replace(self, weights=self.weights.of_rank(part, by_rank=by_rank))

    def as_imagined(self) -> Stack:
        """With made-up weights, if its module computes with such."""
        return self if self.weights is None else replace(self, weights=self.weights.as_imagined())


def stacks_of(calls: dict[nn.Module, Call]) -> dict[nn.Module, Stack]:
    """The modules whose form is understood."""
    found: dict[nn.Module, Stack] = {}
    for module, call in calls.items():
        if isinstance(module, ImaginedExperts):
            found[module] = Stack(module, module.weights, call.names)
        elif isinstance(module, PackedExperts):
            found[module] = Stack(module, None, call.names)
        elif (form := recognised(module, call)) is not None:
            found[module] = Stack(module, ExpertWeights.of(module, form), call.names)
    return found


def exchange_experts(model: nn.Module, stacks: dict[nn.Module, Stack], ops: Ops) -> int:
    """Pack the experts whose form is understood and put them in their places, one module after the other.

    Returns:
        Bytes of the packed weights, with those that were packed before.
    """
    total = sum(module.num_bytes for module in model.modules() if isinstance(module, PackedExperts))
    places = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    for parent, name, child in places:
        stack = stacks.get(child)
        if stack is None or stack.weights is None:
            continue
        packed = PackedExperts(ops, *stack.layers(ops), stack.names)
        total += packed.num_bytes
        for parameter in child.parameters():
            parameter.data = torch.empty(0)
        setattr(parent, name, packed)
    return total


def recognised(module: nn.Module, call: Call) -> Form | None:
    """The form that computes what the module computes; None: none of those that are known."""
    rows = call.x.shape[0]
    step = max(1, rows // _ROWS)
    x, chosen, weights = (value[::step][:_ROWS] for value in (call.x, call.chosen, call.weights))
    best: tuple[float, Form] | None = None
    for form in _forms(module, x.shape[-1]):
        difference = 0.0
        for size in _GATES:
            up, _ = form.gate_up(module, int(chosen[0, 0]))
            gates = up[: len(up) // 2].float() @ x[0].float()
            scaled = x * (size / max(float(gates.abs().mean()), 1e-6))
            wanted = module(scaled, chosen, weights).float()
            found = _mixed(module, form, scaled, chosen, weights)
            difference = max(
                difference, float((found - wanted).abs().mean()) / max(float(wanted.std()), 1e-6)
            )
        if best is None or difference < best[0]:
            best = difference, form
    return best[1] if best is not None and best[0] <= _LIMITS[x.dtype] else None


def _mixed(module: nn.Module, form: Form, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """[T, H] float32, row by row."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for r, (experts, shares) in enumerate(zip(chosen.tolist(), weights.tolist(), strict=True)):
        for e, share in zip(experts, shares, strict=True):
            up, up_bias = form.gate_up(module, e)
            both = nn.functional.linear(
                x[r].float(), up.float(), None if up_bias is None else up_bias.float()
            )
            down, down_bias = form.down(module, e)
            inner = gated(both[None], form.activation)[0]
            total[r] += share * nn.functional.linear(
                inner, down.float(), None if down_bias is None else down_bias.float()
            )
    return total


def _forms(module: nn.Module, hidden: int) -> list[Form]:
    """The candidates that the shapes allow."""
    up, down = tensor_of(module, "gate_up_proj").shape[1:], tensor_of(module, "down_proj").shape[1:]
    turned = [
        way
        for way in (False, True)
        if (up[way], up[not way]) == (2 * down[not way], hidden) and down[way] == hidden
    ]
    alpha, limit = (
        _number(module, names, default)
        for names, default in ((("alpha",), 1.702), (("limit", "swiglu_limit"), 7.0))
    )
    activations = [Activation("silu"), Activation("gelu_tanh"), Activation("clamped", alpha, limit)]
    return [Form(how, turns, way) for way in turned for turns in (False, True) for how in activations]


def _number(module: nn.Module, names: tuple[str, ...], default: float) -> float:
    """The first of these attributes that is a number."""
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    return default


def may_be_experts(module: nn.Module) -> bool:
    """By the names and shapes of its parameters."""
    names = {name for name, value in module._parameters.items() if value is not None}
    if not {"gate_up_proj", "down_proj"} <= names <= _PARAMETERS:
        return False
    up, down = tensor_of(module, "gate_up_proj"), tensor_of(module, "down_proj")
    return up.ndim == down.ndim == 3 and len(up) == len(down) and up.is_floating_point()


def call_names(module: nn.Module) -> tuple[str, ...]:
    """The names of its arguments."""
    return module.names if isinstance(module, PackedExperts) else tuple(signature(module.forward).parameters)


def _count(module: nn.Module) -> int:
    return module.count if isinstance(module, PackedExperts) else len(tensor_of(module, "down_proj"))


def _understood(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """A call with rows, their experts and weights, and nothing else."""
    names = call_names(module)
    given = dict(zip(names, args, strict=False)) | kwargs
    if tuple(name for name in names if name in given) != names[:3] or len(given) != 3:
        return None
    x, chosen, weights = (given[name] for name in names[:3])
    if not all(isinstance(value, Tensor) for value in (x, chosen, weights)):
        return None
    fit = (
        bool(chosen.numel())
        and chosen.ndim == 2
        and chosen.shape == weights.shape
        and chosen.shape[0] == x.shape[:-1].numel()
    )
    if not fit or chosen.is_floating_point():
        return None
    if x.dtype is not (
        module.dtype if isinstance(module, PackedExperts) else tensor_of(module, "down_proj").dtype
    ):
        return None
    if not 0 <= int(chosen.min()) <= int(chosen.max()) < _count(module):
        return None
    rows = x.reshape(-1, x.shape[-1]).clone()
    return Call(names[:3], rows, chosen.clone(), weights.clone())
