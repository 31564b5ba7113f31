"""``draftwise complete``: continue what is typed, text by text."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING

from draftwise.cli.conversation import Conversation, banner
from draftwise.cli.errors import UsageError
from draftwise.cli.options import (
    ENGINE_BOOLEANS,
    SAMPLING_BOOLEANS,
    add_engine_options,
    add_sampling_options,
    engine_kwargs,
    sampling_params,
)
from draftwise.cli.report import loading

if TYPE_CHECKING:
    from draftwise.cli.options import Subparsers

BOOLEANS = (*ENGINE_BOOLEANS, *SAMPLING_BOOLEANS)


def add_parser(subparsers: Subparsers) -> None:
    """Register ``complete``."""
    parser = subparsers.add_parser(
        "complete",
        help="continue what you type",
        usage="draftwise complete [options]",
        description="Continue what you type, each text alone, without a chat template. /help lists commands. For one "
        "prompt from a script use draftwise generate.",
    )
    add_sampling_options(parser)
    add_engine_options(parser, seed_flag="--engine-seed")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out ``draftwise complete``."""
    params = sampling_params(args)
    if params.n != 1:
        raise UsageError("--n: one continuation at a time; use generate for several samples")
    from draftwise import AsyncLLM

    options = engine_kwargs(args)
    with loading(options.get("model")):
        llm = AsyncLLM(**options)
    with contextlib.closing(llm), asyncio.Runner() as runner:
        if sys.stdin.isatty():
            print(banner(llm, "Continue text with"), flush=True)
        return Conversation(llm, params, system=None, render=None).run(runner)
