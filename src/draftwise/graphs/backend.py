"""What captures and replays. `CudaGraphs` is the one that engines use; tests have one that needs no GPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Graph(Protocol):
    """Operations on fixed memory."""

    def replay(self) -> None:
        """Do them again, on what the memory holds now."""


class Fence(Protocol):
    """A point in the order of what a device was told to do."""

    def synchronize(self) -> None:
        """Wait until the device has come so far."""


class GraphBackend(ABC):
    """Captures what a function does on one device.

    All graphs of a backend share their memory: what one leaves behind is valid until the next one of them is replayed,
    except for tensors that were there before the capture.
    """

    device: torch.device

    @abstractmethod
    def capture(self, run: Callable[[], T]) -> tuple[Graph, T]:
        """Run a function once as it is, so that whatever it makes on its first call is there, then capture it.

        Returns:
            The graph, and what the captured call returned: tensors in the graphs' memory, whose contents a replay
            renews.
        """

    @abstractmethod
    def host_buffer(self, size: int) -> Tensor:
        """int64 [size] zeros on the host, from which copies to the device need no waiting."""

    @abstractmethod
    def fence(self) -> Fence:
        """Here."""


class Rerun(GraphBackend):
    """Captures nothing: a replay is the function, run again. For devices without graphs, and to compare with them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def capture(self, run: Callable[[], T]) -> tuple[Graph, T]:
        return _Again(run), run()

    def host_buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int64)

    def fence(self) -> Fence:
        return _NoFence()


class _Again:
    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run

    def replay(self) -> None:
        self._run()


class _NoFence:
    def synchronize(self) -> None:
        return


class CudaGraphs(GraphBackend):
    """CUDA graphs through `torch.cuda.CUDAGraph`, in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.num_graphs = 0

    def capture(self, run: Callable[[], T]) -> tuple[Graph, T]:
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream(self.device)
            self._stream.wait_stream(current)
            # compiles kernels, makes libraries' workspaces, and what is kept beside the captured memory
            with torch.cuda.stream(self._stream):
                run()
            current.wait_stream(self._stream)
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            # other threads (a server's, a scheduler's) may go on using the device's allocator meanwhile
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                result = run()
        self.num_graphs += 1
        return graph, result

    def host_buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int64, pin_memory=True)

    def fence(self) -> Fence:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event
