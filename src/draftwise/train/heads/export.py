"""Writes trained heads as folders in the published formats, ready to serve.

=======  ==========================================================================================
eagle3   fc, midlayer.*, norm, lm_head, d2t (offsets), t2d (mask); embedding shared with the target
eagle    fc, layers.0.* without input_layernorm; embedding and output layer shared with the target
mtp      model.mtp_layers.0.* as MiMo names them; the rest shared. Layers that hand on what they give before their last
         norm: model.layers.{number of target layers}.* as DeepSeek-V3 names them
medusa   {head}.{layer}.linear.weight|bias, {head}.{layers}.weight
dflash   the speculators format: fc, hidden_norm, layers.*, norm; d2t, t2d and lm_head with a draft vocabulary; the
         embedding is shared, and without one the output layer
dspark   the same with markov_head.* and confidence_head.*
=======  ==========================================================================================

vLLM's loaders read these as they are written here: `tests/unit/test_export_contract.py` says what they ask for, and
`tests/parity/test_vllm_drafts.py` runs them, but for dspark, which vLLM computes on GPUs alone. It reads MTP layers
from the target's own checkpoint, not from a folder beside it. Of its loaders of them, that of MiMo is the one whose
layer is dense, has plain attention and nothing else: it takes heads of hidden_size / num_attention_heads numbers, and
biases on q, k and v, which are zeros here. Layers in DeepSeek's form have latent attention or experts there: those are
for this engine.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from draftwise.train.folders import whole_file

from .block import BlockDrafter
from .layers import HeadShape
from .medusa import MedusaHeads
from .sequential import Eagle3Head, EagleHead, MtpHead, SequentialHead
from .student import DraftStudent

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
_ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")


def export_head(
    head: nn.Module,
    folder: Path,
    target_config: Mapping[str, Any],
    *,
    feature_layers: tuple[int, ...] = (),
    provenance: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    verifier: str = "",
) -> None:
    """Write ``config.json``, ``model.safetensors`` and, if given, ``provenance.json``.

    Args:
        head: one of the classes of `sequential`, `block` and `medusa`.
        folder: created if need be; files of these names are replaced, each whole or not at all.
        target_config: the target's config.json.
        feature_layers: what an EAGLE-3 head or a block drafter was trained on.
        verifier: what a block drafter's settings call the target; such a folder can be served by itself.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _tensors(head, target_config)
    if isinstance(head, BlockDrafter):
        config = _block_config(head, target_config, feature_layers, dtype, verifier)
    else:
        config = _config(head, target_config, feature_layers, dtype)
    weights = {
        name: tensor.detach().cpu().to(dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in tensors.items()
    }
    _save(weights, folder)
    write_json(folder / "config.json", config)
    if provenance is not None:
        write_json(folder / "provenance.json", provenance)


def export_draft(
    student: DraftStudent,
    target: Path,
    folder: Path,
    eos_ids: tuple[int, ...],
    provenance: Mapping[str, Any] | None = None,
) -> None:
    """Write a draft model as a Hugging Face folder, with the target's tokenizer.

    Args:
        target: the target's folder; its tokenizer files are copied.
        eos_ids: the target's end-of-text ids.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = str(student.dtype).removeprefix("torch.")
    state = student.llama.state_dict()
    weights = {n: t.detach().cpu().to(student.dtype).contiguous() for n, t in state.items()}
    _save(weights, folder)
    config = student.llama.shape.hf_config(name, eos_ids[0] if eos_ids else 0)
    write_json(folder / "config.json", {**config, "eos_token_id": list(eos_ids) or None})
    for file in _TOKENIZER_FILES:
        if (target / file).is_file():
            with whole_file(folder / file) as partial:
                shutil.copyfile(target / file, partial)
    if provenance is not None:
        write_json(folder / "provenance.json", provenance)


def _save(weights: Mapping[str, Tensor], folder: Path) -> None:
    with whole_file(folder / "model.safetensors") as partial:
        save_file(dict(weights), partial, metadata={"format": "pt"})
        partial.chmod(0o644)


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file, whole or not at all."""
    with whole_file(path) as partial:
        partial.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def offsets(draft_ids: Tensor) -> Tensor:
    """Return d2t: draft id i stands for target id i + d2t[i]. Example: ids (0, 3, 4) -> (0, 2, 2)."""
    return draft_ids - torch.arange(len(draft_ids))


def _tensors(head: nn.Module, target_config: Mapping[str, Any]) -> dict[str, Tensor]:
    state = {name: tensor for name, tensor in head.state_dict().items() if name != "draft_ids"}
    if isinstance(head, Eagle3Head):
        outer = ("fc.", "norm.", "lm_head.")
        named = {name if name.startswith(outer) else f"midlayer.{name}": t for name, t in state.items()}
        ids = head.draft_ids
        assert ids is not None
        if torch.equal(ids.cpu(), torch.arange(int(target_config["vocab_size"]))):
            return named  # the target's own vocabulary: vLLM has no place for a map then
        return named | _vocabulary(ids, target_config)
    if isinstance(head, BlockDrafter):
        return state if head.draft_ids is None else state | _vocabulary(head.draft_ids, target_config)
    if isinstance(head, EagleHead):
        return {name if name.startswith("fc.") else f"layers.0.{name}": t for name, t in state.items()}
    if isinstance(head, MtpHead) and head.normed:
        return _as_mimo(state, head.shape)
    if isinstance(head, MtpHead):
        prefix = f"model.layers.{target_config['num_hidden_layers']}."
        return {
            prefix + name.replace("shared_head_norm.", "shared_head.norm."): t for name, t in state.items()
        }
    assert isinstance(head, MedusaHeads)
    return state


_MIMO = {
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "eh_proj": "input_proj",
    "shared_head_norm": "final_layernorm",
}


def _as_mimo(state: Mapping[str, Tensor], shape: HeadShape) -> dict[str, Tensor]:
    """MiMo's projection reads the feature first: the halves of its columns change places."""
    found = {}
    for name, tensor in state.items():
        part, _, rest = name.partition(".")
        value = torch.cat(tensor.chunk(2, 1)[::-1], 1) if part == "eh_proj" else tensor
        found[f"model.mtp_layers.0.{_MIMO.get(part, part)}.{rest}"] = value
    for part, heads in (("q", shape.num_heads), ("k", shape.num_kv_heads), ("v", shape.num_kv_heads)):
        zeros = torch.zeros(heads * shape.head_dim)
        found[f"model.mtp_layers.0.self_attn.{part}_proj.bias"] = zeros
    return found


def _vocabulary(ids: Tensor, target_config: Mapping[str, Any]) -> dict[str, Tensor]:
    ids = ids.cpu()
    known = torch.zeros(int(target_config["vocab_size"]), dtype=torch.bool)
    known[ids] = True
    return {"d2t": offsets(ids), "t2d": known}


def _block_config(
    head: BlockDrafter,
    target: Mapping[str, Any],
    feature_layers: tuple[int, ...],
    dtype: torch.dtype,
    verifier: str,
) -> dict[str, Any]:
    form, name = head.form, str(dtype).removeprefix("torch.")
    kind = "dspark" if form.markov_rank else "dflash"
    layer = {"model_type": "qwen3", **_layer_config(head.shape), "num_hidden_layers": form.layers}
    layer |= {"vocab_size": target["vocab_size"]}
    layer |= {key: target[key] for key in _ROPE_FIELDS if target.get(key) is not None}
    config = {
        "architectures": ["DSparkSpeculator" if form.markov_rank else "DFlashSpeculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": form.drafts}],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": verifier or None,
                "architectures": list(target.get("architectures") or ()),
            },
        },
        "transformer_layer_config": layer,
        "aux_hidden_state_layer_ids": list(feature_layers),
        "mask_token_id": form.mask_token,
        "block_size": form.block_size,
        "draft_vocab_size": target["vocab_size"] if head.draft_ids is None else len(head.draft_ids),
        "target_hidden_size": target["hidden_size"],
        "sample_from_anchor": form.from_root,
        "tie_word_embeddings": False,
        "dtype": name,
        "torch_dtype": name,
    }
    if form.causal:
        config["is_causal"] = layer["is_causal"] = True  # vLLM looks for it in the layer's settings
    if form.markov_rank:
        config |= {"markov_rank": form.markov_rank, "markov_head_type": form.markov_kind}
        config |= {
            "enable_confidence_head": form.confidence,
            "confidence_head_with_markov": form.confidence,
        }
    return config


