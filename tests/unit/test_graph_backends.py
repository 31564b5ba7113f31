"""What captures and replays: what is asked of torch, and whether the one for tests tells what a device would not do."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.fake_graphs import FakeGraphs
from tests.fakes.tiny import VOCAB, save_llama

from draftwise.graphs.backend import CudaGraphs
from draftwise.graphs.buffers import Shape
from draftwise.graphs.capture import Captures
from draftwise.graphs.decoder import GraphedDecoder
from draftwise.kv.storage import KVStorage
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.loader import load_model


def test_cuda_graphs_run_once_and_then_capture_in_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of torch, on a device that is made up."""
    inspect.signature(torch.cuda.graph.__init__).bind(
        None, object(), pool=(0, 0), stream=None, capture_error_mode="thread_local"
    )
    log: list[str] = []

    class Stream:
        def __init__(self, device: object = None) -> None:
            self.waits = 0

        def wait_stream(self, other: object) -> None:
            log.append("wait")

    @contextlib.contextmanager
    def inside(*args: object, **kwargs: object) -> Iterator[None]:
        name = "capture" if kwargs else "stream" if isinstance(args[0], Stream) else ""
        if kwargs:
            assert kwargs["pool"] == "pool" and isinstance(kwargs["stream"], Stream)
            assert kwargs["capture_error_mode"] == "thread_local"
        log.append(f"<{name}")
        yield
        log.append(f"{name}>")

    for name, value in {
        "device": inside,
        "stream": inside,
        "graph": inside,
        "Stream": Stream,
        "graph_pool_handle": lambda: "pool",
        "current_stream": lambda device: Stream(),
        "synchronize": lambda device: log.append("synchronize"),
        "CUDAGraph": object,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    backend = CudaGraphs(torch.device("cuda"))
    log.clear()
    graph, result = backend.capture(lambda: log.append("run"))
    assert [entry for entry in log if entry not in ("<", ">")] == [
        *("wait", "<stream", "run", "stream>", "wait", "synchronize"),
        *("<capture", "run", "capture>"),
    ]
    assert result is None and graph is not None


def test_cuda_pieces_are_captured_one_behind_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of torch, on a device that is made up."""
    inspect.signature(torch.cuda.CUDAGraph.capture_begin).bind(
        None, pool=(0, 0), capture_error_mode="thread_local"
    )
    log: list[str] = []

    class Stream:
        def __init__(self, device: object = None) -> None:
            return

        def wait_stream(self, other: object) -> None:
            log.append("wait")

    class Graph:
        made = 0

        def __init__(self) -> None:
            Graph.made += 1
            self.name = Graph.made

        def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
            assert pool == "pool" and capture_error_mode == "thread_local"
            log.append(f"<{self.name}")

        def capture_end(self) -> None:
            log.append(f"{self.name}>")

        def replay(self) -> None:
            log.append(f"replay {self.name}")

    @contextlib.contextmanager
    def inside(target: object) -> Iterator[None]:
        name = "stream" if isinstance(target, Stream) else "device"
        log.append(f"<{name}")
        yield
        log.append(f"{name}>")

    for name, value in {
        "device": inside,
        "stream": inside,
        "Stream": Stream,
        "graph_pool_handle": lambda: "pool",
        "current_stream": lambda device: Stream(),
        "synchronize": lambda device: log.append("synchronize"),
        "empty_cache": lambda: log.append("empty"),
        "CUDAGraph": Graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    backend = CudaGraphs(torch.device("cuda"))
    log.clear()

    def run(cut: Any) -> str:
        log.append("a")
        cut()
        log.append("b")
        return "result"

    pieces, result = backend.capture_pieces(run)
    assert result == "result"
    assert [entry for entry in log if "device" not in entry] == [
        *("wait", "<stream", "a", "b", "stream>", "wait", "synchronize", "empty"),
        *("<stream", "<1", "a", "1>", "<2", "b", "2>", "stream>"),
    ]
    log.clear()
    pieces.replay(lambda i: log.append(f"between {i}"))
    assert log == ["replay 1", "between 0", "replay 2"]


def test_the_fake_spoils_what_another_replay_left() -> None:
    """A negative control: tensors of a capture do not outlive the next replay of any graph."""
    backend = FakeGraphs()
    x = torch.ones(3)
    with torch.inference_mode():
        first, doubled = backend.capture(lambda: x * 2)
        second, tripled = backend.capture(lambda: x * 3)
        assert doubled.isnan().all()
        first.replay()
        assert doubled.tolist() == [2, 2, 2]
        second.replay()
        assert doubled.isnan().all() and tripled.tolist() == [3, 3, 3]
        pieces, total = backend.capture_pieces(lambda cut: _twice(x, cut))
        pieces.replay(lambda i: x.add_(1))
        assert total.tolist() == [4, 4, 4], "2 * 1 of the first piece, 2 of the second"
        with pytest.raises(AssertionError, match="between pieces"):
            pieces.replay(lambda i: first.replay())


def test_the_fake_tells_a_result_that_is_put_elsewhere() -> None:
    """A negative control: what runs between pieces must write where the capture reads."""
    backend = FakeGraphs()
    buffer = torch.zeros(3)

    def run(cut: Any, where: list[torch.Tensor], fresh: bool) -> torch.Tensor:
        where[:] = [torch.empty(3) if fresh else buffer]
        cut_in = buffer * 2
        cut()
        return cut_in + where[0]

    where: list[torch.Tensor] = []
    with torch.inference_mode():
        for fresh in (True, False):
            pieces, total = backend.capture_pieces(lambda cut, fresh=fresh: run(cut, where, fresh))  # type: ignore[misc]
            pieces.replay(lambda i: torch.zeros(3))  # a new tensor, which nobody reads
            assert bool(total.isnan().all()) == fresh
            pieces.replay(lambda i: where[0].fill_(5))
            assert total.tolist() == [5, 5, 5]
            buffer.zero_()


def test_replays_of_the_pretended_device_renew_all_that_a_capture_made() -> None:
    """Through forms of an operation that write into given memory, with several results, with those that are there in
    part, and where results are views: each as if the function ran again, in the memory of the capture."""
    given = torch.arange(6.0).view(2, 3)

    def run() -> tuple[torch.Tensor, ...]:
        largest, at = given.topk(2, dim=1)
        turned = given.t()  # a view of what was there: never made again
        parts = (turned + 1).chunk(2)  # views of what was made
        changed = torch.zeros(3, 2)
        changed += turned.clone()
        wide, nothing = given.double().square(), given[:0] * 2
        joined = torch.cat((largest, given.softmax(-1)), dim=1)
        return (
            largest,
            at,
            turned,
            *parts,
            changed,
            wide,
            nothing,
            joined,
            given.sum(1),
            given.to(torch.int32),
        )

    with torch.inference_mode():
        graph, results = FakeGraphs().capture(run)
        places = [x.data_ptr() for x in results]
        assert results[0].isnan().all() and results[-1].eq(torch.iinfo(torch.int32).max).all(), "not run yet"
        for step in range(3):
            given.copy_(torch.randn(2, 3, generator=torch.Generator().manual_seed(step)) * 5)
            graph.replay()
            for found, wanted in zip(results, run(), strict=True):
                assert torch.equal(found, wanted)
        assert [x.data_ptr() for x in results] == places


def _twice(x: torch.Tensor, cut: Any) -> torch.Tensor:
    doubled = x * 2
    cut()
    return doubled + x


@pytest.mark.slow
def test_pieces_on_a_pretended_device(tmp_path: Path) -> None:
    """With CUDA's graphs and pools, pinned memory and Triton's kernels as `fake_cuda` has them: memory that a capture
    freed is spoilt by graphs that may reuse it, and no copy is waited for. Whole passes stand between."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    from tests.fakes.fake_cuda import fake_cuda
    from tests.fakes.fake_cuda_triton import fake_launches

    from draftwise.kernels.triton.attention import TritonAttention
    from draftwise.kernels.triton.linear import LinearTiling
    from draftwise.kernels.triton.ops import TritonOps
    from draftwise.kernels.triton.tiling import Tiling

    def tokens(count: int) -> np.ndarray:
        return np.random.default_rng(count).integers(3, VOCAB, count).astype(np.int32)

    tables = [np.arange(12 * i, 12 * i + 12, dtype=np.int32) for i in range(3)]
    mixed = [
        RowInput(tokens(4), 30, tables[0]),
        RowInput(tokens(4), 5, tables[1], (-1, -1, 0)),
        RowInput(tokens(1), 40, tables[2]),
    ]
    chunk = [RowInput(tokens(5), 3, tables[1])]
    decodes = [RowInput(tokens(1), 8, table) for table in tables]
    folder = save_llama(tmp_path, seed=3)
    with fake_cuda() as device, fake_launches(device, "interpret"), torch.inference_mode():
        place = torch.device("cuda", 0)
        attention = TritonAttention(Tiling(block_n=16, partition=32))
        ops = TritonOps(torch.float32, place, attention, LinearTiling(16, 32, 32))
        model = load_model(folder, dtype=torch.float32, device=place, ops=ops)
        captures = Captures((Shape(3, 1, 48),), pieces=(12, 6))
        graphed = GraphedDecoder(model, captures, 4, CudaGraphs(place))
        kv, other = (KVStorage(model.kv_layout(), 36, 4, torch.float32, place, spare=True) for _ in range(2))
        for i in range(len(model.kv_layout())):
            values = torch.randn(kv.layer(i)[0].shape, generator=torch.Generator().manual_seed(i))
            kv.layer(i)[0].copy_(values)
            other.layer(i)[0].copy_(values)
        graphed.prepare(kv, (1,))
        for rows in (mixed, chunk, decodes, mixed):
            batch = build_step_input(rows, 4, graphed.inputs_on)
            last = (batch.attention.query_start_np[1:] - 1).tolist()
            device.sync_debug = "error"
            output, logits = graphed.forward_logits(batch, kv, last, (1,))
            device.sync_debug = "default"
            expected, wanted = model.forward_logits(build_step_input(rows, 4, place), other, last, (1,))
            for mine, theirs in (
                (logits, wanted),
                (output.hidden, expected.hidden),
                (output.captured[1], expected.captured[1]),
            ):
                assert torch.equal(mine.cpu(), theirs.cpu())
        assert (graphed.num_replays, graphed.num_piecewise) == (1, 3)
