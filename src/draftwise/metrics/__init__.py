"""Metrics of a running engine: Prometheus, and a line for the log."""

from draftwise.metrics.export import HttpCounts, Metrics, Source
from draftwise.metrics.histogram import Histogram
from draftwise.metrics.latencies import Latencies
from draftwise.metrics.logline import statistics_line

__all__ = ["Metrics", "Source", "HttpCounts", "Latencies", "Histogram", "statistics_line"]
