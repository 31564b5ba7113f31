"""The error of commands themselves."""

from __future__ import annotations


class UsageError(Exception):
    """Bad usage or input: one line on stderr, exit code 2."""
