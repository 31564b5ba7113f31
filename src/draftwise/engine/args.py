"""`EngineArgs`: an engine's options as an object or as flags of a program, for programs written for vLLM."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Self

from draftwise.config.coerce import boolean
from draftwise.config.engine import ENGINE_OPTIONS, EngineConfig
from draftwise.config.foreign import FOREIGN, HARMLESS
from draftwise.config.resolve import ALIASES, OLD_SPECULATIVE

_HELP = {f.name: (f.metadata["help"], f.metadata["to"] is boolean) for f in dataclasses.fields(EngineConfig)
         if f.name in ENGINE_OPTIONS}  # fmt: skip
_NAMES = ("model", *(n for n in ENGINE_OPTIONS if n != "model"), "speculative_config", *OLD_SPECULATIVE, *ALIASES,
          *HARMLESS, *FOREIGN)  # fmt: skip


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` that takes ``--max_model_len`` for ``--max-model-len``."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        import sys

        given: Sequence[str] = sys.argv[1:] if args is None else args
        plain = []
        for argument in given:
            name, sign, value = argument.partition("=")
            plain.append(name.replace("_", "-") + sign + value if name.startswith("--") else argument)
        return super().parse_known_args(plain, namespace)


class _Flags:
    """The methods of every `EngineArgs`."""

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag per option; one that is not given is None. Returns the parser."""
        for name in _NAMES:
            if name in HARMLESS or name in FOREIGN or name in ALIASES:
                text, switch = argparse.SUPPRESS, False
            else:
                text, switch = _HELP.get(name, ("how to draft, as JSON", False))
                text = text.replace("%", "%%")
            flag = "--" + name.replace("_", "-")
            if switch:
                parser.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, help=text)
            else:
                parser.add_argument(flag, dest=name, type=_value, help=text)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Options from a parser's result; other names in it are ignored."""
        return cls(**{name: getattr(args, name) for name in _NAMES if hasattr(args, name)})

    def given(self) -> dict[str, Any]:
        """The options that were given, as keywords of `LLM`."""
        found = {name: getattr(self, name) for name in _NAMES}
        return {name: value for name, value in found.items() if value is not None}


def _value(text: str) -> Any:
    """JSON objects, lists and numbers are parsed; any other text stays a text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


_FIELDS = [(name, Any, dataclasses.field(default=None)) for name in _NAMES]
EngineArgs: Any = dataclasses.make_dataclass(
    "EngineArgs",
    _FIELDS,
    bases=(_Flags,),
    namespace={
        "__doc__": """Options of an engine: those of `LLM`, each None until it is given.

    ``LLM(**dataclasses.asdict(EngineArgs(model="path", max_model_len=512)))``, `AsyncLLM.from_engine_args`,
    `EngineArgs.add_cli_args(parser)` and `EngineArgs.from_cli_args(args)`. What the values mean, and whether they are
    valid, is found out when the engine is built.
    """,
        "__module__": __name__,
    },
)
"""A class; typed `Any`, because its fields are made from those of `EngineConfig`."""

AsyncEngineArgs: Any = EngineArgs
"""The same options under vLLM's name for an asynchronous engine."""
