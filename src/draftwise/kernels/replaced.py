"""Kernels that are not right on this machine, by name: plain torch does their work.

One writer, `models.self_test` and `runner.step_checks` through `replace_kernels`; whoever makes operations afterwards
reads. A process has one kind of device besides the CPU, so that a type of device is all that is told apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

FAMILIES: Final = ("linear", "norm", "gated", "gather", "rotation", "attention", "prompts", "low_rank")
"""Of a model's passes: products, norms, the activation of MLPs, rows of a table, rotation and writing of keys and
values, attention, and that of long chunks of prompts: without it these have the kernel of all others. And
what adapters add in captured passes."""

STEPS: Final = "steps"
"""All that stands between passes: draws, verification, rows of the next pass."""

_replaced: dict[str, frozenset[str]] = {}


def replace_kernels(device_type: str, names: Iterable[str]) -> None:
    """From now on torch does the work of these kernels, of `FAMILIES` and `STEPS`."""
    found = replaced_kernels(device_type).union(names)
    assert found <= {*FAMILIES, STEPS}, f"no names of kernels: {found}"
    _replaced[device_type] = found


def replaced_kernels(device_type: str) -> frozenset[str]:
    """The kernels whose work torch does."""
    return _replaced.get(device_type, frozenset())
