"""Python's garbage collector while much is made that stays: modules and models."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_FROZEN_AT_START = gc.get_freeze_count()  # Python 3.12 freezes some of its own


@contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collections inside; what was made counts as old afterwards. Also a decorator.

    Importing Transformers and building an engine makes some 200,000 objects that stay. The collector walks through them
    again and again, for the last time in the first request: 120 ms of a first token that takes 20. Nothing is kept
    alive: later full collections look at these objects as at any others. A program that has switched the collector
    off, or has frozen objects of its own, keeps its setting.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() <= _FROZEN_AT_START:
            gc.freeze()  # to where no collection looks,
            gc.unfreeze()  # and from there to the oldest generation: neither touches the objects
        gc.enable()
