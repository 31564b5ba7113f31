"""The default kernels of a model."""

from __future__ import annotations

import functools
import logging
import os
from typing import TYPE_CHECKING, Final

import torch

from draftwise import names
from draftwise.errors import ConfigError
from draftwise.kernels.base import Ops
from draftwise.kernels.replaced import STEPS, replaced_kernels
from draftwise.kernels.split import SplitOps
from draftwise.kernels.torch_ops import TorchOps
from draftwise.kernels.triton.availability import why_not_triton

if TYPE_CHECKING:
    from draftwise.kernels.cpu.pool import ThreadPool
    from draftwise.kernels.ranks import Ranks
    from draftwise.quantization.scheme import Scheme

logger = logging.getLogger("draftwise")

KERNELS_VARIABLE: Final = names.KERNELS_VARIABLE
"""``torch`` keeps models on plain torch; ``native`` and ``triton`` insist on the native kernels or on Triton's;
``auto`` or nothing: native on a CPU where they can be, Triton's on a CUDA device where that package is, else plain
torch."""

_NO_LATENT: Final = "latent attention has no Triton kernels"
_NATIVE_DTYPES = (torch.float32, torch.bfloat16)


def default_ops(
    dtype: torch.dtype,
    device: torch.device,
    scheme: Scheme | None = None,
    *,
    batch_invariant: bool = False,
    ranks: Ranks | None = None,
    untested: bool = False,
    latent: bool = False,
) -> Ops:
    """Native kernels on a CPU in float32 and bfloat16, Triton's on a CUDA device, plain torch otherwise; others where
    the environment names them.

    Args:
        scheme: What linear layers are rounded to as they are packed; plain torch cannot.
        batch_invariant: A row's bits may not depend on the rows that are computed with it.
        ranks: With whom a model is shared; the operations are then `SplitOps`. None: with nobody.
        untested: Also kernels that were found wrong on this machine (`kernels.replaced`).
        latent: The model has latent attention, for which Triton has no kernels.

    Raises:
        ConfigError: ``DRAFTWISE_KERNELS`` names nothing, or kernels are needed that cannot be had.
    """
    needed = None if scheme is None else f"quantization: {scheme.name}"
    if batch_invariant and needed is None:
        needed = "batch_invariant"
    if _triton_wanted(device):
        without = _NO_LATENT if latent else why_not_triton(dtype, device)
        if without is None:
            replaced = frozenset() if untested else replaced_kernels(device.type) - {STEPS}
            return _triton(dtype, device, scheme, batch_invariant, ranks, replaced)
        if _wanted() == "triton":
            raise ConfigError(f"{KERNELS_VARIABLE}=triton: {without}")
        if needed:
            raise ConfigError(f"{needed} needs Triton's kernels: {without}")
        _say_once(without)
    if scheme is not None and scheme.floats:
        raise ConfigError(f"{needed} needs Triton's kernels, on a CUDA device")
    reason = native_reason(dtype, device)
    if reason is None:
        return _native(dtype, scheme, ranks)
    if scheme is not None:
        raise ConfigError(f"quantization: {scheme.name} needs the native kernels: {reason}")
    if _wanted() == "native":
        raise ConfigError(f"{KERNELS_VARIABLE}=native: {reason}")
    if batch_invariant:
        raise ConfigError(
            "batch_invariant: plain torch's products round differently for different numbers of rows, and there are no "
            f"native kernels: {reason}"
        )
    return TorchOps(dtype, device) if ranks is None else _joined(_SplitTorchOps(dtype, device), ranks)


class _SplitTorchOps(SplitOps, TorchOps):
    """`TorchOps` of one rank of several."""


def _joined(ops: SplitOps, ranks: Ranks) -> Ops:
    ops.join(ranks)
    return ops


def on_triton(device: torch.device, *, untested: bool = False) -> bool:
    """Whether what stands between passes on this device is done by Triton's kernels. ``untested``: or would be, if all
    were right on this machine.

    Raises:
        ConfigError: ``DRAFTWISE_KERNELS`` names nothing.
    """
    if not untested and STEPS in replaced_kernels(device.type):
        return False
    return _triton_wanted(device) and why_not_triton(torch.float32, device) is None


def native_reason(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why native kernels do not serve a model of this kind; None if they do.

    Raises:
        ConfigError: ``DRAFTWISE_KERNELS`` names nothing.
    """
    if _wanted() in ("torch", "triton"):
        return f"{KERNELS_VARIABLE}={_wanted()}"
    if device.type != "cpu":
        return f"native kernels run on the CPU, not on {device.type}"
    if dtype not in _NATIVE_DTYPES:
        return f"native kernels know no {str(dtype).removeprefix('torch.')} activations"
    from draftwise.kernels.cpu.library import why_not_native

    reason = why_not_native()
    if reason is not None:
        _say_once(reason)
    return reason


def _triton_wanted(device: torch.device) -> bool:
    return _wanted() == "triton" or (_wanted() == "auto" and device.type == "cuda")


def _wanted() -> str:
    wanted = os.environ.get(KERNELS_VARIABLE, "").lower() or "auto"
    if wanted not in ("auto", "torch", "native", "triton"):
        raise ConfigError(f"{KERNELS_VARIABLE}={wanted}: must be auto, native, torch or triton")
    return wanted


@functools.cache
def _say_once(reason: str) -> None:
    logger.warning("models run on plain torch, not on kernels: %s", reason)


def _triton(
    dtype: torch.dtype,
    device: torch.device,
    scheme: Scheme | None,
    batch_invariant: bool,
    ranks: Ranks | None,
    replaced: frozenset[str],
) -> Ops:
    from draftwise.kernels.triton.ops import TritonOps

    if ranks is None:
        return TritonOps(dtype, device, scheme=scheme, batch_invariant=batch_invariant, replaced=replaced)

    class SplitTritonOps(SplitOps, TritonOps):
        """`TritonOps` of one rank of several."""

    split = SplitTritonOps(dtype, device, scheme=scheme, batch_invariant=batch_invariant, replaced=replaced)
    return _joined(split, ranks)


def _native(dtype: torch.dtype, scheme: Scheme | None, ranks: Ranks | None) -> Ops:
    from draftwise.kernels.cpu.levels import settle_level
    from draftwise.kernels.cpu.library import native_library
    from draftwise.kernels.cpu.ops import NativeOps

    library = native_library()
    assert library is not None
    settle_level(library)
    pool = shared_pool(torch.get_num_threads())
    if ranks is not None:
        from draftwise.kernels.cpu.library import Isa
        from draftwise.kernels.cpu.ranks import SplitNativeOps, SplitQuantizedOps

        # what all ranks compute must be the same bits, and a choice that is measured may differ
        library.use_isa(Isa[ranks.told(library.isa.name)])
        return _joined(
            SplitNativeOps(library, pool, dtype)
            if scheme is None
            else SplitQuantizedOps(library, pool, dtype, scheme),
            ranks,
        )
    if scheme is None:
        return NativeOps(library, pool, dtype)
    from draftwise.kernels.cpu.quantized import QuantizedOps

    return QuantizedOps(library, pool, dtype, scheme)


@functools.cache
def shared_pool(threads: int) -> ThreadPool:
    """Threads of the native kernels: one pool for all models of a process that use as many, for a target and its
    drafter take turns anyway, and the idle threads of one would be in the way of the other."""
    from draftwise.kernels.cpu.library import native_library
    from draftwise.kernels.cpu.pool import ThreadPool

    library = native_library()
    assert library is not None
    return ThreadPool(library, threads)
