"""Medusa heads (Cai et al. 2024, arXiv:2401.10774): several guesses at once from one hidden state of the target.

Head i maps the target's hidden state of token t (after the final norm) to the distribution of token t + 2 + i: the
target's own output layer already says token t + 1. Nothing is fed back and nothing is stored per token.

Two ways to name the tensors are published::

    the authors'  {i}.{j}.linear.weight|bias  residual layer j of head i     {i}.{layers}.weight  its output layer
    vLLM's        blocks.{i}.layers.{j}.weight|bias                          lm_heads.{i}.weight or lm_head.weight
                  token_map: the target's id of each id of the draft vocabulary
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.kernels.base import Ops
from draftwise.kernels.cpu.linear import NativeLinear
from draftwise.kernels.cpu.medusa import NativeMedusa
from draftwise.kernels.cpu.ops import NativeOps
from draftwise.kernels.handles import Linear
from draftwise.models.base import finish_logits
from draftwise.models.heads.base import TargetLink, logits_tail
from draftwise.models.heads.tensors import HeadTensors
from draftwise.models.heads.vocabulary import check_target_ids
from draftwise.models.weights import WeightPlan
from draftwise.types import ChainDraws

_PREFIX = re.compile(r"^(medusa_heads?\.)?(.*)$")
_AUTHORS_LAYER = re.compile(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$")
_AUTHORS_HEAD = re.compile(r"^(\d+)\.(\d+)\.weight$")
_BLOCK = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(?:linear\.)?(weight|bias)$")
_HEAD = re.compile(r"^lm_heads?(?:\.(\d+))?\.weight$")


logger = logging.getLogger("draftwise")


@dataclass(frozen=True, slots=True)
class MedusaShape:
    """The settings of heads, from the names and shapes of a folder's tensors."""

    num_heads: int
    num_layers: int  # residual layers of each head
    bias: bool
    output: str  # "own": one output layer per head; "shared": one for all; "target": the target's
    hidden_size: int
    vocab_size: int  # rows of the output layers; 0: the target's


def rename_medusa(name: str) -> str | None:
    """One name for both published ones: ``block.{i}.{j}.weight|bias``, ``head.{i}.weight``, ``head.weight``,
    ``token_map``. Others are kept, and reported as unused.

    Examples: 0.0.linear.bias -> block.0.0.bias; 2.1.weight -> head.2.weight; lm_heads.2.weight -> head.2.weight.
    """
    bare = _PREFIX.match(name)
    assert bare is not None
    name = bare.group(2)
    for pattern in (_AUTHORS_LAYER, _BLOCK):
        found = pattern.match(name)
        if found:
            return f"block.{found.group(1)}.{found.group(2)}.{found.group(3)}"
    found = _AUTHORS_HEAD.match(name)
    if found:
        return f"head.{found.group(1)}.weight"
    found = _HEAD.match(name)
    if found:
        return "head.weight" if found.group(1) is None else f"head.{found.group(1)}.weight"
    return name


def medusa_shape(raw: Mapping[str, Any], tensors: HeadTensors) -> MedusaShape:
    """Read the shape off the (renamed) tensors: how many heads there are, too, for published config.json files say 2
    of 5. ``raw``, the folder's config.json, has a say in what the output layers are.

    Raises:
        ModelLoadError: no Medusa tensors, or heads that differ from each other.
    """
    blocks = [name.split(".") for name in tensors if name.startswith("block.")]
    if not blocks:
        raise ModelLoadError(f"{tensors.folder} has no Medusa heads (tensors such as 0.0.linear.weight)")
    in_file = 1 + max(int(parts[1]) for parts in blocks)
    num_layers = 1 + max(int(parts[2]) for parts in blocks)
    said = number_of_heads(raw)
    if said not in (None, in_file):
        logger.info("%s: config.json says %s Medusa heads, the file has %s", tensors.folder, said, in_file)
    outputs = [name for name in tensors if name.startswith("head.") and name != "head.weight"]
    first = tensors.get("block.0.0.weight")
    if first is None or len(first.shape) != 2:
        raise ModelLoadError(f"{tensors.folder}: tensors are missing: 0.0.linear.weight, of head 0")
    if raw.get("original_lm_head") and ("head.weight" in tensors or outputs):
        output = "shared"
    else:
        output = "own" if outputs else "shared" if "head.weight" in tensors else "target"
    name = outputs[0] if outputs else "head.weight"
    return MedusaShape(
        num_heads=in_file,
        num_layers=num_layers,
        bias=any(parts[3] == "bias" for parts in blocks),
        output=output,
        hidden_size=first.shape[1],
        vocab_size=tensors[name].shape[0] if output != "target" else 0,
    )


def number_of_heads(raw: Mapping[str, Any]) -> int | None:
    """The number of heads that a config.json names: ``medusa_num_heads`` or, in vLLM's form, ``num_heads``."""
    value = raw.get("medusa_num_heads", raw.get("num_heads"))
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelLoadError(
            f"config.json: the number of Medusa heads must be a positive integer, not {value!r}"
        )
    return value


