"""Rounded weights kept on disk, so that a large model is rounded once and not at every start.

What is kept is a checkpoint of its own (compressed-tensors, "pack-quantized"), one small file per parameter, so that
writing it takes no more memory than the largest layer::

    <cache>/<model>-int4-0123456789abcdef/
        config.json                    the model's, with quantization_config
        00000.safetensors ...          codes and scales of linear layers, all other tensors as they were
        model.safetensors.index.json
        manifest.json                  the digest of every file; written last

The folder's name carries a digest of where the weights came from (the files' names, sizes, times and edges), of the
format and of the dtype they were read in: another checkpoint never finds it. A folder is written beside its place and
then renamed, so that it is there whole or not at all; one whose files do not have their digests is written anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftwise.errors import ConfigError
from draftwise.models.checkpoint import TensorEntry, copy_tensors
from draftwise.models.source import read_raw
from draftwise.quantization.scheme import Scheme
from draftwise.quantization.weights import QuantizedWeight, quantize

logger = logging.getLogger("draftwise")

CACHE_VERSION = 2
_EDGE = 1 << 20  # bytes at both ends of a file that its identity is made from
_LEFT_BEHIND = 3600.0  # seconds after which a temporary folder counts as abandoned
_MANIFEST = "manifest.json"
_INDEX = "model.safetensors.index.json"
_TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

Stacked = Sequence[tuple[str, int]]
"""Names and rows of the tensors that one linear layer's weight is stacked from."""


