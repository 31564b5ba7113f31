"""Which kernels a model runs on when nobody says."""

from __future__ import annotations

import functools
import logging
import os
from typing import TYPE_CHECKING

import torch

from draftwise.errors import ConfigError
from draftwise.kernels.base import Ops
from draftwise.kernels.torch_ops import TorchOps

if TYPE_CHECKING:
    from draftwise.kernels.cpu.pool import ThreadPool

logger = logging.getLogger("draftwise")

KERNELS_VARIABLE = "DRAFTWISE_KERNELS"
"""``torch`` keeps models on plain torch; ``native`` insists on the native kernels; ``auto`` or nothing: native where it
can be."""

_NATIVE_DTYPES = (torch.float32, torch.bfloat16)


def default_ops(dtype: torch.dtype, device: torch.device) -> Ops:
    """Native kernels on a CPU in float32 and bfloat16, plain torch otherwise.

    Raises:
        ConfigError: ``DRAFTWISE_KERNELS`` names nothing, or native kernels that cannot be had.
    """
    wanted = os.environ.get(KERNELS_VARIABLE, "").lower() or "auto"
    if wanted not in ("auto", "torch", "native"):
        raise ConfigError(f"{KERNELS_VARIABLE}={wanted}: must be auto, native or torch")
    if wanted != "torch":
        reason = _why_not(dtype, device)
        if reason is None:
            return _native(dtype)
        if wanted == "native":
            raise ConfigError(f"{KERNELS_VARIABLE}=native: {reason}")
    return TorchOps(dtype, device)


def _why_not(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why native kernels cannot serve a model; None if they can."""
    if device.type != "cpu":
        return f"native kernels run on the CPU, not on {device.type}"
    if dtype not in _NATIVE_DTYPES:
        return f"native kernels know no {str(dtype).removeprefix('torch.')} activations"
    from draftwise.kernels.cpu.library import why_not_native

    reason = why_not_native()
    if reason is not None:
        _say_once(reason)
    return reason


@functools.cache
def _say_once(reason: str) -> None:
    logger.warning("no native CPU kernels, models run on plain torch: %s", reason)


def _native(dtype: torch.dtype) -> Ops:
    from draftwise.kernels.cpu.library import native_library
    from draftwise.kernels.cpu.ops import NativeOps

    library = native_library()
    assert library is not None
    return NativeOps(library, _shared_pool(torch.get_num_threads()), dtype)


@functools.cache
def _shared_pool(threads: int) -> ThreadPool:
    """One pool for all models of a process that use as many threads: a target and its drafter take turns anyway, and
    the idle threads of one would be in the way of the other."""
    from draftwise.kernels.cpu.library import native_library
    from draftwise.kernels.cpu.pool import ThreadPool

    library = native_library()
    assert library is not None
    return ThreadPool(library, threads)
