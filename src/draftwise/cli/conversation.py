"""The loop of ``draftwise chat`` and ``draftwise complete``: read, answer, repeat, with commands that begin with /."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from draftwise.cli import signals
from draftwise.cli.errors import UsageError
from draftwise.cli.inputs import read_stdin
from draftwise.cli.report import note, output_as_dict, print_json, statistics_line
from draftwise.errors import RequestError, suggest

if TYPE_CHECKING:
    from draftwise import AsyncLLM, RequestOutput, SamplingParams

Messages = list[dict[str, str]]

COMMANDS = {
    "/help": "this list",
    "/clear": "forget the conversation",
    "/system TEXT": "set the system message, and forget the conversation",
    "/retry": "answer the last message again",
    "/undo": "take the last message and its answer back",
    "/set NAME VALUE": "change a sampling parameter: /set temperature 0.2",
    "/settings": "show the parameters that differ from the defaults",
    "/stats on, /stats off": "the line behind each answer",
    "/quit": "end; also Ctrl-D",
}
_NAMES = ("/exit", *(key.split()[0] for key in COMMANDS))
MULTILINE = '"""'
HELP = f"""Several lines: begin with {MULTILINE} and end with {MULTILINE}, or end a line with \\.
Ctrl-C at the prompt clears the line, and twice ends; in an answer it stops it."""


