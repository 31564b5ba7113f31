"""Texts from stdin and files, whatever the locale."""

from __future__ import annotations

import sys

from draftwise.cli.errors import UsageError


def read_stdin() -> str:
    """All of stdin. Raises UsageError if it is not UTF-8."""
    buffer = getattr(sys.stdin, "buffer", None)
    return sys.stdin.read() if buffer is None else decode(buffer.read(), "stdin")


def decode(data: bytes, name: str) -> str:
    """The text of these bytes, line ends as they are. Raises UsageError that names where they come from."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: not UTF-8 text (byte {error.start})") from None
