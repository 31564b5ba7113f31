"""Trained heads as vLLM's loaders want them: names, shapes and fields of config.json, written down from its code.

vLLM 0.32, ``model_executor/models/{llama_eagle3,llama_eagle,medusa,qwen3_dflash,qwen3_dspark}.py``,
``transformers_utils/configs``: q, k and v, gate and up are stacked there, ``midlayer.`` is ``layers.0.``, and whatever
else is in a file is an error for the loaders of EAGLE and of block drafters and silently dropped by that of Medusa.
`tests/parity/test_vllm_drafts.py` runs them where vLLM is installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from draftwise.models.rope import RopeConfig
from draftwise.train.heads.block import BlockDrafter, BlockForm
from draftwise.train.heads.export import export_head
from draftwise.train.heads.layers import HeadShape
from draftwise.train.heads.medusa import MedusaHeads
from draftwise.train.heads.sequential import Eagle3Head, EagleHead, MtpHead

HIDDEN, INNER, VOCAB, HEADS, KV, DIM = 32, 48, 61, 4, 2, 8
SHAPE = HeadShape(
    hidden_size=HIDDEN, num_heads=HEADS, num_kv_heads=KV, head_dim=DIM, intermediate_size=INNER, norm_eps=1e-5,
    rope=RopeConfig(kind="default", theta=5000.0, head_dim=DIM),
)  # fmt: skip
TARGET: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 8, "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}  # fmt: skip


def layer(inputs: int, at: str) -> dict[str, tuple[int, ...]]:
    """What a decoder layer of vLLM's Llama is filled from, ``inputs`` wide where q, k and v read."""
    return {
        f"{at}.self_attn.q_proj.weight": (HEADS * DIM, inputs),
        f"{at}.self_attn.k_proj.weight": (KV * DIM, inputs),
        f"{at}.self_attn.v_proj.weight": (KV * DIM, inputs),
        f"{at}.self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
        f"{at}.mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{at}.mlp.up_proj.weight": (INNER, HIDDEN),
        f"{at}.mlp.down_proj.weight": (HIDDEN, INNER),
        f"{at}.post_attention_layernorm.weight": (HIDDEN,),
    }


def eagle3(features: int, draft_vocab: int) -> dict[str, tuple[int, ...]]:
    found = layer(2 * HIDDEN, "midlayer") | {
        "midlayer.hidden_norm.weight": (HIDDEN,), "midlayer.input_layernorm.weight": (HIDDEN,),
        "fc.weight": (HIDDEN, features * HIDDEN), "norm.weight": (HIDDEN,), "lm_head.weight": (draft_vocab, HIDDEN),
    }  # fmt: skip
    # with a map of as many ids as the target has, vLLM's loader finds a tensor that it has no place for
    return found if draft_vocab == VOCAB else found | {"d2t": (draft_vocab,), "t2d": (VOCAB,)}


