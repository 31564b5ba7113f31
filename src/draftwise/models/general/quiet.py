"""Transformers without its advice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences Transformers' advice, which is for its direct callers; errors still appear."""
    from transformers.utils import logging

    theirs: Any = logging
    before = theirs.get_verbosity()
    theirs.set_verbosity_error()
    bars = theirs.is_progress_bar_enabled()
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(before)
        if bars:
            theirs.enable_progress_bar()
