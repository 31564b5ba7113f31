"""``draftwise chat``: a conversation with a model."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

from draftwise.cli.conversation import Conversation, add_quick, banner, one_text
from draftwise.cli.errors import UsageError
from draftwise.cli.inputs import read_template
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
    """Register ``chat``."""
    parser = subparsers.add_parser(
        "chat",
        help="talk with a model",
        usage="draftwise chat [options] [MESSAGE]",
        description="Talk with a model through its chat template. With a message: answer it and end. In a conversation "
        "/help lists commands.",
    )
    parser.add_argument("message", nargs="?", help="one message, instead of a conversation; - reads stdin")
    add_quick(parser, "MESSAGE")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--chat-template", metavar="TEMPLATE", help="a Jinja template, or a file with one")
    parser.add_argument("--json", action="store_true", help="the answer to one message as a JSON object")
    add_sampling_options(parser, max_tokens=512)
    add_engine_options(parser, seed_flag="--engine-seed")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out ``draftwise chat``."""
    params = sampling_params(args)
    if params.n != 1:
        raise UsageError("--n: a conversation has one answer; use generate for several samples")
    message = one_text(args.message, args.quick)
    if args.json and message is None:
        raise UsageError("--json needs a message")
    template = None if args.chat_template is None else read_template(args.chat_template)
    from draftwise import AsyncLLM

    options = engine_kwargs(args)
    with loading(options.get("model")):
        llm = AsyncLLM(**options)
    with contextlib.closing(llm), asyncio.Runner() as runner:
        if template is None and not getattr(llm.get_tokenizer(), "chat_template", None):
            raise UsageError(
                "this model has no chat template: it is a base model that continues text. "
                'Use draftwise generate "..." or draftwise complete instead, a chat model (--model), or --chat-template'
            )
        render: Any = functools.partial(llm.apply_chat_template, chat_template=template)
        conversation = Conversation(llm, params, system=args.system, render=render)
        if message is not None:
            runner.run(conversation.answer_one(message, as_json=args.json))
            return 0
        if sys.stdin.isatty():
            print(banner(llm, "Chat with"), flush=True)
        return conversation.run(runner)
