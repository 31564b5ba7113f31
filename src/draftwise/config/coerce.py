"""Converts what a user writes (Python values, JSON, flags) to typed values, with errors that name the field.

Every option of a configuration carries a `Converter`; ``convert(name, value)`` returns the typed value or
raises `ConfigError` with the field's name, the value given and what would be valid.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

from draftwise.errors import ConfigError, suggest

Converter = Callable[[str, Any], Any]

_TRUE = {"true", "1", "yes", "on"}
_FALSE = {"false", "0", "no", "off"}
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def option(default: Any, to: Converter, help: str, *, metavar: str | None = None) -> Any:
    """A dataclass field with its converter and the help text that the commands show."""
    return field(default=default, metadata={"to": to, "help": help, "metavar": metavar})


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def boolean(name: str, value: Any) -> bool:
    """True and False, also as strings ("True", "false") or 0 and 1, as JSON made by scripts has them."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.strip().lower() in _TRUE | _FALSE:
        return value.strip().lower() in _TRUE
    raise ConfigError(f"{name}: expected true or false, got {_shown(value)}")


def _as_int(name: str, value: Any, expected: str) -> int:
    if isinstance(value, str):
        try:
            return int(value.strip())
        except ValueError:
            raise ConfigError(f"{name}: expected {expected}, got {_shown(value)}") from None
    if isinstance(value, bool):
        raise ConfigError(f"{name}: expected {expected}, got {_shown(value)}")
    if isinstance(value, float) and value.is_integer():
        return int(value)
    try:
        return int(value.__index__())  # numpy and torch integers
    except (AttributeError, TypeError):
        raise ConfigError(f"{name}: expected {expected}, got {_shown(value)}") from None


def integer(low: int, high: int | None = None) -> Converter:
    """An integer in low..high (high None: no upper end)."""
    expected = f"an integer >= {low}" if high is None else f"an integer in {low}..{high}"

    def convert(name: str, value: Any) -> int:
        number = _as_int(name, value, expected)
        if number < low or (high is not None and number > high):
            raise ConfigError(f"{name}: expected {expected}, got {_shown(value)}")
        return number

    return convert


def size(low: int = 1) -> Converter:
    """A count that may carry a unit: "32k" = 32,000, "32K" = "32KiB" = 32,768, "2GiB", "512MB"."""

    def convert(name: str, value: Any) -> int:
        expected = f"a whole number >= {low}, or one with a unit such as 32k, 32K, 2GiB"
        if isinstance(value, str):
            match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(iB|B|b)?\s*", value)
            if match is None:
                raise ConfigError(f"{name}: expected {expected}, got {_shown(value)}")
            number, unit, suffix = match.groups()
            binary = unit and (suffix == "iB" or (suffix is None and unit.isupper()))
            factor = (_BINARY_UNITS if binary else _UNITS)[unit.lower()]
            value = float(number) * factor if "." in number else int(number) * factor
        result = _as_int(name, value, expected)
        if result < low:
            raise ConfigError(f"{name}: expected {expected}, got {_shown(value)}")
        return result

    return convert


def number(low: float, high: float, *, open_low: bool = False) -> Converter:
    """A float in [low, high], or (low, high] with ``open_low``."""
    expected = f"a number in {'(' if open_low else '['}{low:g}, {high:g}]"

    def convert(name: str, value: Any) -> float:
        try:
            result = float(value) if not isinstance(value, bool) else None
        except (TypeError, ValueError):
            result = None
        if result is None or not (low <= result <= high) or (open_low and result == low):
            raise ConfigError(f"{name}: expected {expected}, got {_shown(value)}")
        return result

    return convert


def string(name: str, value: Any) -> str:
    """A non-empty string; a path object becomes its string."""
    if hasattr(value, "__fspath__"):
        value = value.__fspath__()
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{name}: expected a non-empty string, got {_shown(value)}")
    return value


def choice(*names: str, aliases: Mapping[str, str] | None = None) -> Converter:
    """One of the names; an alias becomes the name it stands for."""

    def convert(name: str, value: Any) -> str:
        text = string(name, value)
        text = (aliases or {}).get(text, text)
        if text not in names:
            hint = suggest(text, names)
            raise ConfigError(f"{name}: expected one of {', '.join(names)}, got {_shown(value)}{hint}")
        return text

    return convert


def from_json(name: str, value: Any, expected: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name}: expected {expected}, got {_shown(value)} ({error})") from None


def mapping(name: str, value: Any) -> dict[str, Any]:
    """A dict, or the JSON text of an object."""
    result = from_json(name, value, "a mapping or a JSON object")
    if not isinstance(result, Mapping):
        raise ConfigError(f"{name}: expected a mapping or a JSON object, got {_shown(value)}")
    return dict(result)


def anything(name: str, value: Any) -> Any:
    """A converter for options that are refused or noted whatever their value."""
    return value


def sequence_of(item: Converter, what: str) -> Converter:
    """A tuple of converted items, from any sequence or from JSON text; ``what`` names it in errors."""

    def convert(name: str, value: Any) -> tuple[Any, ...]:
        loaded = from_json(name, value, what)
        if isinstance(loaded, str | bytes | Mapping) or not isinstance(loaded, Sequence):
            raise ConfigError(f"{name}: expected {what}, got {_shown(value)}")
        return tuple(item(f"{name}[{i}]", part) for i, part in enumerate(loaded))

    return convert
