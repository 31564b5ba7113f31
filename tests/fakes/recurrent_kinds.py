"""Small sizes of models with recurrent state."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_MIXED = ["linear_attention", "full_attention", "linear_attention"]
_SHARED = {
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"], "num_hidden_layers": 4,
    "num_key_value_heads": 4,
}  # fmt: skip
SIZES: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    "linear_num_heads": 4, "linear_head_dim": 16, "mamba_n_heads": 8, "mamba_num_heads": 8, "mamba_head_dim": 16,
    "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_ssm": 128, "ssm_state_size": 16, "mamba_chunk_size": 16,
    "lru_width": 64, "attention_window_size": 8, "layer_group_size": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
    "n_mamba_heads": 2,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    # all layers of these would be of one kind, if nothing else is said
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "num_experts": 4},
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 3},
    "granitemoehybrid": {
        "layer_types": _MIXED, "num_hidden_layers": 3, "shared_intermediate_size": 96,
        "position_embedding_type": "rope",
    },
    "kimi_linear": {
        "layer_types": _MIXED, "num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "nemotron_h": {"n_groups": 2, "chunk_size": 16, "moe_shared_expert_intermediate_size": 32},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 16},
    "zamba": _SHARED,
    "zamba2": _SHARED | {"chunk_size": 16, "n_mamba_heads": 8, "adapter_rank": 8},
    "zaya": {"num_experts_per_tok": 1},
    "qwen4_exp_text": {
        "ple_layer_ids": [1, 3], "ple_embed_dim": 64, "hc_lowrank": 8, "hc_count": 2, "heads_per_ngram": 2,
        "ngram_vocab_size_base": 64, "split_ngram_parts": 1, "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 4, "eos_token_id": 2,
        "num_hidden_layers": 4,
    },
    "xlstm": {
        "num_heads": 4, "ffn_round_up_to_multiple_of": 16, "chunk_size": 16, "v_head_dim": None, "head_dim": None,
        "intermediate_size": None, "num_attention_heads": None,
    },
}  # fmt: skip
KINDS = frozenset({
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "inkling2_text", "inkling_text",
    "jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text", "recurrent_gemma", "rwkv", "xlstm", "zamba",
    "zamba2", "zaya",
})  # fmt: skip
_GAIN = 4.0


@torch.no_grad()
def make_loud(model: nn.Module) -> None:
    """Larger matrices: with those that a model begins its training with, a state says so little that a wrong one is not
    seen."""
    for weight in model.parameters():
        if weight.ndim == 2 and min(weight.shape) > 1:
            weight *= _GAIN
