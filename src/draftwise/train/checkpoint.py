"""Checkpoints of training runs: written whole or not at all, and read or refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftwise.errors import ConfigError
from draftwise.train.folders import whole_file


def write_checkpoint(path: Path, saved: dict[str, Any]) -> None:
    """Raises DraftwiseError if it cannot be written; what was there is there still."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # To a file: of one that it opens itself, torch does not say what the system did.
    with whole_file(path) as partial, partial.open("wb") as file:
        torch.save(saved, file)


def read_checkpoint(path: Path, has: str) -> dict[str, Any]:
    """``has``: a key that checkpoints of this kind of run have. Raises ConfigError."""
    try:
        saved = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch has no error of its own for this
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(saved, dict) or has not in saved:
        raise ConfigError(f"{path} is no checkpoint of this kind of run; choose another --work")
    return saved
