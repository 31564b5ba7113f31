"""``draftwise bench gpu``: see `bench.gpu.command`."""

from __future__ import annotations

from typing import Any

from draftwise.bench.gpu.command import TEXT, add_arguments, run


def add_parser(kinds: Any) -> None:
    """Register the kind with ``bench``'s parsers."""
    parser = kinds.add_parser("gpu", help=TEXT, description=TEXT, usage="draftwise bench gpu [options]")
    add_arguments(parser)
    parser.set_defaults(run=run)
