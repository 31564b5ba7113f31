"""The pretended device refuses what a device refuses: planted faults of every kind that a rehearsal is to find."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the package triton is not installed")

from tests.fakes.fake_cuda import fake_cuda
from tests.fakes.fake_cuda_device import FakeCuda
from tests.fakes.fake_cuda_tensor import DEVICE, CudaTensor, DeviceError
from tests.fakes.fake_cuda_triton import fake_launches

from draftwise.graphs.backend import CudaGraphs
from draftwise.kernels.triton.device import rows as kernels


@pytest.fixture
def device() -> Iterator[FakeCuda]:
    with torch.inference_mode(), fake_cuda() as made:
        yield made


def test_numbers_are_those_of_the_host(device: FakeCuda) -> None:
    x = torch.arange(8, device="cuda").float().view(2, 4)
    assert isinstance(x, CudaTensor) and x.device == DEVICE and x.is_cuda
    assert (x[:, 1:3] + 1).tolist() == [[2.0, 3.0], [6.0, 7.0]]
    x[0, torch.tensor([1, 3], device="cuda")] = 9.0
    assert x.cpu().tolist() == [[0, 9, 2, 9], [4, 5, 6, 7]]
    assert float(x.sum()) == 42.0 and x.half().topk(1).values.tolist() == [[9.0], [7.0]]
    assert torch.zeros(2).to("cuda", torch.int64).dtype is torch.int64


def test_memory_is_counted(device: FakeCuda) -> None:
    free, total = torch.cuda.mem_get_info()
    x = torch.zeros(1 << 10, device="cuda")
    y = x.view(2, -1)[1]
    assert torch.cuda.mem_get_info() == (free - 4096, total)
    del x
    assert torch.cuda.memory_allocated() == 4096, "a view keeps it"
    del y
    assert torch.cuda.memory_allocated() == 0 and torch.cuda.max_memory_allocated() == 4096


FAULTS: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "a host's tensor among the device's": (lambda x: x + torch.ones(4), "same device"),
    "numpy": (lambda x: x.numpy(), "can't convert"),
    "a kernel given a host's tensor": (lambda x: gather(x, torch.zeros(1, dtype=torch.int64)), "cpu tensor"),
    "a kernel given a vector with gaps": (lambda x: gather(x, x.long()[::2]), "2 apart"),
    "a kernel given a number many times": (lambda x: gather(x, x.long()[:1].expand(3)), "0 apart"),
    "a kernel given what it does not know": (lambda x: gather(x, x.long(), SIZE=1), "keyword arguments"),
    "a kernel without an argument": (lambda x: kernels.gather_rows[(1,)](x, x.long()), "missing arguments"),
    "too many programs": (lambda x: gather(x, x.long(), grid=(1, 70000)), "cannot be launched"),
    "a capture on the default stream": (lambda x: torch.cuda.CUDAGraph().capture_begin(), "non-default"),
}


def gather(table: Tensor, index: Tensor, grid: tuple[int, ...] = (1,), **more: int) -> None:
    kernels.gather_rows[grid](table, index, table, 4, BLOCK=4, **more)


@pytest.mark.parametrize("what", FAULTS)
def test_a_device_refuses(device: FakeCuda, what: str) -> None:
    run, message = FAULTS[what]
    with fake_launches(device, "skip"), pytest.raises((RuntimeError, TypeError), match=message):
        run(torch.ones(4, device="cuda"))


IN_A_CAPTURE: dict[str, Callable[[Tensor], object]] = {
    "a number that is read": lambda x: float(x.sum()),
    "a copy to the host": lambda x: x.cpu(),
    "truth of a tensor": lambda x: bool((x > 0).any()),
    "a list as index": lambda x: x[[0, 1]],
    "truth values as index": lambda x: x[x > 0],
    "an index on the host": lambda x: x[torch.tensor([1])],
    "a tensor made of the host's numbers": lambda x: torch.tensor([1.0], device="cuda"),
    "a copy from the host": lambda x: x.copy_(torch.ones(4)),
    "a copy from the host that does not wait": lambda x: x.copy_(torch.ones(4), non_blocking=True),
    "waiting": lambda x: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("what", IN_A_CAPTURE)
def test_a_capture_refuses(device: FakeCuda, what: str) -> None:
    x = torch.ones(4, device="cuda")
    with pytest.raises(DeviceError, match="captur"):
        CudaGraphs(DEVICE).capture(lambda: IN_A_CAPTURE[what](x))
    assert device.recording is None


def test_a_replay_does_it_again_on_what_is_there_now(device: FakeCuda) -> None:
    x, out = torch.zeros(3, device="cuda"), torch.zeros(3, device="cuda")
    times = 0

    def run() -> Tensor:
        nonlocal times
        times += 1
        doubled = x * 2
        out.copy_(doubled + times)
        return doubled

    graph, doubled = CudaGraphs(DEVICE).capture(run)
    x.fill_(5)
    graph.replay()
    assert times == 2 and doubled.tolist() == [10.0] * 3 and out.tolist() == [12.0] * 3


def test_a_capture_copies_from_pinned_memory(device: FakeCuda) -> None:
    host, x = torch.zeros(2, pin_memory=True), torch.zeros(2, device="cuda")
    graph, _ = CudaGraphs(DEVICE).capture(lambda: x.copy_(host, non_blocking=True))
    torch.cuda.synchronize()
    host.fill_(3)
    graph.replay()
    assert x.tolist() == [3.0, 3.0]


def test_a_replay_needs_the_memory_from_outside(device: FakeCuda) -> None:
    kept: list[Tensor] = [torch.ones(4, device="cuda")]
    graph, _ = CudaGraphs(DEVICE).capture(lambda: kept[0] + 1)
    graph.replay()
    kept.clear()
    with pytest.raises(DeviceError, match="freed"):
        graph.replay()


def test_graphs_of_a_pool_write_over_what_others_have_freed(device: FakeCuda) -> None:
    x = torch.ones(4, device="cuda")
    backend = CudaGraphs(DEVICE)
    first, mine = backend.capture(lambda: x + 1)
    second, _ = backend.capture(lambda: x + 2)
    first.replay()
    second.replay()
    assert mine.tolist() == [2.0] * 4, "kept when the second was captured"
    seen = mine.inner  # type: ignore[attr-defined]
    del mine
    third, _ = backend.capture(lambda: x + 3)
    first.replay()
    third.replay()
    assert seen.isnan().all()


def test_what_nobody_wrote_is_no_number(device: FakeCuda) -> None:
    assert torch.empty(3, device="cuda").isnan().all().item()
    assert torch.ones(3, device="cuda").new_empty(2, dtype=torch.int32).tolist() == [10101, 10101]


def test_a_buffer_is_not_written_while_it_is_copied(device: FakeCuda) -> None:
    host, x = torch.zeros(2, pin_memory=True), torch.zeros(2, device="cuda")
    x.copy_(host, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    host.fill_(1)
    x.copy_(host, non_blocking=True)
    host.fill_(2)
    with pytest.raises(DeviceError, match="under way"):
        x.tolist()


def test_a_copy_to_pinned_memory_arrives_when_somebody_waits(device: FakeCuda) -> None:
    host, x = torch.zeros(2, pin_memory=True), torch.ones(2, device="cuda")
    host.copy_(x, non_blocking=True)
    x.fill_(2)
    assert host.isnan().all()
    torch.cuda.synchronize()
    assert host.tolist() == [1.0, 1.0]


def test_waits_are_counted_and_told(device: FakeCuda) -> None:
    x = torch.ones(2, device="cuda")
    before = device.waits
    torch.ones(2).to("cuda", non_blocking=True)
    torch.ones(2).pin_memory().to("cuda", non_blocking=True)
    assert device.waits == before
    torch.ones(2).to("cuda")
    x.tolist()
    assert device.waits == before + 2
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(DeviceError, match="synchronizing"):
        x.item() if x.numel() == 1 else x.tolist()
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x.sum().item()
        torch.cuda.synchronize()
    assert len(caught) == 1


def test_kernels_run_in_the_interpreter_and_are_captured(device: FakeCuda) -> None:
    table = torch.arange(12, device="cuda").view(3, 4)
    index, out = torch.tensor([2, 0], device="cuda"), torch.zeros(2, 4, dtype=torch.int64, device="cuda")

    def run() -> None:
        kernels.gather_rows[(2, 1)](table, index, out, 4, BLOCK=4)

    with fake_launches(device, "interpret") as launches:
        graph, _ = CudaGraphs(DEVICE).capture(run)
        assert out.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
        index.fill_(1)
        graph.replay()
    assert out.tolist() == [[4, 5, 6, 7]] * 2
    (launch,) = launches.seen
    kinds: dict[str, Any] = dict(launch.arguments)
    assert (
        launch.kernel == "gather_rows" and kinds["table"] == "*int64 aligned" and kinds["index"] == "*int64"
    )
    assert launches.count == 2, "a replay launches nothing"


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a true device")
