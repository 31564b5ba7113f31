"""A CUDA device on a machine without one: `FakeCuda` makes torch believe in ``cuda:0`` for a while.

Its tensors lie in the host's memory, so that everything is computed; but they say that they lie on the device, and
what the device would refuse is refused:

- operations on tensors of both kinds, and kernels that are given a host's tensor;
- while a graph is captured (`fake_cuda_graphs`): to wait, to read a value, to copy from memory that is not pinned;
- memory of ``torch.empty`` holds no zeros but not-a-number, or large integers.

Copies from pinned memory that nobody waited for are compared, once somebody does, with what was there when they began:
a host that writes into its buffer too early is told. Copies to pinned memory arrive when somebody waits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fakes import fake_cuda_tensor
from tests.fakes.fake_cuda_api import patches
from tests.fakes.fake_cuda_device import FakeCuda
from tests.fakes.fake_cuda_tensor import CudaTensor


class _Mode(TorchDispatchMode):
    """Catches what makes a tensor."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # whose import takes seconds
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if CudaTensor in types or (device is not None and torch.device(device).type == "cuda"):
            return fake_cuda_tensor.now().dispatch(func, args, kwargs)
        return func(*args, **kwargs)


@contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """The device is there, in this thread and in those that are started meanwhile."""
    device = FakeCuda()
    with _patched(patches(device)):
        fake_cuda_tensor.active.append(device)
        try:
            with _Mode():  # type: ignore[no-untyped-call]
                yield device
        finally:
            fake_cuda_tensor.active.remove(device)


@contextmanager
def _patched(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    before = threading.Thread.run

    def run(thread: threading.Thread) -> None:
        with _Mode():  # type: ignore[no-untyped-call]
            before(thread)

    started = [mock.patch.object(owner, name, value) for owner, name, value in changes]
    started.append(mock.patch.object(threading.Thread, "run", run))
    for patch in started:
        patch.start()
    try:
        yield
    finally:
        for patch in reversed(started):
            patch.stop()
