"""Folders that a run will write to."""

from __future__ import annotations

import tempfile
from pathlib import Path

from draftwise.errors import ConfigError


def make_folder(folder: Path, flag: str) -> None:
    """Make a folder and see that it can be written to: before hours of work, not behind them.

    Raises:
        ConfigError: it cannot; names ``flag``.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{flag} {folder}: {error.strerror or error}") from None
