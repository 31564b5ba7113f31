"""``quantization_config`` of a config.json: which form a checkpoint's quantised layers have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftwise.errors import ModelLoadError
from draftwise.quantization.awq_gptq import AwqFormat, AwqGemvFormat, GptqFormat
from draftwise.quantization.bitsandbytes import Bnb4Format, BnbInt8Format
from draftwise.quantization.checkpoint import CheckpointFormat
from draftwise.quantization.compressed_tensors import Fp8Format, Int8Format, PackedFormat
from draftwise.quantization.floats import Fp8BlockFormat, Fp8TensorFormat
from draftwise.quantization.fp4 import Fp4Format
from draftwise.quantization.grouped import GroupsFormat
from draftwise.quantization.modelopt import modelopt_form
from draftwise.quantization.quark import quark_form


def parse_checkpoint_format(raw: Any) -> CheckpointFormat:
    """The format that ``quantization_config`` of a config.json describes.

    Raises:
        ModelLoadError: One that is not supported; says what about it.
    """
    if not isinstance(raw, Mapping):
        raise ModelLoadError(f"quantization_config is not an object: {raw!r}")
    method = str(raw.get("quant_method", "unknown"))
    if method == "awq":
        _expect(raw, method, "bits", 4)
        group = _integer(raw, method, "group_size", 128)
        if str(raw.get("version", "gemm")).lower() == "gemv":
            return AwqGemvFormat(group)
        _expect(raw, method, "version", "gemm", default="gemm")
        return AwqFormat(group)
    if method == "gptq":
        bits = raw.get("bits")
        if bits not in (4, 8):
            raise _unsupported(method, f"bits {bits!r}")
        written = str(raw.get("checkpoint_format", "gptq")).lower()
        if written not in ("gptq", "gptq_v2"):
            raise _unsupported(method, f"checkpoint_format {written!r}")
        return GptqFormat(_integer(raw, method, "group_size", 128), 0 if written == "gptq_v2" else 1, bits)
    if method == "fp8":
        return _hf_fp8(raw)
    if method == "bitsandbytes":
        return _bitsandbytes(raw)
    if method in ("modelopt", "modelopt_fp4", "modelopt_mixed", "quark"):
        found = quark_form(raw) if method == "quark" else modelopt_form(raw)
        if isinstance(found, str):
            raise _unsupported(method, found)
        return found
    if method == "compressed-tensors":
        try:
            return _compressed_tensors(raw)
        except (AttributeError, TypeError) as error:  # something in it is no object, or no number
            raise _unsupported(method, f"a configuration that is not understood ({error})") from error
    raise _unsupported(method, "this method")


def _hf_fp8(raw: Mapping[str, Any]) -> CheckpointFormat:
    """DeepSeek's and Qwen's: blocks, each with a scale; or one scale for a tensor."""
    block = raw.get("weight_block_size")
    if block is None:
        return Fp8TensorFormat()
    if (
        not isinstance(block, list | tuple)
        or len(block) != 2
        or not all(type(n) is int and n > 0 for n in block)
    ):
        raise _unsupported("fp8", f"weight_block_size {block!r}")
    return Fp8BlockFormat(block[0], block[1], ".weight_scale_inv")


def _bitsandbytes(raw: Mapping[str, Any]) -> CheckpointFormat:
    """Which of its two forms: older writers put an underscore before the fields."""
    four, eight = (bool(raw.get(f"load_in_{n}bit", raw.get(f"_load_in_{n}bit"))) for n in (4, 8))
    if four == eight:
        raise _unsupported("bitsandbytes", "a configuration that says neither load_in_4bit nor load_in_8bit")
    return Bnb4Format() if four else BnbInt8Format()


def _compressed_tensors(raw: Mapping[str, Any]) -> CheckpointFormat:
    groups = raw.get("config_groups")
    if not groups and raw.get("kv_cache_scheme"):  # nothing but keys and values
        return GroupsFormat(())
    if not isinstance(groups, Mapping) or not groups:
        raise _unsupported("compressed-tensors", "a configuration without config_groups")
    turns = ((raw.get("transform_config") or {}).get("config_groups") or {}).values()
    places = {use.get("location") for turn in turns for use in turn.get("apply", ())}
    if not places <= {"weight_input", "weight_output"}:  # what is in the weights already
        raise _unsupported("compressed-tensors", "a transform_config that rotates more than weights")
    found = []
    for scheme in groups.values():
        targets = scheme.get("targets", ["Linear"])
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            raise _unsupported("compressed-tensors", f"targets {targets!r}")
        found.append((tuple(targets), _scheme(raw, scheme)))
    # of one form it is enough to see which layers have its tensors
    return found[0][1] if len(found) == 1 else GroupsFormat(tuple(found))


def _scheme(raw: Mapping[str, Any], scheme: Mapping[str, Any]) -> CheckpointFormat:
    method = "compressed-tensors"
    weights, rows = scheme.get("weights") or {}, scheme.get("input_activations")
    kind, bits, strategy = weights.get("type", "int"), weights.get("num_bits"), weights.get("strategy")
    if kind == "float" and bits == 4:
        return _fp4(raw, scheme, strategy)
    if kind == "float" and bits == 8:
        return _fp8(raw, scheme, rows or {}, strategy)
    if kind != "int" or bits not in (4, 8):
        raise _unsupported(method, f"weights of type {kind} with {bits} bits")
    if weights.get("actorder") not in (None, False, True, "weight", "static", "group"):
        raise _unsupported(method, f"actorder {weights['actorder']!r}")
    anywhere = weights.get("actorder") in ("group", True)
    layout = str(scheme.get("format") or raw.get("format"))
    symmetric = bool(weights.get("symmetric", True))
    if layout == "pack-quantized" and rows is None:
        if strategy == "channel" and (bits == 4 or symmetric):
            return PackedFormat(bits, None, symmetric)
        if strategy == "group" and (bits == 4 or symmetric):
            return PackedFormat(bits, int(weights["group_size"]), symmetric, anywhere)
    if layout == "int-quantized" and bits == 8 and symmetric and strategy == "channel":
        if rows is None:
            raise _unsupported(method, "int-quantized weights without quantised activations")
        if rows.get("dynamic") and rows.get("num_bits") == 8 and rows.get("strategy") == "token":
            return Int8Format()
        raise _unsupported(method, "activations that are not quantised per token as they come")
    raise _unsupported(method, f"{bits}-bit weights by {strategy} in format {layout}")


def _fp4(raw: Mapping[str, Any], scheme: Mapping[str, Any], strategy: Any) -> CheckpointFormat:
    method = "compressed-tensors"
    weights, layout = scheme["weights"], scheme.get("format") or raw.get("format")
    found = (layout, strategy, weights.get("group_size"))
    rounds_rows = scheme.get("input_activations") is not None
    if not weights.get("symmetric", True):
        raise _unsupported(method, "floats of four bits with zero points")
    if found == ("nvfp4-pack-quantized", "tensor_group", 16):
        return Fp4Format("nvfp4", ".weight_packed", ".weight_global_scale", dynamic=rounds_rows)
    if found == ("mxfp4-pack-quantized", "group", 32):
        return Fp4Format("mxfp4", ".weight_packed", dynamic=rounds_rows)
    raise _unsupported(
        method, f"weights of type float with 4 bits by {strategy} of {found[2]} in format {layout}"
    )


def _fp8(
    raw: Mapping[str, Any], scheme: Mapping[str, Any], rows: Mapping[str, Any], strategy: Any
) -> CheckpointFormat:
    method = "compressed-tensors"
    layout = scheme.get("format") or raw.get("format")
    if layout == "float-quantized" and strategy == "tensor":
        return Fp8TensorFormat()
    weights = scheme.get("weights") or {}
    if (layout, strategy, weights.get("group_size")) == ("mxfp8-quantized", "group", 32):
        return Fp8BlockFormat(1, 32, ".weight_scale", exponents=True)
    block = weights.get("block_structure")
    if layout == "float-quantized" and strategy == "block" and isinstance(block, list) and len(block) == 2:
        return Fp8BlockFormat(block[0], block[1], ".weight_scale")
    if layout != "float-quantized" or strategy != "channel":
        raise _unsupported(method, f"weights of type float with 8 bits by {strategy} in format {layout}")
    per_token = rows.get("dynamic") and rows.get("strategy") == "token"
    if not per_token or rows.get("type") != "float" or rows.get("num_bits") != 8:
        raise _unsupported(method, "fp8 weights whose activations are not fp8 per token as they come")
    return Fp8Format()


def _unsupported(method: str, what: str) -> ModelLoadError:
    return ModelLoadError(
        f"quantised checkpoint ({method}): {what} is not supported; supported are awq with 4 bits, gptq with 4 and 8, "
        "fp8 (one scale, or one for each block), bitsandbytes (4 and 8 bits), compressed-tensors w4a16, w8a16, w8a8 "
        "(int8 or fp8), nvfp4, mxfp4 and mxfp8, modelopt (fp8, nvfp4, mxfp8), quark (fp8, mxfp4), and GGUF files"
    )


def _expect(raw: Mapping[str, Any], method: str, name: str, value: Any, default: Any = None) -> None:
    found = raw.get(name, default)
    if (found.lower() if isinstance(found, str) else found) != value:
        raise _unsupported(method, f"{name} {found!r}")


def _integer(raw: Mapping[str, Any], method: str, name: str, default: int) -> int:
    value = raw.get(name, default)
    if not isinstance(value, int) or (value != -1 and value < 8):
        raise _unsupported(method, f"{name} {value!r}")
    return value
