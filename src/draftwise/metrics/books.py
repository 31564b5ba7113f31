"""The numbers of one engine, which may be one of several behind a port."""

from __future__ import annotations

from typing import NamedTuple

from draftwise.engine.outputs import EngineStats
from draftwise.metrics.latencies import Histograms


class Books(NamedTuple):
    """``replica``: its number; None: there is one engine."""

    replica: str | None
    stats: EngineStats
    latencies: Histograms