def exported(head: nn.Module, folder: Path, **more: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    export_head(head, folder, TARGET, **more)
    tensors = load_file(folder / "model.safetensors")
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return {name: tuple(value.shape) for name, value in tensors.items()}, config


def matrices() -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(5)
    return *torch.randn(2, VOCAB, HIDDEN, generator=generator).unbind(), generator


@pytest.mark.parametrize(("features", "draft_vocab"), [(3, 20), (4, 20), (3, VOCAB)])
def test_eagle3(features: int, draft_vocab: int, tmp_path: Path) -> None:
    ids = torch.arange(draft_vocab) * (VOCAB // draft_vocab)
    head = Eagle3Head(SHAPE, *matrices(), num_features=features, draft_ids=ids)
    found, config = exported(head, tmp_path, feature_layers=tuple(range(1, 1 + features)))
    assert found == eagle3(features, draft_vocab)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["num_hidden_layers"] == 1
    assert (config["draft_vocab_size"], config["vocab_size"]) == (draft_vocab, VOCAB)
    assert config["num_aux_hidden_states"] == config["eagle_config"]["num_aux_hidden_states"] == features
    ids_of = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert config["eagle_aux_hidden_state_layer_ids"] == ids_of == list(range(1, 1 + features))
    assert config["target_hidden_size"] == HIDDEN and not config["attention_bias"]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5000.0


def test_eagle(tmp_path: Path) -> None:
    found, config = exported(EagleHead(SHAPE, *matrices()), tmp_path)
    assert found == layer(HIDDEN, "layers.0") | {"fc.weight": (HIDDEN, 2 * HIDDEN)}
    assert config["architectures"] == ["EagleLlamaForCausalLM"] and config["num_hidden_layers"] == 1
    assert config["rope_theta"] == 5000.0


def test_mtp(tmp_path: Path) -> None:
    """vLLM's ``mimo_mtp.py``: Qwen2's layer, which has biases, heads of hidden_size / num_attention_heads, and a
    projection that reads the feature first."""
    head = MtpHead(SHAPE, *matrices(), normed=True)
    found, config = exported(head, tmp_path, dtype=torch.float32)
    at = "model.mtp_layers.0"
    wanted = layer(HIDDEN, at) | {f"{at}.input_layernorm.weight": (HIDDEN,)}
    wanted |= {
        f"{at}.self_attn.{part}_proj.bias": (n * DIM,) for part, n in (("q", HEADS), ("k", KV), ("v", KV))
    }
    wanted |= {f"{at}.{part}_layernorm.weight": (HIDDEN,) for part in ("token", "hidden", "final")}
    assert found == wanted | {f"{at}.input_proj.weight": (HIDDEN, 2 * HIDDEN)}
    written = load_file(tmp_path / "model.safetensors")
    token, feature = head.eh_proj.weight.detach().chunk(2, 1)
    assert torch.equal(written[f"{at}.input_proj.weight"], torch.cat((feature, token), 1))
    assert not any(written[name].any() for name in written if name.endswith(".bias"))
    assert config["architectures"] == ["MiMoForCausalLM"] and config["model_type"] == "qwen2"
    assert (config["num_nextn_predict_layers"], config["num_hidden_layers"]) == (1, 0)
    assert config["hidden_size"] == config["num_attention_heads"] * config["head_dim"]
    assert config["rope_parameters"]["rope_theta"] == 5000.0 and not config["use_sliding_window"]


def test_medusa(tmp_path: Path) -> None:
    found, config = exported(MedusaHeads(3, 2, torch.randn(VOCAB, HIDDEN)), tmp_path)
    blocks = {f"{h}.{i}.linear.weight": (HIDDEN, HIDDEN) for h in range(3) for i in range(2)}
    blocks |= {f"{h}.{i}.linear.bias": (HIDDEN,) for h in range(3) for i in range(2)}
    assert found == blocks | {f"{h}.2.weight": (VOCAB, HIDDEN) for h in range(3)}
    # any field with "num" and "heads" or "layers" in its name becomes these two there, the last one winning
    heads = [value for name, value in config.items() if "num" in name and "heads" in name]
    layers = [value for name, value in config.items() if "num" in name and "layers" in name]
    assert set(heads) == {3} and set(layers) == {2}
    assert config["medusa_fc_bias"] is True and config["model_type"] == "medusa"
    assert (config["hidden_size"], config["vocab_size"]) == (HIDDEN, VOCAB)


@pytest.mark.parametrize("draft_vocab", [VOCAB, 20])
@pytest.mark.parametrize("rank", [0, 6])
def test_block_drafters(rank: int, draft_vocab: int, tmp_path: Path) -> None:
    """DFlash, and with a rank DSpark with a confidence head."""
    form = BlockForm(
        2, 4, VOCAB - 1, from_root=rank > 0, causal=not rank, markov_rank=rank, confidence=rank > 0
    )
    ids = None if draft_vocab == VOCAB else torch.arange(draft_vocab) * 3
    head = BlockDrafter(SHAPE, form, *matrices(), num_features=3, draft_ids=ids)
    found, config = exported(head, tmp_path, feature_layers=(1, 3, 5), verifier="some/target")
    wanted: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, 3 * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,),
    }  # fmt: skip
    for i in range(2):
        wanted |= layer(HIDDEN, f"layers.{i}") | {
            f"layers.{i}.input_layernorm.weight": (HIDDEN,),
            f"layers.{i}.self_attn.q_norm.weight": (DIM,), f"layers.{i}.self_attn.k_norm.weight": (DIM,),
        }  # fmt: skip
    if rank:
        wanted |= {
            "markov_head.markov_w1.weight": (VOCAB, rank), "markov_head.markov_w2.weight": (draft_vocab, rank),
            "confidence_head.proj.weight": (1, HIDDEN + rank), "confidence_head.proj.bias": (1,),
        }  # fmt: skip
    if draft_vocab < VOCAB:  # these are the output layer's and the map's, which are the target's otherwise
        wanted |= {"lm_head.weight": (draft_vocab, HIDDEN), "d2t": (draft_vocab,), "t2d": (VOCAB,)}
    assert found == wanted
    kind = config["speculators_model_type"]
    assert kind == ("dspark" if rank else "dflash")
    inner = config["transformer_layer_config"]
    assert (inner["model_type"], inner["num_hidden_layers"], inner["vocab_size"]) == ("qwen3", 2, VOCAB)
    assert inner.get("is_causal", False) is (
        not rank
    )  # vLLM looks here, and nowhere else, where no layer has a window
    assert config["aux_hidden_state_layer_ids"] == [1, 3, 5] and config["mask_token_id"] == VOCAB - 1
    assert config["sample_from_anchor"] is (rank > 0) and config["draft_vocab_size"] == draft_vocab
    (proposal,) = config["speculators_config"]["proposal_methods"]
    assert proposal["speculative_tokens"] == 4 and config["speculators_config"]["verifier"]["name_or_path"]
    if rank:
        assert config["markov_rank"] == rank and config["markov_head_type"] == "vanilla"
        assert config["enable_confidence_head"] is config["confidence_head_with_markov"] is True