class Conversation:
    """Messages so far, sampling parameters, and the function that makes a prompt. ``render`` None: text is continued
    as it is."""

    def __init__(
        self,
        llm: AsyncLLM,
        params: SamplingParams,
        *,
        system: str | None,
        render: Callable[[Messages], Any] | None,
    ) -> None:
        self._llm = llm
        self._params = params
        self._render = render
        self._system = system
        self._stats = True
        self.messages: Messages = []
        self._forget()

    def run(self, runner: asyncio.Runner) -> int:
        """Run until the input ends. Returns the exit code."""
        with signals.raised():
            terminal = sys.stdin.isatty()
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (line editing and history in input())
            interrupted = False
            while True:
                try:
                    text = self._read(terminal)
                except EOFError:
                    return 0
                except KeyboardInterrupt:
                    if interrupted or not terminal:
                        raise
                    interrupted = True
                    print("\n(Ctrl-C again, Ctrl-D or /quit ends)", flush=True)
                    continue
                interrupted = False
                if not text.strip():
                    continue
                if text.startswith("/"):
                    if self._command(runner, text.strip()):
                        return 0
                    continue
                self.messages.append({"role": "user", "content": text})
                self._answer_last(runner)

    async def answer_one(self, text: str, *, as_json: bool = False) -> None:
        """Stream the answer to one message; "-" stands for what stdin holds."""
        content = read_stdin() if text == "-" else text
        self.messages.append({"role": "user", "content": content})
        await self.answer(as_json=as_json)

    async def answer(self, *, as_json: bool = False) -> str:
        """Stream the answer to the messages; returns its text."""
        prompt = self.messages[-1]["content"] if self._render is None else self._render(self.messages)
        start = time.perf_counter()
        shown = 0
        last: RequestOutput | None = None
        async for last in self._llm.generate(prompt, self._params):
            text = last.outputs[0].text
            if not as_json:
                print(text[shown:], end="", flush=True)
            shown = len(text)
        assert last is not None
        if as_json:
            print_json(output_as_dict(last))
        else:
            print(flush=True)
            if self._stats:
                note(statistics_line([last], time.perf_counter() - start))
        return last.outputs[0].text

    # ------------------------------------------------------------------------------------------- the parts

    def _read(self, terminal: bool) -> str:
        try:
            return self._message(terminal)
        except UnicodeDecodeError as error:
            raise UsageError(f"stdin: not UTF-8 text (byte {error.start})") from None

    def _message(self, terminal: bool) -> str:
        """A message: one line, or several between triple quotes or with a backslash at their ends."""
        line = input("> " if terminal else "")
        lines: list[str] = []
        if line.strip().startswith(MULTILINE):
            line = line.strip()[len(MULTILINE) :]
            while not line.rstrip().endswith(MULTILINE):
                lines.append(line)
                line = input(". " if terminal else "")
            return "\n".join([*lines, line.rstrip()[: -len(MULTILINE)]]).strip("\n")
        while line.endswith("\\"):
            lines.append(line[:-1])
            line = input(". " if terminal else "")
        # A lone line loses the white space around it; of several the indentation stays.
        return "\n".join([*lines, line]) if lines else line.strip()

    def _answer_last(self, runner: asyncio.Runner) -> None:
        try:
            text = runner.run(self.answer())
        except KeyboardInterrupt:
            print(flush=True)
            self.messages.pop()
            return
        except RequestError as error:  # for example a conversation that no longer fits
            note(f"draftwise: {error}")
            self.messages.pop()
            return
        if self._render is not None:
            self.messages.append({"role": "assistant", "content": text})

    def _forget(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def _command(self, runner: asyncio.Runner, line: str) -> bool:
        """Carry out a line that begins with /. True: the conversation ends."""
        name, _, rest = line.partition(" ")
        if name in ("/quit", "/exit"):
            return True
        if name == "/help":
            for command, text in COMMANDS.items():
                print(f"{command:<22} {text}")
            print(HELP)
        elif name == "/clear":
            self._forget()
        elif name == "/system":
            self._system = rest.strip() or None
            self._forget()
        elif name in ("/retry", "/undo"):
            self._back(runner, again=name == "/retry")
        elif name == "/set":
            self._set(rest)
        elif name == "/settings":
            for setting in self._settings():
                print(setting)
        elif name == "/stats" and rest.strip() in ("on", "off"):
            self._stats = rest.strip() == "on"
        else:
            note(f"draftwise: unknown command {line!r}{suggest(name, _NAMES, 0.7)} (/help lists them)")
        return False

    def _back(self, runner: asyncio.Runner, *, again: bool) -> None:
        while self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages or self.messages[-1]["role"] != "user":
            note("draftwise: there is no message yet")
        elif again:
            self._answer_last(runner)
        else:
            self.messages.pop()

    def _set(self, text: str) -> None:
        name, _, value = text.strip().partition(" ")
        name = name.replace("-", "_")
        try:
            given = json.loads(value)
        except json.JSONDecodeError:
            given = value.strip()
        try:
            self._params = type(self._params).from_dict(
                {f.name: getattr(self._params, f.name) for f in fields(self._params)} | {name: given}
            )
        except RequestError as error:
            note(f"draftwise: {error}")

    def _settings(self) -> Iterator[str]:
        plain = type(self._params)()
        for field in fields(self._params):
            value = getattr(self._params, field.name)
            if value != getattr(plain, field.name):
                yield f"{field.name} = {value!r}"


def add_quick(parser: argparse.ArgumentParser, metavar: str) -> None:
    """vLLM's name for the text that is answered instead of a conversation."""
    parser.add_argument("--quick", "-q", metavar=metavar, help=f"the same as {metavar}, by vLLM's name")


def one_text(positional: str | None, quick: str | None) -> str | None:
    """The text to answer, by whichever name it was given.

    Raises:
        UsageError: by both.
    """
    if positional is not None and quick is not None:
        raise UsageError("--quick: the text is given twice")
    return quick if positional is None else positional


def banner(llm: AsyncLLM, what: str) -> str:
    """The banner before the first prompt on a terminal."""
    config = llm.config
    name = "the embedded demo model" if config.embedded else str(config.model)
    drafters = ", ".join(spec.method for spec in config.drafters)
    lines = [f"{what} {name}; drafters: {drafters}", "/help lists commands, Ctrl-D ends."]
    if config.embedded:
        lines.append("It is a toy that continues Python code. Try: def add(a, b):")
    return "\n".join(lines)
