"""Transformers without its advice, and in one thread at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

_building = threading.Lock()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One thread at a time inside. While Transformers builds a model, it exchanges torch's default type and functions
    for initial values, for the whole process, and puts back what it found. Two threads that do so at once leave
    functions behind that do nothing, and models that are built later have buffers of whatever the memory held."""
    with _building:
        yield


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
