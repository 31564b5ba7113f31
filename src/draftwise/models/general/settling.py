"""Settles tensors that Transformers made from deferred ones: experts that kernels support are packed, all others are
read.

Experts are packed one by one, as floats or as the codes that the checkpoint has, so that no more than one is in memory
as it is stored. The form of a module is told from two of its experts, and what was packed is compared with what the
module makes of them.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from draftwise.kernels.base import Ops
from draftwise.kernels.handles import Linear
from draftwise.models.general.deferred import Deferred, numbers, part
from draftwise.models.general.expert_weights import ExpertWeights, Form
from draftwise.models.general.experts import (
    Call,
    ImaginedExperts,
    PackedExperts,
    call_names,
    may_be_experts,
    recognised,
)
from draftwise.models.weights import Freed

logger = logging.getLogger("draftwise")

_ROWS = 6
_NEAR = {torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.03}
_ROUNDED = 0.6
"""Mean difference of what packed experts give over the deviation; behind it, with weights or rows of few bits."""


def settle(model: nn.Module, ops: Ops, *, rounded: bool, experts: bool, made_up: bool = False) -> None:
    """Give every module whose parameters are `Deferred` its numbers, or pack it.

    Args:
        rounded: ``ops`` rounds weights.
        experts: pack mixtures of experts; else they are read like everything else.
        made_up: rather than to be packed, they compute with made-up numbers (`imagined`).

    Raises:
        ModelLoadError: a tensor cannot be read.
    """
    freed = Freed()
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if experts and _is_deferred(child) and may_be_experts(child):
                place = f"{path}.{name}" if made_up else None
                packed = _packed(child, ops, freed, place, rounded=rounded)
                if packed is not None:
                    setattr(parent, name, packed)
    known: dict[int, nn.Parameter] = {}
    for module in model.modules():
        parameters: dict[str, Any] = module._parameters
        for name, value in parameters.items():
            if isinstance(value, Deferred):
                if id(value) not in known:
                    known[id(value)] = nn.Parameter(numbers(value), requires_grad=False)
                parameters[name] = known[id(value)]
        for name, buffer in module._buffers.items():
            if isinstance(buffer, Deferred):
                module._buffers[name] = numbers(buffer)


def _is_deferred(module: nn.Module) -> bool:
    return any(isinstance(value, Deferred) for value in module._parameters.values())


def _packed(
    module: nn.Module, ops: Ops, freed: Freed, place: str | None, *, rounded: bool
) -> PackedExperts | None:
    """The experts of a module on our kernels; None: they are none of the forms that these know. ``place``: its name, if
    they compute with made-up numbers."""
    stacks = {name: value for name, value in module._parameters.items() if value is not None}
    for name, value in stacks.items():
        if value.ndim < 3:  # biases
            stacks[name] = module._parameters[name] = nn.Parameter(numbers(value), requires_grad=False)
    names = call_names(module)
    if len(names) < 3 or any(value.dtype is not ops.dtype for value in stacks.values()):
        return None
    sample, call = _sample(module, stacks)
    try:
        form = recognised(sample, call)
    except Exception as error:  # whatever a module says that is not called like this
        logger.debug("%s is not a mixture of experts: %s", type(module).__name__, error)
        return None
    if form is None:
        return None
    weights = ExpertWeights(stacks, form, place)
    if place is not None:
        return ImaginedExperts(ops, weights, names[:3])
    layers: list[tuple[Linear, Linear]] = []
    for e in range(weights.count):
        layers.append(weights.packed(ops, e))
        for stack in stacks.values():
            if stack.ndim == 3:
                freed.count(torch.empty(stack.shape[1:], dtype=stack.dtype, device="meta"))
    packed = PackedExperts(ops, layers, form.activation, names[:3])
    few_bits = rounded or weights.few_bits
    return packed if _agree(packed, sample, call, ops, form, few_bits=few_bits) else None


def _sample(module: nn.Module, stacks: dict[str, Any]) -> tuple[nn.Module, Call]:
    """The module with the numbers of its first and its last expert alone, and a call of these."""
    count = len(stacks["down_proj"])
    few = list(dict.fromkeys((0, count - 1)))
    sample = copy.copy(module)
    sample._parameters = dict(module._parameters)
    for name, value in stacks.items():
        if value.ndim == 3:
            whole = _untouched(tuple(value.shape), value.dtype)
            for e in few:
                whole[e] = numbers(part(value, e))
            sample._parameters[name] = nn.Parameter(whole, requires_grad=False)
    up, down = (stacks[name] for name in ("gate_up_proj", "down_proj"))
    hidden = 0
    for size in down.shape[1:]:  # gate and up together are twice as wide as what goes into down
        other = down.shape[1:].numel() // size
        if sorted(up.shape[1:]) == sorted((2 * other, size)):
            hidden = size
            break
    generator = torch.Generator().manual_seed(9)
    x = torch.randn((_ROWS, hidden), generator=generator).to(down.dtype)
    chosen = torch.tensor([few if row % 2 else few[::-1] for row in range(_ROWS)])
    weights = torch.rand(chosen.shape, generator=generator).to(down.dtype) + 0.1
    return sample, Call(call_names(module)[:3], x, chosen, weights)


def _untouched(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only where something is written."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)


def _agree(
    packed: Callable[..., Tensor], sample: nn.Module, call: Call, ops: Ops, form: Form, *, few_bits: bool
) -> bool:
    """Whether packed experts make of a few rows what the module makes of them."""
    up, _ = form.gate_up(sample, int(call.chosen[0, 0]))
    gates = (call.x[0].float() @ up[: len(up) // 2].float().t()).abs().mean()
    x = call.x / gates.clamp(min=1e-6).to(call.x.dtype)
    with torch.inference_mode():
        wanted = sample(x, call.chosen, call.weights).float()
        arguments = (x.to(ops.dtype), call.chosen, call.weights)
        found = packed(*(each.to(ops.device) for each in arguments)).float().cpu()
    difference = float((found - wanted).abs().mean()) / max(float(wanted.std()), 1e-6)
    if difference <= (_ROUNDED if few_bits else _NEAR[ops.dtype]):
        return True
    logger.warning(
        "experts that are packed give other numbers than their module (%.2g): they run on its code",
        difference,
    )
    return False
