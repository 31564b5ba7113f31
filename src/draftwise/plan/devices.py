"""Peaks of known devices, for estimates without the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from draftwise.errors import ConfigError, suggest


@dataclass(frozen=True, slots=True)
class Device:
    """Peaks of one device, and what is reached of them.

    ``memory``: bytes. ``bandwidth``: bytes/s of its memory. ``peak``: operations/s (a product and a sum are two) by
    weight format, dense. ``link``: bytes/s to its peers in one direction. ``overhead``: seconds that a pass takes
    besides (launches, host). ``reached_memory``, ``reached_compute``: shares of the peaks that good kernels reach.
    """

    name: str
    memory: float
    bandwidth: float
    peak: Mapping[str, float]
    link: float
    overhead: float = 0.4e-3
    reached_memory: float = 0.8
    reached_compute: float = 0.6


def _gpu(
    name: str, gigabytes: float, terabytes_per_s: float, bf16: float, low: float, link: float, low_name: str
) -> Device:
    peak = {"bfloat16": bf16 * 1e12, low_name: low * 1e12, "int4": bf16 * 1e12}
    return Device(name, gigabytes * 1e9, terabytes_per_s * 1e12, peak, link * 1e9)


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        # Vendors' data sheets: SXM boards, dense rates, links in one direction.
        _gpu("a100", 80, 2.039, 312, 624, 300, "int8"),
        _gpu("h100", 80, 3.35, 989, 1979, 450, "fp8"),
        _gpu("h200", 141, 4.8, 989, 1979, 450, "fp8"),
        _gpu("b200", 180, 7.7, 2250, 4500, 900, "fp8"),
        _gpu("mi300x", 192, 5.3, 1307, 2614, 448, "fp8"),
        # Measured with `bench kernels` on two cores each (docs/benchmarks): what is reached, so shares of 1 and 0.6.
        Device("epyc-2", 8e9, 33e9, {"bfloat16": 438e9, "int8": 865e9, "int4": 865e9}, 1e9, 0.1e-3, 1.0, 0.6),
        Device(
            "xeon-amx-2", 8e9, 20e9, {"bfloat16": 2e12, "int8": 4e12, "int4": 4e12}, 1e9, 0.1e-3, 1.0, 0.5
        ),
    )
}
BYTES_PER_WEIGHT = {"bfloat16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5625}
"""int4: with a bfloat16 scale for each group of 32."""


def device(name: str) -> Device:
    """A device by its name, in upper or lower case. Raises ConfigError."""
    found = DEVICES.get(name.lower())
    if found is None:
        raise ConfigError(
            f"device: there is no {name!r}{suggest(name.lower(), DEVICES)} (known: {', '.join(DEVICES)})"
        )
    return found
