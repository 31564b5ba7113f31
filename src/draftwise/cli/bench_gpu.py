"""``draftwise bench gpu``: see `bench.gpu.command`."""

from __future__ import annotations

import argparse
from typing import Any

from draftwise.bench.gpu import command
from draftwise.cli import signals


def add_parser(kinds: Any) -> None:
    """Register the kind with ``bench``'s parsers."""
    parser = kinds.add_parser(
        "gpu", help=command.TEXT, description=command.TEXT, usage="draftwise bench gpu [options]"
    )
    command.add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out ``draftwise bench gpu``; Ctrl-C ends the process of the part that is measured, too."""
    with signals.raised():
        return command.run(args)
