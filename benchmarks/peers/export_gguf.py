"""Write a Llama checkpoint in Hugging Face format as GGUF, for llama.cpp. Runs where the gguf package is installed.

    python benchmarks/peers/export_gguf.py FOLDER OUT.gguf [--type bf16|q8_0|q4_0]

Requests are made of token ids, so the vocabulary that is written only has the right size.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

TYPES = {
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Name and float32 values of every bfloat16 tensor of a safetensors file.

    The file is: length of the header (8 bytes), the header (JSON: name -> shape and place), the data.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = np.memmap(path, np.uint8, "r", offset=8 + size)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise SystemExit(f"{name} is {entry['dtype']}; only bfloat16 checkpoints are written")
        start, end = entry["data_offsets"]
        halves = data[start:end].view(np.uint16).reshape(entry["shape"])
        yield name, (halves.astype(np.uint32) << 16).view(np.float32)


def gguf_name(name: str) -> str:
    """``model.layers.3.mlp.up_proj.weight`` -> ``blk.3.ffn_up.weight``."""
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{PARTS[rest.removesuffix('.weight')]}.weight"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in the order llama.cpp rotates them: it pairs neighbours, Hugging Face pairs
    row i of a head with row i + D / 2. Example, D = 4: rows 0 1 2 3 -> 0 2 1 3."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write(folder: Path, out: Path, kind: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    quantized, file_type = TYPES[kind]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_name(folder.name)
    writer.add_file_type(file_type)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_rope_dimension_count(dim)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _vocabulary(writer, config["vocab_size"])
    for name, values in tensors(folder / "model.safetensors"):
        if name.endswith("q_proj.weight"):
            values = interleaved(values, heads)
        elif name.endswith("k_proj.weight"):
            values = interleaved(values, kv_heads)
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
        else:
            packed = gguf.quants.quantize(np.ascontiguousarray(values), quantized)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Tokens <0>, <1>, ...: of SentencePiece's kind, with the bytes that kind cannot do without where there is room."""
    names = [f"<{i}>" for i in range(size)]
    kinds = [int(gguf.TokenType.NORMAL)] * size
    names[0], kinds[0] = "<unk>", int(gguf.TokenType.UNKNOWN)
    for byte in range(256):
        names[3 + byte], kinds[3 + byte] = f"<0x{byte:02X}>", int(gguf.TokenType.BYTE)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(names)
    writer.add_token_scores([0.0] * size)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=sorted(TYPES), default="bf16")
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write(given.folder, given.out, given.type)
    print(f"{given.out}: {given.out.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
