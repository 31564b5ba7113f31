"""GPT-OSS: attention sinks, a window in every other layer, experts with biases and a clamped activation.

Published checkpoints keep experts as MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 numbers of four bits (e2m1)
with a power of two of their own. Kernels compute with these codes, and nothing is rounded: Triton's, and a CPU's over
rows in bfloat16. Elsewhere experts are widened, exactly, to the model's type. ``quantization`` may round rows, too.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from draftwise.errors import ConfigError
from draftwise.kernels.base import Ops
from draftwise.kernels.handles import Linear
from draftwise.kernels.routing import Activation, Routing
from draftwise.kernels.split import summed_experts
from draftwise.models.config import (
    ModelConfig,
    RawConfig,
    dense_config,
    layered,
    require_int,
    windows_of_types,
)
from draftwise.models.dense import DenseDecoder
from draftwise.models.layers import DenseNames
from draftwise.models.mlp import ExpertNames, ExpertsConfig, SparseMlp, SparseWeights
from draftwise.models.rope import parse_rope
from draftwise.models.sparse import count_of_experts
from draftwise.models.weights import WeightPlan
from draftwise.quantization.fp4 import mxfp4_codes
from draftwise.quantization.weights import QuantizedWeight

logger = logging.getLogger("draftwise")

_BLOCK = 32  # numbers that share a power of two
_EXPERTS = "model.layers.{i}.mlp.experts."
_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


@functools.cache
def _say_widened(dtype: torch.dtype) -> None:
    """Once per process."""
    logger.warning(
        "experts stored as mxfp4 have kernels on GPUs, and on CPUs over rows in bfloat16, or rounded to int8 "
        "(quantization='int4'): they are widened to %s and take several times as much memory",
        str(dtype).removeprefix("torch."),
    )


class _Stacked:
    """One matrix of every expert of a layer, as the checkpoint stacks them: floats, [inputs, outputs] each, or MXFP4,
    [outputs, inputs / 32 blocks]; and biases."""

    def __init__(
        self, plan: WeightPlan, name: str, count: int, outputs: int, inputs: int, *, by_inputs: bool
    ) -> None:
        """Sizes are the rank's own, which divide experts ``by_inputs`` or by outputs; biases of what is divided by
        inputs are added on rank 0."""
        if plan.part.size > 1 and by_inputs and inputs % _BLOCK and plan.has(name + "_blocks"):
            raise ConfigError(
                f"tensor_parallel_size: {inputs} inputs of an expert per rank are not whole blocks of {_BLOCK} (mxfp4)"
            )
        self._bias = not by_inputs or plan.part.rank == 0
        if by_inputs:
            self.bias = plan.tensor(name + "_bias", (count, outputs))
        else:
            self.bias = plan.divided(name + "_bias", (count, outputs), 1)
        self.floats: Tensor | None = None
        if plan.has(name + "_blocks"):
            blocks = inputs // _BLOCK
            axis, shape = 1 + by_inputs, (count, outputs, blocks)
            self.blocks = plan.stored(name + "_blocks", (*shape, _BLOCK // 2), torch.uint8, "U8", axis)
            self.scales = plan.stored(name + "_scales", shape, torch.uint8, "U8", axis)
        else:
            self.floats = plan.divided(name, (count, inputs, outputs), 2 - by_inputs)

    def fill(self, plan: WeightPlan) -> None:
        for tensor in (self.bias, *((self.blocks, self.scales) if self.floats is None else (self.floats,))):
            plan.fill(tensor)
        if not self._bias:
            self.bias.zero_()

    def expert(self, e: int) -> tuple[Tensor | QuantizedWeight, Tensor]:
        """Weight [outputs, inputs] and bias [outputs]."""
        if self.floats is not None:
            return self.floats[e].t(), self.bias[e]
        return mxfp4_codes(self.blocks[e], self.scales[e]), self.bias[e]


def _pack(ops: Ops, weight: Tensor | QuantizedWeight, bias: Tensor, *, paired: bool) -> Linear:
    """A layer; if it is ``paired``, gates and ups take turns in it, and stand one behind the other from now on."""
    if paired:
        count = len(bias)
        order = torch.cat((torch.arange(0, count, 2), torch.arange(1, count, 2))).to(bias.device)
        bias = bias[order]
        weight = weight[order] if isinstance(weight, Tensor) else weight.in_order(order)
    if isinstance(weight, Tensor):
        return (ops.pack_gate_up if paired else ops.pack_linear)(weight.contiguous(), bias)
    packed = ops.pack_quantized(weight, bias, dynamic=False, paired=paired)
    if packed.num_bytes >= 2 * weight.codes.numel():
        _say_widened(ops.dtype)
    return packed


class StackedWeights(SparseWeights):
    """One layer's experts. Gates and ups take turns: gate 0, up 0, gate 1, up 1, ..."""

    def __init__(
        self, config: ExpertsConfig, names: ExpertNames, plan: WeightPlan, i: int, hidden: int
    ) -> None:
        self._routing = config.routing
        count, prefix = config.routing.num_experts, _EXPERTS.format(i=i)
        router = names.router.format(i=i)
        self._router = plan.tensor(router, (count, hidden))
        self._router_bias = plan.tensor(router.removesuffix("weight") + "bias", (count,))
        self._up = _Stacked(plan, prefix + "gate_up_proj", count, 2 * config.inner, hidden, by_inputs=False)
        self._down = _Stacked(plan, prefix + "down_proj", count, hidden, config.inner, by_inputs=True)

    def pack(self, ops: Ops, plan: WeightPlan) -> SparseMlp:
        plan.fill(self._router)
        plan.fill(self._router_bias)
        self._up.fill(plan)
        self._down.fill(plan)
        layers: list[tuple[Linear, Linear]] = []
        for e in range(self._routing.num_experts):
            layers.append(
                (
                    _pack(ops, *self._up.expert(e), paired=True),
                    _pack(ops, *self._down.expert(e), paired=False),
                )
            )
        del self._up, self._down
        experts = summed_experts(plan.part, ops.pack_experts(layers, self._routing))
        return SparseMlp(ops.pack_router(self._router, self._router_bias), experts)


