"""`draftwise train`: draft heads and draft models for a target, and the models that ship with the package."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from draftwise.train import demo_args
from draftwise.train.heads import args as head_args

if TYPE_CHECKING:
    _Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: _Subparsers) -> None:
    """Register `train` and its subcommands."""
    parser = subparsers.add_parser("train", help="train models", description="Train models.")
    kinds = parser.add_subparsers(dest="train_command", metavar="WHAT", required=True)
    for kind, text in head_args.KINDS.items():
        head = kinds.add_parser(kind, help=text, description=f"Train {text} for a target.")
        head_args.add_arguments(head, kind)
    demo = kinds.add_parser(
        "demo",
        help="the embedded demo models, from Python's standard library",
        description="Train a small target and its draft model on the running Python's standard library.",
    )
    demo_args.add_arguments(demo)
    demo_heads = kinds.add_parser(
        "demo-heads",
        help="the heads that ship for the embedded target",
        description="Train EAGLE-3, MTP and Medusa heads for the embedded target on one pass of it.",
    )
    demo_args.add_head_arguments(demo_heads)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `draftwise train ...`."""
    if args.train_command == "demo":
        from draftwise.train import demo

        return demo.run(args)
    from rich.console import Console

    if args.train_command == "demo-heads":
        from draftwise.train import demo_heads

        return demo_heads.run(args, Console(file=sys.stdout))
    from draftwise.train.heads.run import train_head

    options = head_args.options_from(args, args.train_command)
    # with --json, stdout holds the result and nothing else
    record = train_head(options, Console(file=sys.stderr if options.json else sys.stdout))
    if options.json:
        print(json.dumps(record, indent=2))
    return 0
