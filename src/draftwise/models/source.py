"""The source of a model: a folder in Hugging Face's format, or a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftwise.errors import ModelLoadError
from draftwise.models.bitsandbytes import bitsandbytes_tensors
from draftwise.models.checkpoint import TensorEntry, read_json, scan_checkpoint
from draftwise.models.gguf.config import METHOD, config_of
from draftwise.models.gguf.reader import is_gguf, read_gguf
from draftwise.models.gguf.tensors import GgufFormat, scan_gguf
from draftwise.models.text_part import PART_OF, text_config, text_tensors
from draftwise.quantization.checkpoint import CheckpointFormat
from draftwise.quantization.parsing import parse_checkpoint_format


def read_raw(place: Path) -> dict[str, Any]:
    """A model's config.json as it is, or that of its text part (`text_part`), or what a GGUF file's would be.

    Raises:
        ModelLoadError: there is none, or it is no JSON object; a GGUF file cannot be read or is of an unknown family.
    """
    if is_gguf(place):
        return config_of(read_gguf(place))
    path = place / "config.json"
    if not path.is_file():
        raise ModelLoadError(f"{place} is not a model folder: config.json is missing")
    raw = read_json(path)
    return text_config(raw, lambda: scan_checkpoint(place) if any(place.glob("*.safetensors")) else ())


def scan(place: Path) -> Mapping[str, TensorEntry]:
    """Names, shapes and places of a model's tensors, of a model of more than text those of its text part, if that is
    what `read_raw` gives; no tensor is read. Raises ModelLoadError as `scan_checkpoint`."""
    if is_gguf(place):
        return scan_gguf(place)
    entries, raw = scan_checkpoint(place), read_raw(place)
    if PART_OF in raw:
        entries = text_tensors(entries)
    return bitsandbytes_tensors(entries) if is_bitsandbytes(written_form(raw)) else entries


def written_form(raw: Mapping[str, Any]) -> Any:
    """``quantization_config`` of a config.json, or of its text part (Kimi K2.5); None: it has none."""
    text = raw.get("text_config")
    return raw.get("quantization_config") or (
        text.get("quantization_config") if isinstance(text, Mapping) else None
    )


def is_bitsandbytes(written: object) -> bool:
    """Whether a ``quantization_config`` says so."""
    return isinstance(written, Mapping) and written.get("quant_method") == "bitsandbytes"


def checkpoint_format(place: Path) -> CheckpointFormat | None:
    """How a checkpoint stores quantised layers; None: it has none. Raises ModelLoadError for others."""
    whole = read_raw(place)
    raw = written_form(whole)
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise ModelLoadError(f"quantization_config is not an object: {raw!r}")
    if is_gguf(place) and raw.get("quant_method") == METHOD:
        return GgufFormat(place)
    if raw.get("quant_method") == "mxfp4" and "GptOssForCausalLM" in (whole.get("architectures") or ()):
        return None  # it reads its experts itself
    return parse_checkpoint_format(raw)
