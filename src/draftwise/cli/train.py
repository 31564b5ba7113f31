"""`draftwise train`: train the models that ship with the package."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from draftwise.train.demo_args import add_arguments

if TYPE_CHECKING:
    _Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: _Subparsers) -> None:
    """Register `train` and its subcommands."""
    parser = subparsers.add_parser("train", help="train models", description="Train models.")
    kinds = parser.add_subparsers(dest="train_command", metavar="WHAT", required=True)
    demo = kinds.add_parser(
        "demo",
        help="the embedded demo models, from Python's standard library",
        description="Train a small target and its draft model on the running Python's standard library.",
    )
    add_arguments(demo)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `draftwise train ...`."""
    from draftwise.train import demo

    return demo.run(args)
