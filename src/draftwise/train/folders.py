"""Folders that a run will write to, and files in them that are whole or not there."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from draftwise.errors import ConfigError, DraftwiseError


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


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """The name of another file to write, which then takes the place of ``path``: what is there is never half of it. A
    process that has the old file mapped keeps reading it.

    Raises:
        DraftwiseError: it cannot be written; the disk is full, say. Libraries have errors of all kinds for that.
    """
    partial = path.with_name(path.name + ".tmp")
    try:
        yield partial
        partial.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if not isinstance(error, Exception):
            raise
        raise DraftwiseError(f"{path} cannot be written: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """What the system said, where a library has put its own words over it."""
    below: BaseException | None = error
    while below is not None:
        if isinstance(below, OSError) and below.strerror:
            return below.strerror
        below = below.__cause__ or below.__context__
    return str(error) or type(error).__name__
