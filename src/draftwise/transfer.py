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
