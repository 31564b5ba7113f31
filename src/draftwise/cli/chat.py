"""``draftwise chat``: a conversation with a chat model."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from typing import TYPE_CHECKING

from draftwise.cli import signals
from draftwise.cli.errors import UsageError
from draftwise.cli.options import (
    ENGINE_BOOLEANS,
    SAMPLING_BOOLEANS,
    add_engine_options,
    add_sampling_options,
    engine_kwargs,
    sampling_params,
)
from draftwise.cli.report import note, output_as_dict, print_json, statistics_line
from draftwise.errors import RequestError

if TYPE_CHECKING:
    from draftwise import AsyncLLM, RequestOutput, SamplingParams
    from draftwise.cli.options import Subparsers

BOOLEANS = (*ENGINE_BOOLEANS, *SAMPLING_BOOLEANS)

Messages = list[dict[str, str]]


def add_parser(subparsers: Subparsers) -> None:
    """Register ``chat``."""
    parser = subparsers.add_parser(
        "chat",
        help="talk with a chat model",
        usage="draftwise chat [options] [MESSAGE]",
        description="Talk with a chat model. With a message: answer it and end. /clear forgets, /quit ends.",
    )
    parser.add_argument("message", nargs="?", help="one message, instead of a conversation; - reads stdin")
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
    if args.json and args.message is None:
        raise UsageError("--json needs a message")
    template = _template(args.chat_template)
    from draftwise import AsyncLLM

    llm = AsyncLLM(**engine_kwargs(args))
    with contextlib.closing(llm), asyncio.Runner() as runner:
        if template is None and not getattr(llm.get_tokenizer(), "chat_template", None):
            raise UsageError(
                "this model has no chat template: it is a base model that continues text. "
                'Use draftwise generate "..." instead, a chat model (--model), or --chat-template'
            )
        messages: Messages = [{"role": "system", "content": args.system}] if args.system else []
        if args.message is not None:
            text = sys.stdin.read() if args.message == "-" else args.message
            messages.append({"role": "user", "content": text})
            runner.run(_answer(llm, messages, params, template, quiet=args.json))
            return 0
        return _converse(runner, llm, messages, params, template)


def _template(given: str | None) -> str | None:
    """A template's text; what holds no template markup is the name of a file."""
    if given is None or "{" in given:
        return given
    try:
        with open(given, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise UsageError(f"--chat-template {given}: {error.strerror}") from None


async def _answer(
    llm: AsyncLLM, messages: Messages, params: SamplingParams, template: str | None, *, quiet: bool = False
) -> str:
    """Stream one answer to stdout; returns its text."""
    prompt = llm.apply_chat_template(messages, chat_template=template)
    start = time.perf_counter()
    shown = 0
    last: RequestOutput | None = None
    async for last in llm.generate(prompt, params):
        text = last.outputs[0].text
        if not quiet:
            print(text[shown:], end="", flush=True)
        shown = len(text)
    assert last is not None
    if quiet:
        print_json(output_as_dict(last))
    else:
        print(flush=True)
        note(statistics_line([last], time.perf_counter() - start))
    return last.outputs[0].text


def _converse(
    runner: asyncio.Runner, llm: AsyncLLM, messages: Messages, params: SamplingParams, template: str | None
) -> int:
    """Read, answer, repeat. Ctrl-C stops an answer, or ends the conversation at the prompt."""
    with signals.raised():
        return _read_and_answer(runner, llm, messages, params, template)


def _read_and_answer(
    runner: asyncio.Runner, llm: AsyncLLM, messages: Messages, params: SamplingParams, template: str | None
) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history in input())
    system = messages[:1] if messages else []
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        if line in ("/quit", "/exit"):
            return 0
        if line == "/clear":
            messages = list(system)
            continue
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        try:
            text = runner.run(_answer(llm, messages, params, template))
        except KeyboardInterrupt:
            print(flush=True)
            messages.pop()
            continue
        except RequestError as error:  # for example a conversation that no longer fits
            note(f"draftwise: {error}")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": text})
