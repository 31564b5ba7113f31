"""``draftwise complete``: continue what is typed, text by text."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING

from draftwise.cli.conversation import Conversation, add_quick, banner, one_text
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
        usage="draftwise complete [options] [TEXT]",
        description="Continue what you type, each text alone, without a chat template. With a text: continue it and "
        "end. At the prompt /help lists commands.",
    )
    parser.add_argument("text", nargs="?", help="one text, instead of those that are typed; - reads stdin")
    add_quick(parser, "TEXT")
    add_sampling_options(parser)
    add_engine_options(parser, seed_flag="--engine-seed")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out ``draftwise complete``."""
    params = sampling_params(args)
    if params.n != 1:
        raise UsageError("--n: one continuation at a time; use generate for several samples")
    text = one_text(args.text, args.quick)
    from draftwise import AsyncLLM

    options = engine_kwargs(args)
    with loading(options.get("model")):
        llm = AsyncLLM(**options)
    with contextlib.closing(llm), asyncio.Runner() as runner:
        conversation = Conversation(llm, params, system=None, render=None)
        if text is not None:
            runner.run(conversation.answer_one(text))
            return 0
        if sys.stdin.isatty():
            print(banner(llm, "Continue text with"), flush=True)
        return conversation.run(runner)