class MedusaHeads:
    """All heads of one folder. Life as a model's: construct (declares the parameters), fill the plan, `finish`."""

    def __init__(
        self,
        shape: MedusaShape,
        link: TargetLink,
        ops: Ops,
        plan: WeightPlan,
        target_ids: Tensor | None = None,
        *,
        scale: float = 1.0,
    ) -> None:
        """``target_ids``: int64 [Vd], the target's id of each row of the output layers; None: the same ids.
        ``scale``: factor on the logits.

        Raises:
            ModelLoadError: the heads are for a target of another size or vocabulary.
        """
        if shape.hidden_size != link.hidden_size:
            raise ModelLoadError(
                f"the Medusa heads are for a target with hidden size {shape.hidden_size}, "
                f"this one has {link.hidden_size}"
            )
        self.num_heads = shape.num_heads
        self.draft_vocab_size = shape.vocab_size or link.vocab_size
        check_target_ids(target_ids, self.draft_vocab_size, link.vocab_size, "the Medusa heads", "token_map")
        self.target_ids = None if target_ids is None else target_ids.to(ops.device)
        self._shape = shape
        self._tail = logits_tail(link, own_head=shape.output != "target", logit_scale=scale)
        self._ops = ops
        self._plan = plan
        self._hidden = hidden = link.hidden_size
        # the first layer of all heads is one product
        self._first = plan.packed([(f"block.{i}.0.weight", hidden) for i in range(shape.num_heads)], hidden)
        self._first_bias = None
        if shape.bias:
            names = [(f"block.{i}.0.bias", hidden) for i in range(shape.num_heads)]
            self._first_bias = plan.packed(names, None)
        self._later: list[tuple[Tensor, Tensor | None]] = []
        for i in range(shape.num_heads):
            for j in range(1, shape.num_layers):
                weight = plan.tensor(f"block.{i}.{j}.weight", (hidden, hidden))
                bias = plan.tensor(f"block.{i}.{j}.bias", (hidden,)) if shape.bias else None
                self._later.append((weight, bias))
        self._outputs: list[Tensor] = []
        if shape.output == "own":
            for i in range(shape.num_heads):
                self._outputs.append(plan.tensor(f"head.{i}.weight", (shape.vocab_size, hidden)))
        elif shape.output == "shared":
            self._outputs.append(plan.tensor("head.weight", (shape.vocab_size, hidden)))
        self._target_head = link.head
        self._weight_bytes = plan.num_bytes

    def finish(self) -> None:
        """Every parameter is filled: pack them for the kernels."""
        ops = self._ops
        self._residual = ops.pack_linear(self._first, self._first_bias)
        self._residuals = [ops.pack_linear(weight, bias) for weight, bias in self._later]
        self._heads: list[Linear] = [ops.pack_head(weight) for weight in self._outputs]
        if not self._heads:
            self._heads = [self._target_head]
        layers = (self._residual, *self._residuals, *self._heads)
        self.native: NativeMedusa | None = None
        """All layers in one call, where that is possible."""
        if isinstance(ops, NativeOps) and all(isinstance(layer, NativeLinear) for layer in layers):
            own = [layer for layer in layers if isinstance(layer, NativeLinear)]
            end = 1 + len(self._residuals)
            self.native = NativeMedusa(ops.library, ops.pool, own[0], own[1:end], own[end:])
        del self._first, self._first_bias, self._later, self._outputs, self._plan

    def logits(self, hidden: Tensor, count: int) -> Tensor:
        """``hidden`` [R, H], the target's of the newest token it has read -> [count, R, Vd] float32: the logits of the
        tokens two, three, ... behind it."""
        if self.native is not None:
            return finish_logits(self._ops, self.native.logits(hidden, count), self._tail)
        rows = hidden.shape[0]
        first = self._ops.linear(hidden, self._residual).view(rows, self.num_heads, self._hidden)[:, :count]
        # [count, R, H]: each head's rows dense
        states = (hidden[:, None] + torch.nn.functional.silu(first)).transpose(0, 1).contiguous()
        layers = self._shape.num_layers - 1
        for i in range(count if layers else 0):
            for weight in self._residuals[i * layers : (i + 1) * layers]:
                states[i] += torch.nn.functional.silu(self._ops.linear(states[i], weight))
        out = torch.empty((count, rows, self.draft_vocab_size), dtype=torch.float32, device=hidden.device)
        if len(self._heads) == 1:  # one output layer for all: one product
            flat = states.view(count * rows, self._hidden)
            self._ops.logits(flat, self._heads[0], out=out.view(count * rows, -1))
        else:
            for i in range(count):
                self._ops.logits(states[i], self._heads[i], out=out[i])
        return finish_logits(self._ops, out, self._tail)

    @property
    def finishes(self) -> bool:
        """Whether something is done with the output layers' results."""
        return bool(self._tail)

    @property
    def draws(self) -> bool:
        """Whether `draw` may be called."""
        return self._ops.draws_chains

    def draw(self, logits: Tensor, draws: ChainDraws) -> tuple[npt.NDArray[np.int64], Tensor | None]:
        """See `Ops.draw_chains`: ``logits`` [count, R, Vd] of `logits`."""
        return self._ops.draw_chains(logits, draws, self.target_ids)

    @property
    def capturable(self) -> bool:
        """Whether `logits` can be captured as a graph."""
        return self._ops.capturable

    def weight_bytes(self) -> int:
        """Bytes of the heads' own parameters."""
        return self._weight_bytes
