"""Names of speculative methods, and the method of a draft checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftwise.config.registry import available_methods, canonical_name, method_class
from draftwise.errors import ConfigError, shown
from draftwise.names import MODELLESS_METHODS

_MARKERS = (
    "eagle3",
    "eagle",
    "medusa",
    "dflash2",
    "dflash",
    "dspark",
    "jetspec",
    "domino",
    "dflare",
    "hydra",
    "mtp",
)
_METHODS_OF = dict.fromkeys(("dflash2", "domino", "dspark", "jetspec"), "dflash")


def resolve_method(value: str) -> str:
    """Return the method's canonical name. A path to a class outside the package stays as it is.

    Raises:
        ConfigError: the method is unknown (the closest name is suggested) or not supported yet.
    """
    name = canonical_name(value)
    if name not in available_methods():
        try:
            method_class(value)  # imports a dotted path; explains any other name
        except ConfigError as error:
            raise ConfigError(f"speculative_config.method: {error}") from error
    return name


def detect_method(model: str, revision: str | None) -> str:
    """Find the method of a draft checkpoint from its config.json (local, or in the hub's cache).

    Without a readable config.json the name decides; a name without a special head is a draft model. The answer may be
    a method that is not supported.
    """
    if canonical_name(model) in MODELLESS_METHODS:
        return canonical_name(model)
    config = read_config(model, revision)
    if (
        config is not None
        and method_of(config) == "draft_model"
        and _is_eagle(Path(model).expanduser(), config)
    ):
        return "eagle"
    if config is None:
        lowered = model.lower()
        for marker in _MARKERS:
            if marker in lowered:
                return _METHODS_OF.get(marker, marker)
        return "draft_model"
    return method_of(config)


def _is_eagle(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether a folder that calls itself a Llama of one layer is an EAGLE head as its authors publish them. The sign
    is ``fc``, the layer that joins token and feature. Only names of tensors are read."""
    if config.get("num_hidden_layers") not in (0, 1):
        return False
    names = tensor_names(folder / "model.safetensors") or tensor_names(folder / "pytorch_model.bin")
    return b"fc.weight" in names


def tensor_names(file: Path) -> bytes:
    """The part of a weight file that names its tensors; empty if there is none, or it cannot be read."""
    try:
        if file.suffix == ".safetensors":
            with file.open("rb") as handle:
                size = int.from_bytes(handle.read(8), "little")
                return handle.read(min(size, 1 << 20))
        with zipfile.ZipFile(file) as archive:
            (data,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            return archive.read(data)
    except (OSError, ValueError, zipfile.BadZipFile):
        return b""


def method_of(config: Mapping[str, Any]) -> str:
    """The method that a draft checkpoint with this config.json is for."""
    kind = str(config.get("speculators_model_type") or config.get("model_type") or "").lower()
    architectures = " ".join(map(str, config.get("architectures") or ())).lower()
    if any(marker in kind or marker in architectures for marker in ("peagle", "p-eagle")):
        return "eagle3"
    for marker in _MARKERS:
        if marker in kind or marker in architectures:
            return _METHODS_OF.get(marker, marker)
    if isinstance(config.get("dflash_config"), Mapping):
        return "dflash"
    if config.get("num_nextn_predict_layers") and config.get("num_hidden_layers") == 0:
        return "mtp"  # MTP layers, and no model
    if "medusa_num_heads" in config:
        return "medusa"
    if "draft_vocab_size" in config or "eagle_aux_hidden_state_layer_ids" in config:
        return "eagle3"
    return "draft_model"


def local_path(model: str, field: str) -> Path:
    """Where a model would be on this machine; it need not be there.

    Raises:
        ConfigError: nobody can say whether it is: this user may not look into a folder above it, there is no such
            user as in ``~user/model``, or the name is longer than any can be; ``field`` names the setting.
    """
    try:
        path = Path(model).expanduser()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.stat(path / "config.json")
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{field}: {shown(model)} cannot be looked at: {reason}") from None
    return path


def read_config(
    model: str, revision: str | None, field: str = "speculative_config.model"
) -> Mapping[str, Any] | None:
    """The config.json of a folder, or of a hub id as far as it is in the hub's cache; None: there is none in reach.

    Raises:
        ConfigError: it is there and cannot be read; ``field`` names the setting that led to it.
    """
    folder = local_path(model, field)
    path = folder / "config.json"
    if not path.is_file():
        if folder.exists():
            return None
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            cached = try_to_load_from_cache(model, "config.json", revision=revision)
        except HFValidationError:
            return None
        if not isinstance(cached, str):
            return None
        path = Path(cached)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{field}: {model!r} has an unreadable config.json: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{field}: {model!r} has a config.json that is not a JSON object")
    return config
