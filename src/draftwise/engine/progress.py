"""A bar of requests on a terminal."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def on_terminal() -> bool:
    """Whether stderr is a terminal. Programs without a console have none, or something that can be written to."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # None, or an object of the program; it was closed
        return False


class RequestProgress:
    """Requests done and tokens per second, on stderr."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rate]}"),
            # A notebook shows a bar with ipywidgets; without it, it would show rich's warning that it is missing.
            console=Console(stderr=True, force_jupyter=None if find_spec("ipywidgets") else False),
        )
        self._task = self._progress.add_task("requests", total=total, rate="")
        self._tokens = 0
        self._progress.start()

    def update(self, tokens: int, finished: bool) -> None:
        self._tokens += tokens
        if finished:
            elapsed = self._progress.tasks[0].elapsed or 1e-9
            self._progress.update(self._task, advance=1, rate=f"{self._tokens / elapsed:.0f} tokens/s")

    def close(self) -> None:
        self._progress.stop()
