"""Texts from stdin and files, whatever the locale."""

from __future__ import annotations

import sys

from draftwise.cli.errors import UsageError


def read_stdin() -> str:
    """All of stdin. Raises UsageError if it is not UTF-8."""
    buffer = getattr(sys.stdin, "buffer", None)
    return sys.stdin.read() if buffer is None else decode(buffer.read(), "stdin")


def decode(data: bytes, name: str) -> str:
    """The text of these bytes, line ends as they are. Raises UsageError that names where they come from."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: not UTF-8 text (byte {error.start})") from None


def read_template(given: str) -> str:
    """The text of a chat template; a value without template markup is a file name. Raises UsageError if there is no
    such file, or no template in it."""
    name, text = "--chat-template", given
    if "{" not in given:
        name = f"--chat-template {given}"
        try:
            with open(given, "rb") as file:
                text = decode(file.read(), name)
        except OSError as error:
            raise UsageError(f"{name}: {error.strerror}") from None
        except ValueError:  # a name that no file can have
            raise UsageError(f"{name}: no such file") from None
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template([], chat_template=text)  # compiles it, and renders no conversation
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(f"{name}: not valid Jinja (line {error.lineno}): {error.message}") from None
    return text
