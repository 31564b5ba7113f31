"""Write a Llama-like model of random weights: the one of 1.1 billion parameters that speed is measured with.

    python benchmarks/make_model.py /tmp/llama-1b

The folder has no tokenizer: load it with ``skip_tokenizer_init=True``. Weights are drawn from a seeded generator and
small enough that activations stay finite; what they say means nothing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor."""
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    assert isinstance(hidden, int) and isinstance(inner, int)
    kv = hidden // 32 * 4
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (32000, hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(22):
        layer = f"model.layers.{i}."
        found[layer + "input_layernorm.weight"] = found[layer + "post_attention_layernorm.weight"] = (hidden,)
        for name, shape in (
            ("self_attn.q_proj", (hidden, hidden)),
            ("self_attn.k_proj", (kv, hidden)),
            ("self_attn.v_proj", (kv, hidden)),
            ("self_attn.o_proj", (hidden, hidden)),
            ("mlp.gate_proj", (inner, hidden)),
            ("mlp.up_proj", (inner, hidden)),
            ("mlp.down_proj", (hidden, inner)),
        ):
            found[layer + name + ".weight"] = shape
    found["lm_head.weight"] = (32000, hidden)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in shapes().items():
        if len(shape) == 1:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            tensors[name] = (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    print(f"{folder}: {sum(t.numel() for t in tensors.values()) / 1e9:.2f} billion parameters")


if __name__ == "__main__":
    main()
