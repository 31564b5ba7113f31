"""Linear modules of a Transformers model that was filled, and stored layers that take their places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from draftwise.kernels.base import Ops
from draftwise.models.general.imagined import ImaginedEmbedding, ImaginedLinear, imagine_embedding
from draftwise.models.general.stored import FloatLayer, StoredLayer, StoredLinear, TurnedLayer
from draftwise.models.weights import Freed


def as_linear(model: nn.Module) -> None:
    """Classes of their own that do what ``nn.Linear`` does (Falcon's) become it: each is asked what it makes of a few
    rows. Transformers' own code says the rest, in the check at load."""
    found: dict[type[nn.Module], bool] = {}
    for module in model.modules():
        kind = type(module)
        if kind is nn.Linear or not isinstance(module, nn.Linear):
            continue
        if kind not in found:
            found[kind] = _is_linear(kind)
        if found[kind] and module._parameters.keys() == {"weight", "bias"} and not module._modules:
            module.__class__ = nn.Linear


def _is_linear(kind: Any) -> bool:
    x = torch.linspace(-3, 3, 40).view(5, 8)
    try:
        made = kind(8, 6, bias=True)
        found = made(x)
    except Exception:  # it wants other arguments
        return False
    wanted = nn.functional.linear(x, made.weight, made.bias)
    return isinstance(found, Tensor) and torch.allclose(found, wanted, 1e-5, 1e-6)


def numbers_of_experts(model: nn.Module) -> set[int]:
    """How many experts its mixtures have: modules with stacks of matrices."""
    names = ("down_proj", "w2")
    stacks = (getattr(module, name, None) for module in model.modules() for name in names)
    return {len(stack) for stack in stacks if isinstance(stack, Tensor) and stack.ndim == 3}


def exchange(
    model: Any,
    layers: Mapping[str, StoredLayer],
    places: Mapping[str, Tensor],
    scores: set[int],
    ops: Ops,
    kind: type[StoredLinear],
) -> None:
    """Put stored layers into their places: linear modules are packed, any other parameter is read as it is.

    Args:
        scores: how many experts mixtures have: layers of so many results choose them.
        kind: of the modules that take the places.
    """
    from transformers.pytorch_utils import Conv1D

    known = {number.data_ptr(): layers[base] for base, number in places.items()}
    head = model.get_output_embeddings()
    modules = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear or isinstance(child, Conv1D)
    ]
    modules.sort(key=lambda found: found[2] is not head)  # the largest one first, while little else is packed
    if kind is ImaginedLinear:
        imagine_embedding(model, known)
    tables = {p.data_ptr() for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    packed: dict[nn.Module, StoredLinear] = {}
    freed = Freed()
    for parent, name, child in modules:
        layer = known.get(child.weight.data_ptr())
        if layer is None or child.weight.data_ptr() in tables:
            continue
        if isinstance(layer, FloatLayer) and isinstance(child, Conv1D):
            if kind is not ImaginedLinear:
                continue  # stays one; it is read below
            layer = TurnedLayer(layer.base, layer.inputs, layer.outputs, layer.entries, layer.dtype)
        if isinstance(layer, FloatLayer) and layer.outputs in scores:
            continue  # what chooses experts is not rounded; it is read below, too
        packed_later = not isinstance(layer, FloatLayer) or child.bias is not None
        if child is head and packed_later and kind is not ImaginedLinear:
            continue  # is packed where the model is put together
        if child not in packed:
            bias = None if child.bias is None else child.bias.detach().to(ops.device)
            packed[child] = kind(ops, layer, bias, is_head=child is head)
            freed.count(torch.empty((layer.outputs, layer.inputs), dtype=layer.dtype, device="meta"))
        setattr(parent, name, packed[child])
    for parameter in model.parameters():
        layer = known.get(parameter.data_ptr())
        if layer is not None:
            value = layer.floats().to(parameter.dtype)
            turned = value.shape != parameter.shape
            parameter.data = value.t().contiguous() if turned else value


def restore_read(model: nn.Module) -> bool:
    """Modules whose weight the model's own code reads get it back. False: there are none."""
    found = False
    for parent in model.modules():
        for name, child in list(parent.named_children()):
            if isinstance(child, StoredLinear | ImaginedEmbedding) and child.was_read:
                setattr(parent, name, child.plain())
                found = True
    return found


def stored_bytes(modules: Sequence[nn.Module]) -> int:
    """Bytes of packed weights of stored layers."""
    return sum(m.packed.num_bytes for m in modules if isinstance(m, StoredLinear))
