"""The weight formats that ``quantization=`` names."""

from __future__ import annotations

import re
from dataclasses import dataclass

from draftwise.errors import ConfigError, suggest

GROUP_SIZES = (32, 64, 128)
DEFAULT_GROUP = 64
_NAMES = ("int8", "int4", "fp8", "int8_dynamic", "int4_dynamic", "int8_weight_only", "int4_weight_only")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How weights are stored, and whether the rows that meet them are quantised too."""

    bits: int  # 8 or 4
    dynamic: bool  # rows to int8 (fp8: to fp8), one scale per row (token), made as they come
    group: int | None  # inputs that share a scale; None: all of an output's
    floats: bool = False  # codes are fp8 (e4m3) and not integers

    @property
    def name(self) -> str:
        """The name that says which form it is, on whatever device."""
        if self.floats:
            return "fp8"
        text = f"int{self.bits}_{'dynamic' if self.dynamic else 'weight_only'}"
        return text if self.group in (None, DEFAULT_GROUP) else f"{text}_g{self.group}"

    def bytes_per_weight(self) -> float:
        """Bytes that a pass reads, scales included."""
        return self.bits / 8 + (2 / self.group if self.group else 0)


def parse_scheme(text: str, option: str = "quantization", *, device: str = "cpu") -> Scheme:
    """The form that a name means on a device.

    Args:
        text: ``int8`` or ``int4``: the form that is fast on the device. On a CPU rows are rounded too, since products
            of integers are several times as fast; on a GPU those of int8 are, while int4 weights meet rows as they
            are (there is no other kernel). ``int8_dynamic``, ``int4_dynamic`` and ``int8_weight_only``,
            ``int4_weight_only`` name a form whatever the device. Those of int4 may have a group size: ``int4_g32``.
            ``fp8``: weights and rows.
        option: whose value it is, for errors.
        device: a type of device, as torch names it.

    Raises:
        ConfigError: Another name; tells the closest.
    """
    lowered = text.strip().lower()
    if lowered == "fp8":
        return Scheme(bits=8, dynamic=True, group=None, floats=True)
    match = re.fullmatch(r"(int8|int4)(_dynamic|_weight_only)?(?:_g(\d+))?", lowered)
    if match is None or (match[1] == "int8" and match[3]):
        raise ConfigError(f"{option}: {text!r} is unknown{suggest(text, _NAMES)}; known: {', '.join(_NAMES)}")
    bits, group = int(match[1][3:]), None
    if bits == 4:
        group = int(match[3] or DEFAULT_GROUP)
        if group not in GROUP_SIZES:
            raise ConfigError(
                f"{option}: groups of {group} in {text!r}; there are {', '.join(map(str, GROUP_SIZES))}"
            )
    dynamic = match[2] == "_dynamic" if match[2] else (bits == 8 or device == "cpu")
    return Scheme(bits=bits, dynamic=dynamic, group=group)


def checked_name(text: str, option: str = "quantization") -> str:
    """A name as `parse_scheme` takes it, in lower case; what ``int8`` means is left to the device.

    Raises:
        ConfigError: Another name.
    """
    parse_scheme(text, option)
    return text.strip().lower()
