"""GGUF files written on the spot, as llama.cpp's converter writes them. Spelt out, as a check of what reads them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

CODES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "BF16": 30,
}  # fmt: skip


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """Type and value of one entry of metadata."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    kind, form = (6, "f") if isinstance(value[0], float) else (5, "i")
    return struct.pack("<IIQ", 9, kind, len(value)) + struct.pack(f"<{len(value)}{form}", *value)


def _half(values: Tensor) -> np.ndarray[Any, Any]:
    """[n] -> [n, 2] bytes."""
    return values.half().numpy().view(np.uint8).reshape(-1, 2)


def encode(values: Tensor, kind: str) -> tuple[bytes, Tensor]:
    """Numbers [rows, columns] in a type: its bytes, and the numbers that they stand for."""
    if kind in ("F32", "F16", "BF16"):
        cast = values.to(
            {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        ).contiguous()
        return cast.view(torch.uint8).numpy().tobytes(), cast.float()
    if kind in ("Q4_K", "Q6_K"):
        return _encode_k(values, kind)
    blocks = values.float().reshape(-1, 32)
    low, high = blocks.amin(1), blocks.amax(1)
    out: list[np.ndarray[Any, Any]]
    if kind == "Q8_0":
        scale = (blocks.abs().amax(1) / 127).half().float()
        codes = (blocks / scale[:, None]).nan_to_num().round().clamp(-127, 127)
        codes[0, 0] = -128  # what no writer makes and the format allows
        out = [_half(scale), codes.to(torch.int8).numpy().view(np.uint8)]
        stands = codes * scale[:, None]
    elif kind in ("Q4_0", "Q5_0"):
        top = 8 if kind == "Q4_0" else 16
        signed = torch.where(-low > high, low, high)
        scale = (signed / -top).half().float()
        codes = ((blocks / scale[:, None]).nan_to_num().round() + top).clamp(0, 2 * top - 1)
        out = [_half(scale), *_split(codes, kind)]
        stands = (codes - top) * scale[:, None]
    else:
        steps = 15 if kind == "Q4_1" else 31
        scale, least = ((high - low) / steps).half().float(), low.half().float()
        codes = ((blocks - least[:, None]) / scale[:, None]).nan_to_num().round().clamp(0, steps)
        out = [_half(scale), _half(least), *_split(codes, kind)]
        stands = codes * scale[:, None] + least[:, None]
    return np.concatenate(out, axis=1).tobytes(), stands.view(values.shape)


def _split(codes: Tensor, kind: str) -> list[np.ndarray[Any, Any]]:
    """Codes [n, 32] as a word of fifth bits (Q5) and 16 bytes of two nibbles."""
    whole = codes.to(torch.int64).numpy()
    nibbles = np.zeros((len(whole), 16), np.uint8)
    fifth = np.zeros(len(whole), np.uint32)
    for j in range(32):
        nibbles[:, j % 16] |= ((whole[:, j] & 15) << (4 * (j // 16))).astype(np.uint8)
        fifth |= ((whole[:, j] >> 4) << j).astype(np.uint32)
    return [*([fifth.view(np.uint8).reshape(-1, 4)] if kind.startswith("Q5") else []), nibbles]


def _encode_k(values: Tensor, kind: str) -> tuple[bytes, Tensor]:
    """Blocks of 256 with codes by chance, small enough to be weights: only reading them is in question."""
    count = values.numel() // 256
    generator = np.random.default_rng(values.numel())
    data = generator.integers(0, 256, (count, 144 if kind == "Q4_K" else 210), dtype=np.uint8)
    stands = np.zeros((count, 256), np.float32)
    if kind == "Q4_K":
        data[:, 0:4] = np.array([2e-4, 1e-3], np.float16).view(np.uint8)
        scale, least = (np.frombuffer(data[0, i : i + 2].tobytes(), np.float16)[0] for i in (0, 2))
        for n, block in enumerate(data):
            packed, codes = block[4:16].astype(int), block[16:]
            for g in range(8):  # sub-blocks of 32: scales and minima of six bits each
                if g < 4:
                    s, m = packed[g] & 63, packed[g + 4] & 63
                else:
                    s = packed[g + 4] & 15 | (packed[g - 4] >> 6) << 4
                    m = packed[g + 4] >> 4 | (packed[g] >> 6) << 4
                for j in range(32):
                    code = codes[g // 2 * 32 + j] >> (4 * (g % 2)) & 15
                    stands[n, 32 * g + j] = float(scale) * s * code - float(least) * m
    else:
        data[:, 208:210] = np.array([4e-5], np.float16).view(np.uint8)
        scale = np.frombuffer(data[0, 208:210].tobytes(), np.float16)[0]
        for n, block in enumerate(data):
            low, high, scales = (
                block[:128].astype(int),
                block[128:192].astype(int),
                block[192:208].view(np.int8),
            )
            for j in range(256):
                half, row, lane = j // 128, j % 128 // 32, j % 32
                nibble = low[64 * half + lane + 32 * (row % 2)] >> (4 * (row // 2)) & 15
                code = nibble | (high[32 * half + lane] >> (2 * row) & 3) << 4
                stands[n, j] = float(scale) * int(scales[8 * half + 2 * row + lane // 16]) * (code - 32)
    return data.tobytes(), torch.from_numpy(stands).view(values.shape)


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[Tensor, str]], *, version: int = 3
) -> dict[str, Tensor]:
    """Write a file of ``name -> (numbers, type)``; returns the numbers that it stands for."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += _text(key) + _value(value)
    data, stands = b"", {}
    for name, (values, kind) in tensors.items():
        encoded, stands[name] = encode(values, kind)
        head += _text(name) + struct.pack("<I", values.ndim)
        head += struct.pack(f"<{values.ndim}Q", *reversed(values.shape))
        head += struct.pack("<IQ", CODES[kind], len(data))
        data += encoded + bytes(-len(encoded) % 32)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return stands


# ------------------------------------------------------------------------------------- from a checkpoint's folder

NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip
GEMMA = NAMES | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors of a checkpoint in one file."""
    config = json.loads((folder / "config.json").read_text())
    with safe_open(folder / "model.safetensors", framework="pt") as handle:
        return config, {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - no mapping


def gguf_name(name: str, architecture: str) -> str:
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    base, _, end = name.rpartition(".")
    if base in outer:
        return f"{outer[base]}.{end}"
    _, _, layer, part = base.split(".", 3)
    table = GEMMA if architecture in ("gemma2", "gemma3") else NAMES
    return f"blk.{layer}.{table[part]}.{end}"


def convert(
    folder: Path,
    path: Path,
    architecture: str,
    kind: str,
    more: Mapping[str, Any] | None = None,
    kinds: Mapping[str, str] | None = None,
) -> dict[str, Tensor]:
    """Write a folder's model as GGUF, matrices of layers in ``kind`` (or, by a part of their name, in ``kinds``).

    Returns the checkpoint's tensors as the file has them.
    """
    config, weights = read_folder(folder)
    heads, kv_heads = (
        config["num_attention_heads"],
        config.get("num_key_value_heads", config["num_attention_heads"]),
    )
    eps = config.get("rms_norm_eps", config.get("norm_epsilon"))
    a = architecture
    metadata: dict[str, Any] = {
        "general.architecture": a,
        f"{a}.context_length": config["max_position_embeddings"],
        f"{a}.embedding_length": config["hidden_size"],
        f"{a}.feed_forward_length": config["intermediate_size"],
        f"{a}.block_count": config["num_hidden_layers"],
        f"{a}.attention.head_count": heads,
        f"{a}.attention.head_count_kv": kv_heads,
        f"{a}.attention.key_length": config.get("head_dim") or config["hidden_size"] // heads,
        f"{a}.attention.layer_norm_rms_epsilon": float(eps),
        f"{a}.rope.freq_base": float((config.get("rope_parameters") or {}).get("rope_theta", 10000.0)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **(more or {}),
    }
    tensors: dict[str, tuple[Tensor, str]] = {}
    undo: dict[str, tuple[str, Any]] = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    members: dict[str, dict[int, str]] = {}  # of stacks: names of their parts
    for name, value in weights.items():
        if ".experts." in name:
            base, _, rest = name.partition(".experts.")
            number, part, _ = rest.split(".")
            layer = base.split(".")[2]
            exps = f"blk.{layer}.{NAMES['mlp.' + part]}_exps.weight"
            stacks.setdefault(exps, {})[int(number)] = value
            members.setdefault(exps, {})[int(number)] = name
            continue
        target = gguf_name(name, a)
        change: Any = None
        if a == "llama" and ("attn_q." in target or "attn_k." in target):
            count = heads if "attn_q." in target else kv_heads
            half = value.shape[0] // count // 2
            change = ("permuted", count)
            value = value.reshape(count, 2, half, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        if a.startswith("gemma") and target.endswith("norm.weight"):
            change, value = ("shifted", None), value + 1
        wanted = next((k for part, k in (kinds or {}).items() if part in target), kind)
        if value.ndim < 2 or (target.startswith(("token_embd", "output")) and wanted not in ("F16", "BF16")):
            wanted = "F32"
        tensors[target] = (value.float(), wanted)
        undo[target] = (name, change)
    for target, found in stacks.items():
        tensors[target] = (torch.stack([found[i] for i in range(len(found))]).float(), kind)
    stands = write_gguf(path, metadata, tensors)
    out: dict[str, Tensor] = {}
    for target, value in stands.items():
        out |= {name: value[i] for i, name in members.get(target, {}).items()}
        if target not in undo:
            continue
        name, change = undo[target]
        if change is not None and change[0] == "permuted":
            half = value.shape[0] // change[1] // 2
            value = value.reshape(change[1], half, 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        elif change is not None:
            value = value - 1
        out[name] = value
    return out
