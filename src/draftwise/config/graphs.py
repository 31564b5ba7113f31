"""Options for CUDA graphs: ``compilation_config`` and the options beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from draftwise.config import coerce as to
from draftwise.errors import ConfigError

GraphMode = Literal["none", "full", "full_decode_only", "piecewise", "full_and_piecewise"]
"""``full`` and ``full_decode_only``: one graph for each pass whose requests have about as many rows each (decoding,
verification) and for each draft loop; everything else runs uncaptured. ``piecewise``: all passes of decoders without
their attention, no whole pass and no loop. ``full_and_piecewise``: whole passes and loops, and pieces for everything
else."""
GRAPH_MODES: tuple[GraphMode, ...] = (
    "none", "full", "full_decode_only", "piecewise", "full_and_piecewise",
)  # fmt: skip
DEFAULT_MODE: GraphMode = "full_and_piecewise"
"""Requests that only decode are cheapest as one graph. With a prompt among them, pieces save the host from launching
a pass kernel by kernel."""

SIZES = to.sequence_of(to.integer(1), "a list of sizes")
LARGEST = to.integer(1)
_USED = ("cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size")


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """``sizes``: rows of passes, ascending; None: a choice. ``largest``: no pass has more rows; None: no limit but the
    choice's own."""

    mode: GraphMode
    sizes: tuple[int, ...] | None = None
    largest: int | None = None


def _mode(name: str, value: Any) -> str:
    return str(to.choice(*GRAPH_MODES)(name, str(value).lower()))


def compilation(name: str, value: Any) -> Any:
    """Converter of ``compilation_config``: a mapping, its JSON text, or a level 0..3."""
    if isinstance(value, int | str) and str(value).strip() in ("0", "1", "2", "3"):
        return int(value)
    found = to.mapping(name, value)
    for key, convert in zip(_USED, (_mode, SIZES, LARGEST), strict=True):
        if found.get(key) is not None:
            found[key] = convert(f"{name}.{key}", found[key])
    return found


def unused(compilation_config: Any) -> bool:
    """Whether it has settings that `graph_options` does not read."""
    if not isinstance(compilation_config, Mapping):
        return compilation_config is not None
    return any(key not in _USED for key in compilation_config)


def graph_options(
    compilation_config: Any, sizes: tuple[int, ...] | None, largest: int | None
) -> GraphOptions:
    """From converted values; ``sizes`` and ``largest`` are the options ``cudagraph_capture_sizes`` and
    ``max_cudagraph_capture_size``, which ``compilation_config`` may hold instead.

    Raises:
        ConfigError: something is given in both places, or a size is larger than the largest.
    """
    inside = compilation_config if isinstance(compilation_config, Mapping) else {}
    for name, value in (("cudagraph_capture_sizes", sizes), ("max_cudagraph_capture_size", largest)):
        if value is not None and inside.get(name) is not None:
            raise ConfigError(f"{name}: is also given in compilation_config; give one of them")
    sizes = inside.get("cudagraph_capture_sizes") if sizes is None else sizes
    largest = inside.get("max_cudagraph_capture_size") if largest is None else largest
    if sizes is not None:
        if not sizes:
            raise ConfigError(
                "cudagraph_capture_sizes: must not be empty; to capture nothing, set enforce_eager=True"
            )
        sizes = tuple(sorted(set(sizes)))
        if largest is not None and sizes[-1] > largest:
            raise ConfigError(
                f"cudagraph_capture_sizes: {sizes[-1]} is over max_cudagraph_capture_size = {largest}"
            )
    mode = inside.get("cudagraph_mode")
    return GraphOptions(cast(GraphMode, mode or DEFAULT_MODE), sizes, largest)
