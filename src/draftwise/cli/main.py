"""``draftwise``: finds the subcommand, runs it, and turns errors into one line and an exit code.

Exit codes: 0; 1 failure; 2 bad usage or input; 130 interrupted; 143 terminated (see `draftwise.cli.signals`).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import re
import sys
from collections.abc import Sequence
from types import ModuleType

from draftwise.cli import signals
from draftwise.cli.errors import UsageError
from draftwise.cli.help import help_text, innermost, wanted
from draftwise.errors import ConfigError, DraftwiseError, ModelLoadError, RequestError, suggest

COMMANDS = {
    "generate": "continue prompts, streaming to the terminal",
    "chat": "talk with a model",
    "complete": "continue what you type",
    "serve": "an OpenAI-compatible server, with metrics",
    "bench": "measure latency, throughput or acceptance",
    "profile": "measure times of steps and acceptance on this machine",
    "plan": "plan replicas over a recorded load, in a simulated cluster",
    "simulate": "simulate a cluster under a load",
    "run-batch": "answer a file of requests in OpenAI's batch format",
    "tokenize": "token ids of texts, and texts of token ids",
    "extract": "hidden states of a model over text, for training draft heads",
    "train": "train models",
    "demo": "compare the methods on the embedded models",
    "show": "describe a model and its drafters without loading it",
    "env": "describe this machine and this installation",
    "completions": "print a script that completes commands in your shell",
}
"""Subcommands and their lines in ``--help``; each is a module ``draftwise.cli.<name>``, imported when needed."""


def module_of(command: str) -> ModuleType:
    """The module of a subcommand: ``run-batch`` is ``draftwise.cli.run_batch``."""
    return importlib.import_module(f"draftwise.cli.{command.replace('-', '_')}")


class Parser(argparse.ArgumentParser):
    """Errors are one line; long options are not abbreviated."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(f"{message} (see {self.prog} --help)")


def build_parser(command: str | None = None) -> Parser:
    """The parser; only the named subcommand's own module is imported."""
    from draftwise import __version__

    parser = Parser(
        prog="draftwise",
        description="LLM inference in which speculative decoding is the normal way to decode.",
    )
    parser.add_argument("--version", action="version", version=f"draftwise {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, text in COMMANDS.items():
        if name == command:
            module_of(name).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=text)
    return parser


def normalise(arguments: Sequence[str], booleans: Sequence[str]) -> list[str]:
    """Normalise spellings: ``--max_num_seqs`` to hyphens; of boolean options ``--x``, ``--x True`` and
    ``--no-x`` to ``--x=true`` or ``--x=false``, so that they never swallow a prompt that follows.

    >>> normalise(["--enforce_eager", "text", "--no-ignore-eos"], ["enforce-eager", "ignore-eos"])
    ['--enforce-eager=true', 'text', '--ignore-eos=false']
    """
    out: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            return [*out, argument, *rest]
        match = re.match(r"--([A-Za-z][\w-]*)(=.*)?$", argument, re.DOTALL)
        if match is None:
            out.append(argument)
            continue
        name, value = match[1].replace("_", "-"), match[2] or ""
        if value == "" and name in booleans:
            given = rest.pop(0) if rest and rest[0].lower() in ("true", "false") else "true"
            value = f"={given.lower()}"
        elif value == "" and name.startswith("no-") and name[3:] in booleans:
            name, value = name[3:], "=false"
        out.append(f"--{name}{value}")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started the process (2>&-)
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (until the end)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows ? and does not fail
    try:
        code = _told(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader went away (| head). Point the streams elsewhere: the interpreter flushes them at exit.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or no file
                os.dup2(nowhere, stream.fileno())
        return 1
    except OSError as error:  # a full disk, a folder that cannot be written
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else error.strerror or error, 1)
    return code


def _told(arguments: list[str]) -> int:
    """Run a command line. An error becomes one line on stderr."""
    try:
        return _run(arguments)
    except (UsageError, ConfigError, ModelLoadError, RequestError) as error:
        return _fail(error, 2)
    except DraftwiseError as error:
        return _fail(error, 1)
    except MemoryError as error:
        return _fail(f"out of memory: {error}", 1)
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # torch's way to say MemoryError
            raise
        return _fail(f"out of memory: {error}", 1)
    except KeyboardInterrupt:
        signals.say("interrupted")
        return 130
    except SystemExit as stop:  # --help and --version
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def _run(arguments: list[str]) -> int:
    command = next((a for a in arguments if not a.startswith("-")), None)
    if command is not None and command not in COMMANDS:
        raise UsageError(
            f"unknown command {command!r}{suggest(command, COMMANDS, 0.7)} (commands: {', '.join(COMMANDS)})"
        )
    parser = build_parser(command)
    if command is None:
        parser.parse_args(normalise(arguments, ()))  # --help and --version end here
        parser.print_help()
        return 2
    module = module_of(command)
    what = wanted(arguments)
    if what is not None:
        print(help_text(innermost(parser, arguments), what), end="")
        return 0
    if command != "serve":  # it has a log of its own, with times
        _log_to_stderr()
    booleans: Sequence[str] = getattr(module, "BOOLEANS", ())
    args, unknown = parser.parse_known_args(normalise(arguments, booleans))
    if unknown:
        asked = innermost(parser, arguments)
        known = re.findall(r"--[\w-]+", asked.format_help())
        raise UsageError(
            f"unrecognized argument {unknown[0]!r}{suggest(unknown[0].partition('=')[0], known)} "
            f"(see {asked.prog} --help)"
        )
    # Its warning of a prompt over the model's length would stand before our error that says the same.
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    code = args.run(args)
    return int(code)


def _log_to_stderr() -> None:
    """Send the package's log to stderr, in the form of a command's own lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("draftwise: %(levelname)s: %(message)s"))
    logger = logging.getLogger("draftwise")
    if not logger.handlers and not logging.getLogger().handlers:
        logger.addHandler(handler)


def _fail(error: Exception | str, code: int) -> int:
    """One line, whatever the message holds."""
    print(f"draftwise: {' '.join(str(error).split())}", file=sys.stderr)
    return code
