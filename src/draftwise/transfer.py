"""Copies of the host's numbers on a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(
    numbers: Sequence[int] | Sequence[Sequence[int]] | npt.NDArray[np.int64], device: torch.device
) -> Tensor:
    """int64, of the shape of ``numbers``. A GPU is not waited for: what it copies from is pinned, and stays until it
    has done so."""
    host = torch.from_numpy(np.asarray(numbers, np.int64))
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def parts_to_device(parts: Sequence[npt.NDArray[np.generic]], device: torch.device) -> list[Tensor]:
    """Int32 copies on the device, [len(part)] each, in one transfer."""
    joined = torch.from_numpy(np.concatenate([part.astype(np.int32, copy=False) for part in parts]))
    if device.type == "cuda":
        joined = joined.pin_memory()
    return list(torch.split(joined.to(device, non_blocking=True), [len(part) for part in parts]))
