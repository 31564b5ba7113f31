"""The interface that captures and replays. Engines use `CudaGraphs`; tests have an implementation without a GPU."""

from __future__ import annotations

import itertools
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


class Pieces(Protocol):
    """A function that was captured in pieces."""

    def replay(self, between: Callable[[int], object]) -> None:
        """Do the first one again, call ``between(0)``, do the second one, call ``between(1)``, ..., do the last one."""


class Fence(Protocol):
    """A point in the order of a device's work."""

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
    def capture_pieces(self, run: Callable[[Callable[[], None]], T]) -> tuple[Pieces, T]:
        """As `capture`, of a function that is given another one: with each call of it, it ends a piece and begins the
        next one. What it makes in one piece, later pieces find where it was; between them anything may be done that
        does not replay graphs of this backend."""

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

    def capture_pieces(self, run: Callable[[Callable[[], None]], T]) -> tuple[Pieces, T]:
        return _AgainInPieces(run), run(lambda: None)

    def host_buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int64)

    def fence(self) -> Fence:
        return _NoFence()


class _Again:
    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run

    def replay(self) -> None:
        self._run()


class _AgainInPieces:
    def __init__(self, run: Callable[[Callable[[], None]], object]) -> None:
        self._run = run

    def replay(self, between: Callable[[int], object]) -> None:
        cuts = itertools.count()

        def cut() -> None:
            between(next(cuts))

        self._run(cut)


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
        # A pool ends with the last of its graphs, and nothing can then be captured into it: the first one stays.
        self._first: object = None

    def capture(self, run: Callable[[], T]) -> tuple[Graph, T]:
        with torch.cuda.device(self.device):
            self._warm_up(run)
            graph = torch.cuda.CUDAGraph()
            # other threads (a server's, a scheduler's) may go on using the device's allocator meanwhile
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                result = run()
        self._first = self._first or graph
        return graph, result

    def capture_pieces(self, run: Callable[[Callable[[], None]], T]) -> tuple[Pieces, T]:
        pieces = _CudaPieces(self._pool)
        with torch.cuda.device(self.device):
            self._warm_up(lambda: run(lambda: None))
            torch.cuda.empty_cache()
            with torch.cuda.stream(self._stream), pieces:
                result = run(pieces.cut)
        self._first = self._first or pieces
        return pieces, result

    def _warm_up(self, run: Callable[[], object]) -> None:
        """Compiles kernels, makes libraries' workspaces, and what is kept beside the captured memory."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self.device)

    def host_buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int64, pin_memory=True)

    def fence(self) -> Fence:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event


class _CudaPieces:
    """Graphs that are captured one behind the other on the current stream, between ``with`` and its end."""

    def __init__(self, pool: object) -> None:
        self._pool = pool
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, *raised: object) -> None:
        self._graphs[-1].capture_end()

    def cut(self) -> None:
        # what is alive now stays alive: memory of the pool that a piece did not free, no later piece is given
        self._graphs[-1].capture_end()
        self._begin()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # type: ignore[arg-type]
        self._graphs.append(graph)

    def replay(self, between: Callable[[int], object]) -> None:
        self._graphs[0].replay()
        for i, graph in enumerate(self._graphs[1:]):
            between(i)
            graph.replay()
