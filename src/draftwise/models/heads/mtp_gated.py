"""MTP layers as Qwen3-Next and Qwen3.5 publish them: attention with an output gate (`models.gates`), norms that
multiply by 1 + w, a part of each head rotated, and an MLP or experts with a shared one.

These targets are served on Transformers' code, so no family of the engine's own says what their layers are. The
settings are those of their Transformers configuration, with its defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.models.checkpoint import TensorEntry, read_rows
from draftwise.models.config import ModelConfig, RawConfig, dense_config, require_int
from draftwise.models.general.config import transformers_config
from draftwise.models.heads.tensors import HeadTensor, HeadTensors
from draftwise.models.layers import LayerWeights
from draftwise.models.mlp import EXPERT_NAMES, ExpertNames
from draftwise.models.rope import over_text, parse_rope
from draftwise.models.sparse import qwen_experts

_KINDS = frozenset({"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"})
_ALWAYS_NORMALISED = frozenset({"qwen3_5_moe_text"})
"""Shares of the chosen experts add up to 1 whatever ``norm_topk_prob`` says."""
_PREFIX = "layers.0.self_attn."


def gated_layers(
    raw: RawConfig, tensors: HeadTensors, num_layers: int
) -> tuple[ModelConfig, ExpertNames | None, type[LayerWeights]] | None:
    """The shape of such layers, and the names of their experts' tensors, if they have any. None: the settings are of
    another family.

    Raises:
        ModelLoadError: the settings cannot be read, or layers of both kinds, MLP and experts, are mixed.
    """
    if raw.get("model_type") not in _KINDS:
        return None
    text = transformers_config(raw).get_text_config(decoder=True)
    own: dict[str, Any] = text.to_dict() | {"num_hidden_layers": num_layers}
    rope = own.get("rope_parameters")
    if isinstance(rope, Mapping):
        own["rope_parameters"] = {name: value for name, value in over_text(rope).items() if name != "type"}
    own.pop("rope_scaling", None)
    sparse = [f"layers.{i}.mlp.gate.weight" in tensors for i in range(num_layers)]
    if len(set(sparse)) > 1:
        raise ModelLoadError("MTP layers of which some have experts and some have not are not supported")
    experts = None
    if sparse[0]:
        if text.model_type in _ALWAYS_NORMALISED:
            own["norm_topk_prob"] = True
        found = qwen_experts(own, experts=512, top_k=10, shared="gated")
        experts = replace(found, layers=(True,) * num_layers)
    heads, dim = require_int(own, "num_attention_heads"), require_int(own, "head_dim")
    positions = require_int(own, "max_position_embeddings")
    config = dense_config(
        own,
        architecture="MTP layer",
        qkv_bias=f"{_PREFIX}q_proj.bias" in tensors,
        o_bias=f"{_PREFIX}o_proj.bias" in tensors,
        qk_norm=f"{_PREFIX}q_norm.weight" in tensors,
        experts=experts,
        rope=parse_rope(own, dim, positions, None, partial=True),
    )
    q = tensors.linear_shape(f"{_PREFIX}q_proj")
    gated = q is not None and q[0] == 2 * heads * dim
    names = None
    if experts is not None:
        theirs = {field.name: getattr(EXPERT_NAMES, field.name) for field in fields(EXPERT_NAMES)}
        names = ExpertNames(**{n: v and v.removeprefix("model.") for n, v in theirs.items()})
    return replace(config, attn_gate=gated, norm_offset=1.0), names, LayerWeights


@dataclass(frozen=True, slots=True)
class _Slice:
    """Rows of one matrix of a stack [E, outputs, inputs]: a `RowSource`."""

    entry: TensorEntry
    name: str
    expert: int
    first: int

    def rows(self, start: int, end: int) -> Tensor:
        return read_rows(self.entry, self.name, self.first + start, self.first + end, of=self.expert)


def unstacked(tensors: HeadTensors) -> HeadTensors:
    """Experts one by one, whether the checkpoint has them so or stacked, as Transformers does.

    Example: layers.0.mlp.experts.gate_up_proj [4, 32, 64] -> layers.0.mlp.experts.0.gate_proj.weight [16, 64], its
    first rows, layers.0.mlp.experts.0.up_proj.weight [16, 64], the others, ... of expert 3.
    """
    out: dict[str, HeadTensor] = {}
    for name, tensor in tensors.items():
        start, _, part = name.rpartition(".mlp.experts.")
        part = part.removesuffix(".weight")
        if not start or part not in ("gate_up_proj", "down_proj") or len(tensor.shape) != 3:
            out[name] = tensor
            continue
        count, outputs, inputs = tensor.shape
        parts = ("down_proj",) if part == "down_proj" else ("gate_proj", "up_proj")
        rows = outputs // len(parts)
        for e in range(count):
            for i, single in enumerate(parts):
                out[f"{start}.mlp.experts.{e}.{single}.weight"] = _one(tensor, e, i * rows, (rows, inputs))
    return HeadTensors(tensors.folder, out, tensors.layout)


def _one(tensor: HeadTensor, expert: int, first: int, shape: tuple[int, int]) -> HeadTensor:
    """Rows ``first ..`` of a stack's matrix, of a shape [outputs, inputs]."""
    origin, source = f"{tensor.origin}[{expert}, {first}:{first + shape[0]}]", tensor.source
    if isinstance(source, Tensor):
        return HeadTensor(origin, shape, tensor.dtype, source[expert, first : first + shape[0]])
    rows = _Slice(source, tensor.origin, expert, first)
    return HeadTensor(origin, shape, tensor.dtype, replace(source, shape=shape, source=rows))
