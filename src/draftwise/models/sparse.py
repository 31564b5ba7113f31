"""Reads settings of mixtures of experts from ``config.json`` in the spelling that most families share."""

from __future__ import annotations

from typing import Literal

from draftwise.errors import ModelLoadError
from draftwise.kernels.routing import Routing
from draftwise.models.config import RawConfig, require_int
from draftwise.models.mlp import ExpertsConfig


def count_of_experts(raw: RawConfig, default: int | None = None) -> tuple[int, int | None]:
    """Experts of a layer (two names of one field), and how many of them a row takes if that is said.

    Raises:
        ModelLoadError: a number is missing or none, or a row takes more experts than there are.
    """
    name = next((n for n in ("num_local_experts", "num_experts") if raw.get(n) is not None), "num_experts")
    count = require_int(raw, name, default)
    top_k = raw.get("num_experts_per_tok")
    if top_k is not None and require_int(raw, "num_experts_per_tok") > count:
        raise ModelLoadError(f"config.json: num_experts_per_tok {top_k} is more than the {count} experts")
    return count, top_k


def sparse_layers(raw: RawConfig) -> tuple[bool, ...]:
    """Which layers have experts: every ``decoder_sparse_step``-th but those in ``mlp_only_layers``.

    Example: 5 layers, decoder_sparse_step 2, mlp_only_layers [3] -> (False, True, False, False, False).
    """
    layers = require_int(raw, "num_hidden_layers")
    step = require_int(raw, "decoder_sparse_step", 1)
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) for i in dense):
        raise ModelLoadError(f"config.json: mlp_only_layers must be a list of layers, not {dense!r}")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))


def qwen_experts(
    raw: RawConfig, *, experts: int, top_k: int, shared: Literal["none", "gated"] = "none"
) -> ExpertsConfig:
    """The experts of Qwen's families.

    Args:
        experts: where the config does not say it.
        top_k: likewise.
        shared: whether there is a shared expert with a score of its own.
    """
    count, told = count_of_experts(raw, experts)
    routing = Routing(
        count,
        told or min(top_k, count),
        normalise=bool(raw.get("norm_topk_prob", False)),
        shared=shared,
    )
    inner = require_int(raw, "moe_intermediate_size", 768 if shared == "none" else 1408)
    shared_inner = require_int(raw, "shared_expert_intermediate_size", 5632) if shared != "none" else 0
    return ExpertsConfig(routing, inner, sparse_layers(raw), shared_inner)


def deepseek_experts(raw: RawConfig, *, experts: int) -> ExpertsConfig:
    """The experts of DeepSeek-V3 and the families that choose as it does: sigmoids, a correction, groups judged by
    their two best, a shared expert as wide as ``n_shared_experts`` of the others; the first layers have an MLP.

    Args:
        experts: where the config does not say it.

    Raises:
        ModelLoadError: a number is missing or out of range.
    """
    layers, dense = require_int(raw, "num_hidden_layers"), raw.get("first_k_dense_replace", 1)
    if isinstance(dense, bool) or not isinstance(dense, int) or dense < 0:
        raise ModelLoadError(f"config.json: first_k_dense_replace must be a number of layers, not {dense!r}")
    count, top_k = require_int(raw, "n_routed_experts", experts), require_int(raw, "num_experts_per_tok", 8)
    groups, top_groups = require_int(raw, "n_group", 1), require_int(raw, "topk_group", 1)
    inner, shared = require_int(raw, "moe_intermediate_size", 1408), require_int(raw, "n_shared_experts", 1)
    scale = raw.get("routed_scaling_factor", 1.0)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise ModelLoadError(f"config.json: routed_scaling_factor must be a number, not {scale!r}")
    if count % groups or top_groups > groups or top_k > count // groups * top_groups:
        raise ModelLoadError(
            f"config.json: {top_k} of {count} experts in {top_groups} of {groups} groups (n_group) cannot be"
        )
    routing = Routing(
        count,
        top_k,
        "sigmoid",
        normalise=bool(raw.get("norm_topk_prob", True)),
        scale=float(scale),
        groups=groups,
        top_groups=top_groups,
        group_rank=min(2, count // groups),
        shared="plain",
    )
    return ExpertsConfig(routing, inner, tuple(i >= dense for i in range(layers)), inner * shared)