def _config(
    head: nn.Module, target: Mapping[str, Any], feature_layers: tuple[int, ...], dtype: torch.dtype
) -> dict[str, Any]:
    name = str(dtype).removeprefix("torch.")
    shared = {"vocab_size": target["vocab_size"], "dtype": name, "torch_dtype": name}
    if isinstance(head, MedusaHeads):
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "medusa_num_heads": head.num_heads,
            "medusa_num_layers": head.num_layers,
            "medusa_fc_bias": True,  # vLLM drops the biases otherwise
            "num_heads": head.num_heads,
            "num_hidden_layers": head.num_layers,
            "hidden_size": target["hidden_size"],
            **shared,
        }
    assert isinstance(head, SequentialHead)
    layer = {**_layer_config(head.shape), **shared}
    layer |= {key: target[key] for key in _ROPE_FIELDS if target.get(key) is not None}
    theta = (target.get("rope_parameters") or {}).get("rope_theta")
    if theta is not None:
        layer.setdefault("rope_theta", theta)  # where Transformers 4 and its users look for it
    if isinstance(head, Eagle3Head):
        assert head.draft_ids is not None
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "draft_vocab_size": len(head.draft_ids),
            "target_hidden_size": target["hidden_size"],
            "eagle_aux_hidden_state_layer_ids": list(feature_layers),
            "layer_ids_are_inputs": True,  # a list that begins with 1 would be taken for outputs
            "num_aux_hidden_states": len(feature_layers),  # vLLM takes 3 otherwise
            "eagle_config": {
                "use_aux_hidden_state": True,
                "num_aux_hidden_states": len(feature_layers),
                "eagle_aux_hidden_state_layer_ids": list(feature_layers),
            },
            **layer,
        }
    if isinstance(head, EagleHead):
        return {
            "architectures": ["EagleLlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "bias": False,
            **layer,
        }
    assert isinstance(head, MtpHead)
    if head.normed:
        return {
            **layer,
            "architectures": ["MiMoForCausalLM"],
            "model_type": "qwen2",  # whose fields these are; what the layer is, vLLM sees by the line above
            "num_hidden_layers": 0,  # no layers but these
            "num_nextn_predict_layers": 1,
            "use_sliding_window": False,
        }
    return {
        "architectures": ["DeepSeekMTPModel"],
        "model_type": "deepseek_mtp",
        "num_hidden_layers": target["num_hidden_layers"],
        "num_nextn_predict_layers": 1,
        **layer,
    }


def _layer_config(shape: HeadShape) -> dict[str, Any]:
    return {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
