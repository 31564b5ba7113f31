"""A target and an EAGLE-3 head with random weights, made on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from draftwise.bench.gpu.setting import Setting, Size
from draftwise.kernels.base import Ops
from draftwise.models.base import DecoderModel
from draftwise.models.heads.base import HeadModel, TargetLink
from draftwise.models.heads.eagle3 import Eagle3Head, Eagle3Options, default_feature_layers
from draftwise.models.llama import LlamaModel
from draftwise.models.weights import WeightPlan


def llama_config(size: Size, layers: int | None = None, max_len: int | None = None) -> dict[str, object]:
    """config.json of the shape; ``layers`` and ``max_len`` (tokens) in place of its own."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size.hidden,
        "intermediate_size": size.inner,
        "num_hidden_layers": layers or size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "vocab_size": size.vocab,
        "max_position_embeddings": max_len or size.max_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def random_target(
    setting: Setting,
    ops: Ops,
    layers: int | None = None,
    max_len: int | None = None,
    fill: Callable[[Mapping[str, Tensor]], None] | None = None,
) -> DecoderModel:
    """The target of a setting's size, or of fewer layers and other contexts. ``fill`` sets the weights (None: they are
    random); it gets them by their names in a checkpoint."""
    most = max_len or setting.size.max_len
    config = LlamaModel.parse(llama_config(setting.size, layers, most), "LlamaForCausalLM", most)
    plan = WeightPlan(ops.dtype, ops.device)
    with torch.no_grad():
        model = LlamaModel(config, ops, plan)
        plan.fill_with(fill or random_weights)
        model.finish()
    return model


def random_head(setting: Setting, target: DecoderModel) -> HeadModel:
    """An EAGLE-3 head of one layer for the target, with a vocabulary of its own."""
    size, shared = setting.size, target.shared_weights()
    config = LlamaModel.parse(llama_config(size, 1), "LlamaForCausalLM", size.max_len)
    ops = shared.ops
    link = TargetLink(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        num_layers=target.config.num_layers,
        max_model_len=size.max_len,
        embedding=shared.embedding,
        head=shared.head,
        tail=shared.tail,
    )
    options = Eagle3Options(
        feature_layers=tuple(sorted(set(default_feature_layers(target.config.num_layers)))),
        draft_vocab_size=size.draft_vocab,
    )
    plan = WeightPlan(ops.dtype, ops.device)
    ids = torch.arange(size.draft_vocab) * (size.vocab // size.draft_vocab)
    with torch.no_grad():
        head = Eagle3Head(config, options, link, ops, plan, ids)
        plan.fill_with(random_weights)
        head.finish()
    return head


def random_weights(targets: Mapping[str, Tensor]) -> None:
    """Set weights to what training might start from."""
    for name, tensor in targets.items():
        if "norm" in name:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, 0.02)
