"""Whether Triton kernels can run here, and as what."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Final

import torch

from draftwise.errors import install

LAUNCH: Final = {"enable_fp_fusion": False}
"""Options of every launch: a product and a sum are rounded one after the other, whatever Triton's default is, so that
the same formula gives the same bits in every kernel and every specialisation of it."""


SHOWN_ON: Final = frozenset({(9, 0)})
"""Compute capabilities of devices on which the tests of equal bits have passed (an H100 and an H200). Nothing is
promised on others."""


def equal_bits_shown(device: torch.device) -> bool:
    """Whether equal bits are promised there: in the interpreter, and on devices of `SHOWN_ON`."""
    if interpreted():
        return True
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in SHOWN_ON


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU: slow, and exact enough to test them without a GPU.

    Triton reads ``TRITON_INTERPRET`` when it is imported, so the variable must be set when the process starts.
    """
    return os.environ.get("TRITON_INTERPRET", "") in ("1", "true", "on", "yes")


def reads_fp8(device: torch.device) -> bool:
    """Whether kernels on ``device`` take numbers of fp8 as such. Devices before compute capability 8.9 have no
    instructions for them, and Triton refuses the type: kernels get the bytes, and `device.fp8` takes these apart."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


@functools.cache
def installed() -> bool:
    """Whether the package ``triton`` can be imported. It is not imported for that."""
    return importlib.util.find_spec("triton") is not None


def why_not_triton(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why Triton kernels do not serve a model of this dtype on this device; None if they do."""
    if not installed():
        return f"the package triton is not installed ({install('gpu')})"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"Triton kernels know no {str(dtype).removeprefix('torch.')} activations"
    if interpreted():
        if device.type != "cpu":
            return f"TRITON_INTERPRET is set, and Triton's interpreter runs on the CPU, not on {device.type}"
        return None
    if device.type == "cpu":
        return "Triton kernels need a CUDA device, or TRITON_INTERPRET=1 for its interpreter"
    if device.type != "cuda":
        return f"Triton kernels run on CUDA devices, not on {device.type}"
    return None
