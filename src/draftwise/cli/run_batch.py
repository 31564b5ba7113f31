"""``draftwise run-batch``: answer a file of requests in OpenAI's batch format."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from draftwise.cli.errors import UsageError
from draftwise.cli.inputs import read_stdin
from draftwise.cli.numbers import positive
from draftwise.cli.options import ENGINE_BOOLEANS, add_engine_options, engine_kwargs, split_names
from draftwise.cli.report import note, progress
from draftwise.errors import ConfigError, DraftwiseError, install

if TYPE_CHECKING:
    from draftwise.cli.options import Subparsers

BOOLEANS = ENGINE_BOOLEANS

_EXAMPLE = """example of a line ("model" may be left out of the body, or is the one that runs):
{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "def main(", "max_tokens": 16}}
"""


def add_parser(subparsers: Subparsers) -> None:
    """Register ``run-batch``."""
    parser = subparsers.add_parser(
        "run-batch",
        help="answer a file of requests in OpenAI's batch format",
        usage="draftwise run-batch -i FILE -o FILE [options]",
        description="Answer the requests of a JSONL file in OpenAI's batch format, without a server. Answers are "
        "written as they come, in any order; custom_id tells which is which.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-i", "--input-file", required=True, metavar="FILE", help="requests; - is stdin")
    parser.add_argument("-o", "--output-file", required=True, metavar="FILE", help="answers; - is stdout")
    parser.add_argument(
        "--at-once",
        type=positive,
        default=64,
        metavar="N",
        help="requests that are answered side by side (64)",
    )
    parser.add_argument(
        "--lora-modules",
        action="extend",
        nargs="+",
        metavar="NAME=PATH",
        help="with --enable-lora: adapters, which requests name as their model",
    )
    add_engine_options(parser, several_names=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out ``draftwise run-batch``. Code 1 if a request failed."""
    try:
        path = args.input_file
        source = read_stdin() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--input-file {args.input_file}: {error}") from None
    lines = [line for line in source.split("\n") if line.strip()]
    if not lines:
        raise UsageError(f"--input-file {args.input_file}: no request in it")
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise UsageError(f"{error.name} is not installed: {install('serve')}") from None
    from draftwise import AsyncLLM
    from draftwise.config.lora import parse_modules
    from draftwise.server.app import create_app
    from draftwise.server.batch import answer_all
    from draftwise.server.config import DEFAULT_MODEL_NAME, ServerConfig

    options = engine_kwargs(args)
    names = split_names(options.pop("served_model_name", None) or ())
    modules = parse_modules(args.lora_modules or ())
    if modules and not options.get("enable_lora"):
        raise ConfigError("lora_modules: needs enable_lora")
    config = ServerConfig(
        model_names=tuple(names or [options.get("model") or DEFAULT_MODEL_NAME]), lora_modules=modules
    )

    unwritten: list[OSError] = []

    async def work(output: TextIO) -> tuple[int, int]:
        async with AsyncLLM(**options) as llm:
            for module in modules:
                await llm.add_lora(module)
            with progress(len(lines), "requests") as advance:

                def write(answer: dict[str, Any]) -> None:
                    try:
                        output.write(json.dumps(answer, ensure_ascii=False) + "\n")
                        output.flush()
                    except OSError as error:
                        unwritten.append(error)
                        raise
                    advance("")

                return await answer_all(create_app(llm, config), lines, write, args.at_once)

    try:
        with contextlib.ExitStack() as stack:
            output = sys.stdout
            if args.output_file != "-":
                try:
                    output = stack.enter_context(open(args.output_file, "w", encoding="utf-8"))
                except OSError as error:
                    raise UsageError(f"--output-file {args.output_file}: {error.strerror}") from None
            count, failed = asyncio.run(work(output))
    except OSError as error:  # closing the file fails, too, with an error of its own
        if unwritten and not isinstance(error, BrokenPipeError):
            raise DraftwiseError(f"--output-file {args.output_file}: {error.strerror}") from None
        raise
    note(
        f"{count} request{'s' * (count != 1)} answered"
        + (f", {failed} of them with an error" if failed else "")
    )
    return 1 if failed else 0
