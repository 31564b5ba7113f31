"""Flags of vLLM's server that have no meaning here. Values that change nothing are accepted; others are refused with
a reason."""

from __future__ import annotations

import argparse
import json
import logging
from typing import Any

from draftwise.config.foreign import FOREIGN
from draftwise.config.foreign_server import SERVER_FLAGS, SERVER_SWITCHES, check_server_flag

logger = logging.getLogger("draftwise.server")

_SERVERS_OWN = frozenset({"max_logprobs"})
"""The flags of `FOREIGN` that this server supports itself."""

SWITCHES = (
    *(name.replace("_", "-") for name in SERVER_SWITCHES),
    "enable-log-requests", "disable-log-requests", "disable-async-output-proc", "disable-chunked-mm-input",
    "disable-custom-all-reduce", "use-v2-block-manager",
)  # fmt: skip
"""Flags that may stand without a value."""


def add_foreign(parser: argparse.ArgumentParser) -> None:
    """Add these flags without showing them in the help."""
    for name in (*SERVER_FLAGS, *(name for name in FOREIGN if name not in _SERVERS_OWN)):
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, dest=f"foreign_{name}", type=_value, help=argparse.SUPPRESS)


def _value(text: str) -> Any:
    """A value as a Python program would write it. Example: "{}" is {}, "true" is True, "auto" is "auto"."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def take_server_flags(args: argparse.Namespace) -> dict[str, Any]:
    """The flags for the engine's configuration, which checks them itself.

    Raises ConfigError for a value that would change something."""
    engine: dict[str, Any] = {}
    for name, value in _given(args).items():
        if name in SERVER_FLAGS:
            check_server_flag(name, value)
        else:
            engine[name] = value
    return engine


def tell_server_flags(args: argparse.Namespace) -> None:
    """Log the flags that have no effect, with the reason."""
    for name in _given(args):
        if name in SERVER_FLAGS and SERVER_FLAGS[name].note:
            logger.info("%s has no effect: %s", name, SERVER_FLAGS[name].note)


def _given(args: argparse.Namespace) -> dict[str, Any]:
    prefix = "foreign_"
    return {
        name.removeprefix(prefix): value
        for name, value in vars(args).items()
        if name.startswith(prefix) and value is not None
    }
