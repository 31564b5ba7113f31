"""The default kernels for verification: those that models run on."""

from __future__ import annotations

import torch

from draftwise.kernels.cpu.library import native_library
from draftwise.kernels.select import native_reason, on_triton, shared_pool
from draftwise.verify.base import BatchRules
from draftwise.verify.native import NativeRules
from draftwise.verify.triton import TritonRules


def default_rules(device: torch.device) -> BatchRules | None:
    """The kernels that verify, if models run on kernels; None: the rules in torch."""
    if native_reason(torch.float32, device) is None:
        library = native_library()
        assert library is not None
        return NativeRules(library, shared_pool(torch.get_num_threads()))
    return TritonRules() if on_triton(device) else None
