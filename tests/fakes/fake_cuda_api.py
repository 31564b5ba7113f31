"""``torch.cuda`` of a `FakeCuda`: streams, events, graphs, memory; and those functions of torch that look for a device
before they call an operation that could be caught."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import _device_constructors

from tests.fakes.fake_cuda_device import TOTAL, FakeCuda
from tests.fakes.fake_cuda_tensor import DEVICE, CudaTensor, DeviceError, Life, spoil


class Recording:
    """What a capture wrote down: operations, and memory that was made in it. What of that was freed again is anybody's
    among the graphs of a pool."""

    def __init__(self, before: int, begun: int) -> None:
        self.operations: list[tuple[Callable[[], object], list[Life]]] = []
        self.made: list[tuple[Tensor, Life]] = []
        self.before = self.peak = before
        self.begun = begun

    def add(self, again: Callable[[], object], tensors: list[CudaTensor]) -> None:
        """``tensors``: what it reads and writes on the device."""
        outside = [x.memory.life for x in tensors if x.memory.graph is None]
        self.operations.append((again, outside))

    def spoil(self, graph: Recording) -> None:
        """What a graph of the same pool may write over: what was free when it was captured, and its own."""
        for x, life in self.made:
            if life.ended is not None and (life.ended < graph.begun or graph is self):
                spoil(x)


class Streams(threading.local):
    current: Any = None


class Api:
    """One device's classes and functions, by their names in ``torch.cuda``."""

    def __init__(self, device: FakeCuda) -> None:
        api, self.device = self, device
        self.streams = Streams()
        self.pools: dict[object, list[Recording]] = {}

        class Stream:
            cuda_stream = 1

            def __init__(self, device: object = None, priority: int = 0) -> None:
                self.device = DEVICE

            def wait_stream(self, other: Any) -> None:
                assert isinstance(other, Stream)

            def wait_event(self, event: Any) -> None:
                assert isinstance(event, Event)

            def record_event(self, event: Any = None) -> Any:
                event = event or Event()
                event.record(self)
                return event

            def synchronize(self) -> None:
                device.wait("stream", hidden=False)

        class Event:
            def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
                self._timing, self._at = enable_timing, None

            def record(self, stream: Any = None) -> None:
                assert stream is None or isinstance(stream, Stream)
                self._at = device.mark()

            def wait(self, stream: Any = None) -> None:
                return

            def query(self) -> bool:
                return True

            def synchronize(self) -> None:
                if self._at is not None:
                    device.wait("event", self._at, hidden=False)

            def elapsed_time(self, other: Any) -> float:
                if not (self._timing and other._timing):
                    raise ValueError("Both events must be created with argument 'enable_timing=True'.")
                return 1.0

        class CUDAGraph:
            def __init__(self, keep_graph: bool = False) -> None:
                self._recording: Recording | None = None
                self._pool: object = None

            def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
                if device.recording is not None:
                    raise DeviceError("a capture is under way already")
                if api.streams.current is None:
                    raise DeviceError("CUDA graphs must be captured on a non-default stream")
                self._pool = object() if pool is None else pool
                self._recording = device.recording = Recording(device.allocated, device.tick())
                device.recording_thread = threading.get_ident()

            def capture_end(self) -> None:
                recording = device.recording
                if recording is None or recording is not self._recording:
                    raise DeviceError("no capture of this graph is under way")
                device.recording = device.recording_thread = None
                api.pools.setdefault(self._pool, []).append(recording)
                most = max(device.reserved.get(self._pool, 0), recording.peak - recording.before)
                device.reserved[self._pool] = most

            def replay(self) -> None:
                if device.recording is not None and device.recording_thread == threading.get_ident():
                    raise DeviceError("a replay cannot be captured")
                if self._recording is None:
                    raise DeviceError("nothing was captured")
                if device.garbage:
                    for recording in api.pools[self._pool]:
                        recording.spoil(self._recording)
                with torch.inference_mode():
                    for again, outside in self._recording.operations:
                        if any(life.ended is not None for life in outside):
                            raise DeviceError("a replay uses memory from outside the graph that was freed")
                        again()
                device.replays += 1

            def pool(self) -> object:
                return self._pool

            def reset(self) -> None:
                self._recording = None

        self.Stream, self.Event, self.CUDAGraph = Stream, Event, CUDAGraph
        self.default = Stream()

    def current_stream(self, device: object = None) -> Any:
        return self.streams.current or self.default

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.streams.current = self.streams.current, None if stream is self.default else stream
        try:
            yield
        finally:
            self.streams.current = before

    @contextmanager
    def graph(
        self, graph: Any, pool: object = None, stream: Any = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        self.synchronize()
        with self.stream(stream or self.Stream()):
            graph.capture_begin(pool, capture_error_mode=capture_error_mode)
            try:
                yield
            finally:
                graph.capture_end()

    @contextmanager
    def use_device(self, device: object) -> Iterator[None]:
        assert device in (DEVICE, torch.device("cuda"), 0)
        yield

    def synchronize(self, device: object = None) -> None:
        self.device.wait("device", hidden=False)

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        return TOTAL - self.device.allocated - sum(self.device.reserved.values()), TOTAL

    def reset_peak_memory_stats(self, device: object = None) -> None:
        self.device.peak = self.device.allocated

    def set_sync_debug_mode(self, mode: str) -> None:
        self.device.sync_debug = mode

    def set_device(self, device: object) -> None:
        assert torch.device(device).index in (None, 0)  # type: ignore[arg-type]


def patches(device: FakeCuda) -> list[tuple[Any, str, Any]]:
    """What to replace: owner, name, value."""
    api = Api(device)
    properties = SimpleNamespace(
        name="none at all", total_memory=TOTAL, major=9, minor=0, multi_processor_count=132
    )
    cuda: dict[str, Any] = {
        "is_available": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": api.set_device,
        "device": api.use_device,
        "Stream": api.Stream,
        "stream": api.stream,
        "current_stream": api.current_stream,
        "default_stream": lambda device=None: api.default,
        "Event": api.Event,
        "CUDAGraph": api.CUDAGraph,
        "graph": api.graph,
        "graph_pool_handle": object,
        "synchronize": api.synchronize,
        "mem_get_info": api.mem_get_info,
        "memory_allocated": lambda at=None: device.allocated,
        "memory_reserved": lambda at=None: device.allocated + sum(device.reserved.values()),
        "max_memory_allocated": lambda at=None: device.peak,
        "max_memory_reserved": lambda at=None: device.peak + sum(device.reserved.values()),
        "reset_peak_memory_stats": api.reset_peak_memory_stats,
        "empty_cache": lambda: None,
        "get_device_capability": lambda at=None: (9, 0),
        "get_device_properties": lambda at=None: properties,
        "get_device_name": lambda at=None: properties.name,
        "set_sync_debug_mode": api.set_sync_debug_mode,
    }
    changes = [(torch.cuda, name, value) for name, value in cuda.items()]
    changes.append((torch.backends.cuda, "is_flash_attention_available", lambda: True))
    return changes + _functions(device)


def _functions(device: FakeCuda) -> list[tuple[Any, str, Any]]:
    _device_constructors()  # kept by torch: the true ones, not what stands for them here
    to, copy, is_pinned = Tensor.to, Tensor.copy_, Tensor.is_pinned
    makers = {name: getattr(torch, name) for name in ("tensor", "as_tensor", "zeros", "empty", "Generator")}

    def move(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        named = [kwargs.get("device"), *(a for a in args if isinstance(a, (str, torch.device)))]
        if not any(_on_device(place) for place in named):
            return to(x, *args, **kwargs)
        dtype = next((a for a in args if isinstance(a, torch.dtype)), kwargs.get("dtype"))
        waits = not (kwargs.get("non_blocking") or any(a is True for a in args))
        return device.to_device(x, not waits, dtype)

    def made(maker: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(*args: Any, **kwargs: Any) -> Tensor:
            place = kwargs.get("device")
            if place is None and torch._C._len_torch_function_stack():
                place = torch.get_default_device()
            if not _on_device(place):
                if kwargs.pop("pin_memory", False):
                    return device.pin(maker(*args, **kwargs))
                return maker(*args, **kwargs)
            if maker in (makers["zeros"], makers["empty"]):
                return maker(*args, **{**kwargs, "device": DEVICE})
            if args and isinstance(args[0], CudaTensor):
                return args[0]
            return device.to_device(maker(*args, **{**kwargs, "device": "cpu"}), False)

        return make

    class Generator(makers["Generator"]):  # type: ignore[misc]
        def __new__(cls, place: Any = "cpu") -> Any:
            return makers["Generator"]("cpu")

    def pin(x: Tensor, *args: Any) -> Tensor:
        if isinstance(x, CudaTensor):
            raise DeviceError("cannot pin 'torch.cuda.Tensor': only dense CPU tensors can be pinned")
        return device.pin(x.clone())

    def copied(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if isinstance(x, CudaTensor) or isinstance(source, CudaTensor):
            return device.copy_(x, source, non_blocking)
        return copy(x, source, non_blocking)

    return [
        (Tensor, "to", move),
        (Tensor, "copy_", copied),
        (Tensor, "cuda", lambda x, *args, **kwargs: move(x, DEVICE, **kwargs)),
        (Tensor, "pin_memory", pin),
        (Tensor, "is_pinned", lambda x: device.is_pinned(x) or is_pinned(x)),
        *((torch, name, made(makers[name])) for name in ("tensor", "as_tensor", "zeros", "empty")),
        (torch, "Generator", Generator),
    ]


def _on_device(place: Any) -> bool:
    return place is not None and torch.device(place).type == "cuda"