class GptOssModel(DenseDecoder):
    """The router's weights are the softmax over the chosen scores, which is the softmax over all, normalised."""

    names = DenseNames(experts=ExpertNames(router="model.layers.{i}.mlp.router.weight"))
    sparse = StackedWeights

    @classmethod
    def parse(cls, raw: RawConfig, architecture: str, max_model_len: int | None = None) -> ModelConfig:
        raw = layered(raw, {"rms_norm_eps": 1e-5})
        layers = require_int(raw, "num_hidden_layers")
        count, top_k = count_of_experts(raw, 128)
        activation = Activation(
            "clamped", float(raw.get("swiglu_alpha", 1.702)), float(raw.get("swiglu_limit", 7.0))
        )
        types = raw.get("layer_types") or [
            "full_attention" if i % 2 else "sliding_attention" for i in range(layers)
        ]
        window = require_int(raw, "sliding_window", 128)
        bias = bool(raw.get("attention_bias", True))
        if raw.get("rope_parameters") is None and raw.get("rope_scaling") is None:
            raw = layered({"rope_scaling": _YARN}, raw)
        dim, positions = require_int(raw, "head_dim", 64), require_int(raw, "max_position_embeddings", 131072)
        return dense_config(
            raw,
            architecture=architecture,
            max_model_len=max_model_len,
            sliding_window=windows_of_types(types, layers, window),
            head_dim=64,
            qkv_bias=bias,
            o_bias=bias,
            sinks=True,
            experts=ExpertsConfig(
                Routing(count, top_k or min(4, count), activation=activation),
                require_int(raw, "intermediate_size", 2880),
                (True,) * layers,
            ),
            rope=parse_rope(raw, dim, positions, max_model_len, theta=150000.0),
        )
