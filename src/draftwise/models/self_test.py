"""An engine's own look at the kernels that it is about to use: one that is wrong here is replaced by plain torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import torch

from draftwise.errors import ModelLoadError
from draftwise.kernels.base import Ops
from draftwise.kernels.ranks import Ranks
from draftwise.kernels.replaced import FAMILIES, STEPS, replace_kernels, replaced_kernels
from draftwise.kernels.select import default_ops
from draftwise.kernels.triton.ops import TritonOps
from draftwise.models.checking import KernelCheck, check_kernels
from draftwise.models.config import ModelConfig
from draftwise.quantization.scheme import Scheme

logger = logging.getLogger("draftwise")

TESTED: Final = frozenset({"cuda"})
"""Devices whose kernels are tested. Native kernels of a CPU are tested before they are shipped; Triton's interpreter
would take minutes."""


def settled_ops(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    scheme: Scheme | None = None,
    *,
    batch_invariant: bool = False,
    ranks: Ranks | None = None,
    adapters: bool = False,
    stored: bool = False,
) -> Ops:
    """`kernels.select.default_ops` for a model, whose kernels were compared with plain torch at its shapes and dtype.

    Kernels that differ, or that do not compile or run, are replaced by plain torch for all models that this process
    loads from now on, and one warning names them. What is wrong on one rank of several is replaced on all.

    Raises:
        ConfigError: as `default_ops`; or ``batch_invariant`` needs a kernel that is wrong.
        ModelLoadError: a kernel has left the device unusable.
    """
    latent = config.latent is not None
    if device.type in TESTED:
        alone = default_ops(dtype, device, scheme, batch_invariant=batch_invariant, latent=latent)
        if isinstance(alone, TritonOps):
            settle(check_kernels(alone, config, scheme, adapters=adapters, stored=stored), device, ranks)
    return default_ops(dtype, device, scheme, batch_invariant=batch_invariant, ranks=ranks, latent=latent)


def settle(checks: Sequence[KernelCheck], device: torch.device, ranks: Ranks | None = None) -> None:
    """Replace the kernels that are not right, say so, and see that the device still works.

    Raises:
        ModelLoadError: it does not: an error inside a kernel ends all work of a process on a CUDA device.
    """
    wrong = {check.kernel: check for check in reversed(checks) if not check.right}  # of each, the first
    if ranks is not None:
        before = replaced_kernels(device.type)
        agreed = {
            name
            for name in (*FAMILIES, STEPS)
            if ranks.least(0 if name in wrong or name in before else 1) == 0
        }
        replace_kernels(device.type, agreed)
    replace_kernels(device.type, wrong)
    if not wrong:
        return
    said = "; ".join(f"{check.name}: {check}" for _, check in sorted(wrong.items()))
    try:
        torch.zeros(1, device=device).add_(1.0).item()
    except RuntimeError as error:
        raise ModelLoadError(
            f"Triton's kernels have left {device} unusable: set DRAFTWISE_KERNELS=torch to do without them ({said})"
        ) from error
    logger.warning(
        "not right on this machine, and done by plain torch instead: %s (draftwise env --check-kernels shows all)",
        said,
    )
