"""Tells how far the weights of a large model have been read: by a bar on a terminal, else by lines in the log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from pathlib import Path
from typing import Protocol

logger = logging.getLogger("draftwise")

BAR_AFTER = 1.0
"""Seconds of loading after which a terminal shows a bar: small models load without one."""
LINE_EVERY = 10.0
"""Seconds between two lines of the log."""


class Stored(Protocol):
    """A tensor of a checkpoint (`checkpoint.TensorEntry`)."""

    @property
    def file(self) -> Path: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class Display(Protocol):
    """Shows a number of bytes read so far."""

    def update(self, done: float) -> None: ...

    def close(self) -> None: ...


class LoadProgress:
    """Counts the numbers (elements of tensors) that were read of one model."""

    def __init__(
        self,
        name: str,
        elements: int,
        size: float,
        *,
        bar: Callable[[str, float], Display] | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``elements``: how many will be read, which are ``size`` bytes of files. ``bar``: makes a bar for a name and a
        number of bytes; None: there is no terminal, lines are logged instead."""
        self._name, self._elements, self._size = name, max(1, elements), size
        self._make_bar, self._clock = bar, clock
        self._started = self._told = clock()
        self._done = 0
        self._bar: Display | None = None

    def count(self, elements: int) -> None:
        """So many more were read."""
        self._done += elements
        now, share = self._clock(), min(1.0, self._done / self._elements)
        if self._make_bar is not None:
            if self._bar is None and now - self._started >= BAR_AFTER:
                self._bar = self._make_bar(self._name, self._size)
            if self._bar is not None:
                self._bar.update(share * self._size)
        elif now - self._told >= LINE_EVERY:
            self._told = now
            logger.info("loading %s: %.1f of %.1f GB (%.0f %%)",
                        self._name, share * self._size / 1e9, self._size / 1e9, 100 * share)  # fmt: skip

    def close(self) -> None:
        """Nothing more will be read. A load that was told of is told to be over."""
        if self._bar is not None:
            self._bar.close()
        if self._bar is not None or self._told != self._started:
            logger.info(
                "loaded %s: %.1f GB in %.0f s", self._name, self._size / 1e9, self._clock() - self._started
            )


_loading: ContextVar[LoadProgress | None] = ContextVar("loading", default=None)


@contextmanager
def told(folder: Path, entries: Mapping[str, Stored], elements: int | None = None) -> Iterator[None]:
    """Inside this context, calls of `count` are shown as progress.

    ``elements``: how many of the checkpoint's numbers will be read; None: all of ``entries``.
    """
    whole = max(1, sum(prod(entry.shape) for entry in entries.values()))
    stored = sum(file.stat().st_size for file in {entry.file for entry in entries.values()} if file.is_file())
    wanted = whole if elements is None else elements
    bar = _Bar if sys.stderr.isatty() else None
    progress = LoadProgress(folder.name, wanted, stored * wanted / whole, bar=bar)
    token = _loading.set(progress)
    try:
        yield
    finally:
        _loading.reset(token)
        progress.close()


def count(elements: int) -> None:
    """``elements`` of a checkpoint were read. Nothing happens outside of `told`."""
    progress = _loading.get()
    if progress is not None:
        progress.count(elements)


class _Bar:
    """A bar on stderr; it goes away when it is full."""

    def __init__(self, name: str, size: float) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("loading {task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task(name, total=size)
        self._progress.start()

    def update(self, done: float) -> None:
        self._progress.update(self._task, completed=done)

    def close(self) -> None:
        self._progress.stop()