def default_cache() -> Path:
    """Where rounded weights are kept if the user says "auto". Raises ConfigError."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a container's user that no file names
        raise ConfigError(
            "quantization_cache: there is no home directory for 'auto'; name a folder"
        ) from None
    return Path(base, "draftwise", "quantized")


def cached_checkpoint(
    folder: Path,
    cache: Path,
    scheme: Scheme,
    dtype: torch.dtype,
    entries: Mapping[str, TensorEntry],
    linears: Sequence[Stacked],
) -> Path | None:
    """The folder with a checkpoint's rounded weights, written first if it is not there or damaged.

    Args:
        folder: the float checkpoint.
        cache: where such folders are kept; made if it is missing.
        dtype: what weights are read as before they are rounded.
        entries: the checkpoint's tensors.
        linears: which of them are linear layers, stacked as the model stacks them: a layer is rounded as a whole.

    Returns:
        The folder, or None, with a warning in the log, if it cannot be written.
    """
    place = _place(folder, cache, scheme, dtype, entries)
    if place.is_dir():
        damage = _damage(place)
        if damage is None:
            return place
        logger.warning("rounded weights in %s are damaged (%s) and are made anew", place, damage)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        for left in cache.glob(f".{place.name}.*"):  # by a process that was ended while it wrote
            if time.time() - left.stat().st_mtime > _LEFT_BEHIND:
                shutil.rmtree(left, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=cache))
        try:
            _write(temporary, folder, scheme, dtype, entries, linears)
            if place.is_dir():
                if _damage(place) is None:
                    return place  # another process was quicker, and may be reading
                shutil.rmtree(place)
            temporary.rename(place)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        if place.is_dir() and _damage(place) is None:
            return place  # another process was quicker
        logger.warning("quantization_cache: rounded weights are not kept: %s", error)
        return None
    logger.info("rounded weights are kept in %s", place)
    return place


def kept_checkpoint(
    folder: Path, cache: Path, scheme: Scheme, dtype: torch.dtype, entries: Mapping[str, TensorEntry]
) -> Path | None:
    """As `cached_checkpoint`, if it is there and whole already; None: it is not."""
    place = _place(folder, cache, scheme, dtype, entries)
    return place if place.is_dir() and _damage(place) is None else None


def _place(
    folder: Path, cache: Path, scheme: Scheme, dtype: torch.dtype, entries: Mapping[str, TensorEntry]
) -> Path:
    return cache / f"{folder.name}-{scheme.name}-{_identity(folder, scheme, dtype, entries)}"


def _identity(folder: Path, scheme: Scheme, dtype: torch.dtype, entries: Mapping[str, TensorEntry]) -> str:
    digest = hashlib.sha256(f"{CACHE_VERSION} {scheme.name} {dtype}".encode())
    digest.update(json.dumps(read_raw(folder), sort_keys=True).encode())
    for file in sorted({entry.file for entry in entries.values()}):
        facts = file.stat()
        digest.update(f"{file.name} {facts.st_size} {facts.st_mtime_ns}".encode())
        with file.open("rb") as handle:
            digest.update(handle.read(_EDGE))
            handle.seek(max(0, facts.st_size - _EDGE))
            digest.update(handle.read(_EDGE))
    return digest.hexdigest()[:16]


def _damage(place: Path) -> str | None:
    """The fault of a folder of rounded weights; None: there is none."""
    try:
        files = json.loads((place / _MANIFEST).read_text())["files"]
        for name, expected in files.items():
            if _digest(place / name) != expected:
                return f"{name} has changed"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _digest(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _write(
    target: Path,
    folder: Path,
    scheme: Scheme,
    dtype: torch.dtype,
    entries: Mapping[str, TensorEntry],
    linears: Sequence[Stacked],
) -> None:
    weight_map: dict[str, str] = {}

    def save(tensors: Mapping[str, Tensor]) -> None:
        file = f"{len(set(weight_map.values())):05d}.safetensors"
        save_file({name: value.contiguous() for name, value in tensors.items()}, target / file)
        weight_map.update(dict.fromkeys(tensors, file))

    rounded: set[str] = set()
    for parts in linears:
        columns = entries[parts[0][0]].shape[1]
        if scheme.group is not None and columns % scheme.group:
            continue  # the format has no group that is not full; such a layer is rounded when it is loaded
        whole = torch.empty((sum(rows for _, rows in parts), columns), dtype=dtype)
        places: dict[str, Tensor] = {}
        start = 0
        for name, rows in parts:
            places[name] = whole[start : start + rows]
            start += rows
        copy_tensors(entries, places)
        save(_packed(quantize(whole, scheme), parts))
        rounded.update(places)
    for name, entry in entries.items():
        if name not in rounded:
            value = torch.empty(entry.shape, dtype=_TORCH_DTYPES.get(entry.dtype, dtype))
            copy_tensors(entries, {name: value})
            save({name: value})
    config = {**read_raw(folder), "quantization_config": _description(scheme)}
    (target / "config.json").write_text(json.dumps(config, indent=1))
    extra = folder / "generation_config.json"
    if extra.is_file():
        shutil.copyfile(extra, target / extra.name)
    (target / _INDEX).write_text(json.dumps({"weight_map": weight_map}))
    files = {path.name: _digest(path) for path in sorted(target.iterdir())}
    (target / _MANIFEST).write_text(json.dumps({"version": CACHE_VERSION, "files": files}, indent=1))


def _packed(weight: QuantizedWeight, parts: Stacked) -> dict[str, Tensor]:
    """A stacked layer's codes and scales as tensors of the checkpoint."""
    per_word = 32 // weight.bits
    codes = weight.codes.to(torch.int64) + (128 if weight.bits == 8 else 0)
    missing = -codes.shape[1] % per_word
    codes = torch.nn.functional.pad(codes, (0, missing)).view(codes.shape[0], -1, per_word)
    words = (codes << (torch.arange(per_word) * weight.bits)).sum(dim=2)
    # the sum is unsigned: its upper half becomes negative
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    scales = weight.scales.view(len(words), -1)
    found: dict[str, Tensor] = {}
    start = 0
    for name, rows in parts:
        base = name.removesuffix(".weight")
        found[f"{base}.weight_packed"] = words[start : start + rows]
        found[f"{base}.weight_scale"] = scales[start : start + rows]
        start += rows
    return found


def _description(scheme: Scheme) -> dict[str, Any]:
    """``quantization_config`` of a scheme. Whether rows are quantised is the engine's business."""
    weights = {
        "type": "int",
        "num_bits": scheme.bits,
        "strategy": "channel" if scheme.group is None else "group",
        "group_size": scheme.group,
        "symmetric": True,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
