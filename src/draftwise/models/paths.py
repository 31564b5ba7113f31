"""Where a model's files are: a folder, or the hub."""

from __future__ import annotations

from pathlib import Path

from draftwise.config.methods import local_path
from draftwise.errors import ConfigError, ModelLoadError
from draftwise.models.gguf.reader import find_gguf, is_gguf


def resolve_path(
    path: str | Path,
    revision: str | None = None,
    *,
    weights: bool = True,
    code: bool = False,
    pickles: bool = False,
) -> Path:
    """The folder of a model: ``path`` itself if it is one, else the hub's snapshot of that id (cached or downloaded).
    Or its GGUF file: the one that ``path`` names, the only one in a folder without config.json, or, as
    ``owner/name/file.gguf``, one on the hub.

    Args:
        revision: branch, tag or commit on the hub; a local folder has none, so giving one there is an error.
        weights: whether the weight files are needed too.
        code: whether Python files are (a tokenizer's own code, when it is trusted).
        pickles: whether weights that ``torch.save`` wrote are needed too, as some draft heads have them.

    Raises:
        ModelLoadError: neither a folder nor an id that can be had.
    """
    text = str(path)
    if not text.strip():
        raise ModelLoadError("the model's path is empty")
    try:
        folder = local_path(text, "model")
    except ConfigError as error:
        raise ModelLoadError(str(error)) from None
    if folder.is_dir():
        if revision is not None:
            raise ModelLoadError(f"revision {revision!r} was given, but {folder} is a local folder")
        return find_gguf(folder) or folder
    if is_gguf(folder):
        if revision is not None:
            raise ModelLoadError(f"revision {revision!r} was given, but {folder} is a local file")
        return folder
    if folder.exists():
        raise ModelLoadError(
            f"{text} is a file; a model is a folder with config.json and safetensors, or a GGUF file"
        )
    if text.count("/") == 2 and text.lower().endswith(".gguf") and not text.startswith((".", "/", "~")):
        return _hub_file(text, revision)
    if text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise ModelLoadError(f"model folder {text!r} does not exist")
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.txt", "*.model", "*.jinja"]
    wanted += ["*.safetensors"] * weights + ["*.py"] * code + ["*.bin", "*.pt"] * pickles
    # some repositories hold the same weights a second time, in their vendor's own format
    unwanted = ["consolidated*", "original/*"]
    try:
        return Path(
            snapshot_download(text, revision=revision, allow_patterns=wanted, ignore_patterns=unwanted)
        )
    except Exception as error:  # offline, no such id, gated, disk full: all end here
        reason = str(error).strip().split("\n")[0]
        raise ModelLoadError(
            f"{text!r} is not a local folder, and the hub does not have it: {type(error).__name__}: {reason}"
        ) from error


def _hub_file(text: str, revision: str | None) -> Path:
    """``owner/name/file.gguf`` on the hub, cached or downloaded."""
    from huggingface_hub import hf_hub_download

    owner, name, file = text.split("/")
    try:
        return Path(hf_hub_download(f"{owner}/{name}", file, revision=revision))
    except Exception as error:  # offline, no such file, gated, disk full: all end here
        reason = str(error).strip().split("\n")[0]
        raise ModelLoadError(
            f"{text!r} is not a local file, and the hub does not have it: {type(error).__name__}: {reason}"
        ) from error
