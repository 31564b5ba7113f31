"""The device that is measured, the shapes that are run on it, and the stopwatch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from draftwise.attention.torch_static import TorchStaticAttention
from draftwise.graphs.backend import CudaGraphs, GraphBackend, Rerun
from draftwise.kernels.base import Ops
from draftwise.kernels.torch_ops import TorchOps
from draftwise.models.inputs import RowInput

BLOCK = 16


@dataclass(frozen=True, slots=True)
class Size:
    """A Llama-like model with an EAGLE-3 head, and how much of it is run."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    context: int  # of one request
    tree: int  # nodes
    batches: tuple[tuple[int, int], ...]  # (requests, tokens of their prompts) of whole engines
    steps: int  # of an engine that are timed
    copy_bytes: int
    prefill: int  # rows of the largest pass
    repeats: int

    @property
    def max_len(self) -> int:
        return 2 * self.context


LLAMA_8B = Size(
    hidden=4096,
    inner=14336,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=128256,
    draft_vocab=32000,
    context=2048,
    tree=60,
    batches=((1, 2048), (16, 1024), (64, 512), (256, 128)),
    steps=40,
    copy_bytes=2 << 30,
    prefill=2048,
    repeats=20,
)
TINY = Size(
    hidden=32,
    inner=48,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=8,
    vocab=64,
    draft_vocab=32,
    context=24,
    tree=12,
    batches=((1, 12), (3, 9)),
    steps=2,
    copy_bytes=1 << 16,
    prefill=18,
    repeats=1,
)
"""For tests of this benchmark."""


class Setting:
    """One device; on a CPU nothing is captured, and torch stands for the kernels."""

    def __init__(self, device: str, tiny: bool) -> None:
        if device == "cuda":
            device = f"cuda:{torch.cuda.current_device()}"
        self.device = torch.device(device)
        self._rounds = 1 if tiny else 5
        self.size = TINY if tiny else LLAMA_8B
        self.cuda = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32

    def ops(self, *, batch_invariant: bool = False, dtype: torch.dtype | None = None) -> Ops:
        """The kernels that are measured."""
        if not self.cuda:
            return TorchOps(dtype or self.dtype, self.device, TorchStaticAttention())
        from draftwise.kernels.triton.ops import TritonOps

        return TritonOps(dtype or self.dtype, self.device, batch_invariant=batch_invariant)

    def graphs(self) -> GraphBackend:
        """The backend that captures graphs."""
        return CudaGraphs(self.device) if self.cuda else Rerun(self.device)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def time(self, run: Callable[[], object], repeats: int | None = None) -> float:
        """Seconds of device time that one call takes, the median of some rounds of calls in a row."""
        count = repeats or self.size.repeats
        run()
        self.synchronize()
        found: list[float] = []
        for _ in range(self._rounds):
            if self.cuda:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                start.record()
                for _ in range(count):
                    run()
                end.record()
                torch.cuda.synchronize(self.device)
                found.append(start.elapsed_time(end) / 1000 / count)
            else:
                begun = time.perf_counter()
                for _ in range(count):
                    run()
                found.append((time.perf_counter() - begun) / count)
        return statistics.median(found)

    def time_captured(self, run: Callable[[], object], repeats: int | None = None) -> float:
        """The same of a function that is captured first: without what the host adds."""
        graph, _ = self.graphs().capture(run)
        return self.time(graph.replay, repeats)

    def bandwidth(self) -> float:
        """Bytes per second of a copy, read and written ones together."""
        source = torch.ones(self.size.copy_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        seconds = self.time(lambda: target.copy_(source))
        return 2 * self.size.copy_bytes / seconds

    def rows(
        self, requests: int, rows: int, context: int, parents: tuple[int, ...] | None = None
    ) -> list[RowInput]:
        """Requests with ``context`` tokens in the cache and ``rows`` to compute, each in blocks of its own."""
        width = -(-(context + rows) // BLOCK)
        rng = np.random.default_rng(requests)
        tokens = rng.integers(0, self.size.vocab, (requests, rows)).astype(np.int32)
        return [
            RowInput(tokens[r], context, np.arange(r * width, (r + 1) * width, dtype=np.int32), parents)
            for r in range(requests)
        ]


def tree_parents(nodes: int) -> tuple[int, ...]:
    """A tree in which every node has four children, as far as there are nodes.

    Example: 6 nodes: four below the root, and two below the first of them.
    """
    return tuple(i // 4 - 1 for i in range(nodes))
