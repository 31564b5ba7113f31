"""Folders of the models that ship inside the package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from draftwise.errors import ModelLoadError


def embedded_path(name: str) -> Path:
    """The folder of an embedded demo model, ``"target"`` or ``"draft"``.

    Raises:
        ModelLoadError: this installation does not contain it.
    """
    path = Path(str(files("draftwise") / "assets" / "demo" / name))
    if not (path / "config.json").is_file():
        raise ModelLoadError(f"the embedded {name} model is not in this installation ({path} is missing)")
    return path
