"""The weight formats that ``quantization=`` names."""

from __future__ import annotations

import re
from dataclasses import dataclass

from draftwise.errors import ConfigError, suggest

GROUP_SIZES = (32, 64, 128)
DEFAULT_GROUP = 64
_NAMES = ("int8", "int8_dynamic", "int4", "int4_dynamic", "fp8")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How weights are stored, and whether the rows that meet them are quantised too."""

    bits: int  # 8 or 4
    dynamic: bool  # rows to int8 (fp8: to fp8), one scale per row (token), made as they come
    group: int | None  # inputs that share a scale; None: all of an output's
    floats: bool = False  # codes are fp8 (e4m3) and not integers

    @property
    def name(self) -> str:
        if self.floats:
            return "fp8"
        text = f"int{self.bits}" + ("_dynamic" if self.dynamic else "")
        return text if self.group in (None, DEFAULT_GROUP) else f"{text}_g{self.group}"

    def bytes_per_weight(self) -> float:
        """What a pass reads, scales included."""
        return self.bits / 8 + (2 / self.group if self.group else 0)


def parse_scheme(text: str, option: str = "quantization") -> Scheme:
    """``int8``, ``int8_dynamic``, ``int4``, ``int4_dynamic``; the int4 ones also with a group size: ``int4_g32``;
    ``fp8``, whose rows are rounded, too.

    Raises:
        ConfigError: Another name; tells the closest.
    """
    if text.strip().lower() == "fp8":
        return Scheme(bits=8, dynamic=True, group=None, floats=True)
    match = re.fullmatch(r"(int8|int4)(_dynamic)?(?:_g(\d+))?", text.strip().lower())
    if match is None or (match[1] == "int8" and match[3]):
        raise ConfigError(f"{option}: {text!r} is unknown{suggest(text, _NAMES)}; known: {', '.join(_NAMES)}")
    group = None
    if match[1] == "int4":
        group = int(match[3] or DEFAULT_GROUP)
        if group not in GROUP_SIZES:
            raise ConfigError(
                f"{option}: groups of {group} in {text!r}; there are {', '.join(map(str, GROUP_SIZES))}"
            )
    return Scheme(bits=int(match[1][3:]), dynamic=match[2] is not None, group=group)
