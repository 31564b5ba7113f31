"""The source of a model: a folder in Hugging Face's format, or a GGUF file."""

from __future__ import annotations

import functools
import logging
import re
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

logger = logging.getLogger("draftwise")


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
    raw = with_form(place, read_json(path))
    return text_config(raw, lambda: scan_checkpoint(place) if any(place.glob("*.safetensors")) else ())


_BESIDE = "hf_quant_config.json"


def with_form(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """A folder's config.json, with the ``quantization_config`` that ModelOpt wrote into a file of its own.

    Raises:
        ModelLoadError: the file is no JSON object, or says nothing of a quantisation.
    """
    path = folder / _BESIDE
    if written_form(raw) is not None or not path.is_file():
        return raw
    found = read_json(path).get("quantization")
    if not isinstance(found, Mapping):
        raise ModelLoadError(f"{path} has no object named quantization")
    return {**raw, "quantization_config": {**found, "quant_method": "modelopt"}}


def scan(place: Path) -> Mapping[str, TensorEntry]:
    """Names, shapes and places of a model's tensors, of a model of more than text those of its text part, if that is
    what `read_raw` gives; no tensor is read. Raises ModelLoadError as `scan_checkpoint`."""
    if is_gguf(place):
        return scan_gguf(place)
    entries, raw = scan_checkpoint(place), read_raw(place)
    if PART_OF in raw:
        entries = text_tensors(entries)
    if written_form(raw) is not None:
        entries = _without_cache_scales(place, entries)
    return bitsandbytes_tensors(entries) if is_bitsandbytes(written_form(raw)) else entries


_CACHE_SCALES = re.compile(
    r"\.([qkv]_scale|[qkv]_zero_point|kv_scale|(q|k|v|qkv)_proj\.output_scale|prob_output_scale|[kv]_cache\.scale)$"
)
"""Names of scales for a cache of fp8, as compressed-tensors, ModelOpt and Quark write them beside quantised weights."""


def _without_cache_scales(place: Path, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Without what nobody reads: caches of int8 and fp8 have a scale of their own for each token and head."""
    kept = {name: entry for name, entry in entries.items() if not _CACHE_SCALES.search(name)}
    if len(kept) < len(entries):
        _say_unread(place)
    return kept


@functools.cache
def _say_unread(place: Path) -> None:
    """Once per model and process."""
    logger.info(
        "%s has scales for keys and values in fp8, which are not read: with kv_cache_dtype fp8 or int8 every token and "
        "head gets a scale of its own", place
    )  # fmt: skip


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
