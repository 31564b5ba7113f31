"""The device of `fake_cuda`: its memory, its clock, and the operations it carries out."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from tests.fakes.fake_cuda_tensor import CudaTensor, DeviceError, Life, Memory, spoil
from tests.fakes.flash import flash_forward, mm_wide

TOTAL = 1 << 30
"""Bytes that the device says it has."""
_READS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::masked_select",
    "aten::unique", "aten::_unique2", "aten::repeat_interleave", "aten::bincount", "aten::nonzero_numpy",
}  # fmt: skip
_UNFILLED = {
    "aten::empty",
    "aten::empty_like",
    "aten::new_empty",
    "aten::empty_strided",
    "aten::new_empty_strided",
}


class FakeCuda:
    """The device. ``waits``: how often the host has waited for it; ``flashes``: calls of flash attention."""

    def __init__(self) -> None:
        self.waits = self.time = self.flashes = 0
        self.allocated = self.peak = 0
        self.recording: Any = None  # of `fake_cuda_graphs`
        self.recording_thread: int | None = None
        self._pinned: dict[int, Tensor] = {}  # by address of the storage
        self._under_way: list[tuple[int, Callable[[], None]]] = []  # copies, by number
        self._copies = 0
        self.garbage = True
        """Whether new memory holds what nobody expects; zeros if not, where kernels do nothing."""
        self.sync_debug = "default"  # torch.cuda.set_sync_debug_mode
        self.replays = 0
        self.reserved: dict[object, int] = {}  # bytes that pools of graphs keep

    # ------------------------------------------------------------------------------- memory

    def hold(self, inner: Tensor) -> Memory:
        nbytes = inner.untyped_storage().nbytes()
        memory = Memory(self.current())
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)
        if memory.graph is not None:
            memory.graph.peak = max(memory.graph.peak, self.allocated)
        weakref.finalize(memory, self._free, nbytes, memory.life)
        return memory

    def _free(self, nbytes: int, life: Life) -> None:
        self.allocated -= nbytes
        life.ended = self.tick()

    def tick(self) -> int:
        """The time, and on it goes."""
        self.time += 1
        return self.time

    def pin(self, host: Tensor) -> Tensor:
        self._pinned[host.untyped_storage().data_ptr()] = host
        return host

    def is_pinned(self, host: Tensor) -> bool:
        return host.untyped_storage().data_ptr() in self._pinned

    # ------------------------------------------------------------------------------- waiting

    def wait(self, what: str, until: int | None = None, *, hidden: bool = True) -> None:
        """The host waits for copies up to number ``until``, or for all. ``hidden``: what was called does not say so."""
        if self.current() is not None:
            raise DeviceError(f"operation not permitted when stream is capturing: {what}")
        self.waits += 1
        if hidden and self.sync_debug == "error":
            raise DeviceError(f"called a synchronizing CUDA operation: {what}")
        if hidden and self.sync_debug == "warn":
            warnings.warn(f"called a synchronizing CUDA operation: {what}", stacklevel=2)
        arrived = [finish for number, finish in self._under_way if until is None or number <= until]
        self._under_way = [] if until is None else [x for x in self._under_way if x[0] > until]
        with torch.inference_mode():  # as they were begun, maybe; a device does not care
            for finish in arrived:
                finish()

    def mark(self) -> int:
        """The number of the latest copy."""
        return self._copies

    def _start(self, finish: Callable[[], None]) -> None:
        self._copies += 1
        self._under_way.append((self._copies, finish))

    def current(self) -> Any:
        """The recording of this thread."""
        return self.recording if self.recording_thread == threading.get_ident() else None

    # ------------------------------------------------------------------------------- copies

    def to_host(self, x: CudaTensor, non_blocking: bool) -> Tensor:
        if non_blocking:
            host = self.pin(torch.empty_like(x.inner))
            self.copy(host, x, True)
            return host
        self.wait("copy to the host")
        return x.inner.clone()

    def to_device(self, host: Tensor, non_blocking: bool, dtype: torch.dtype | None = None) -> CudaTensor:
        inner = torch.empty_like(host, dtype=dtype or host.dtype)
        made = CudaTensor(inner, self.hold(inner))
        self.copy(made, host, non_blocking)
        return made

    def convert(self, x: CudaTensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        """`Tensor.to`."""
        given = dict(kwargs)
        for value in args:
            if isinstance(value, torch.dtype):
                given["dtype"] = value
            elif isinstance(value, bool):
                given.setdefault("non_blocking", value)
            elif isinstance(value, Tensor):
                given |= {"dtype": value.dtype, "device": value.device}
            elif value is not None:
                given["device"] = value
        device, dtype = given.get("device"), given.get("dtype") or x.dtype
        if device is not None and torch.device(device).type == "cpu":
            host = self.to_host(x, bool(given.get("non_blocking")))
            return host.to(dtype)
        if dtype is x.dtype and not given.get("copy"):
            return x
        found = self.run("to", lambda inner: inner.to(dtype, copy=True), (x,), {})
        assert isinstance(found, Tensor)
        return found

    def copy_(self, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """`Tensor.copy_`."""
        if isinstance(to, CudaTensor) == isinstance(source, CudaTensor):
            self.run("aten::copy_", lambda a, b: a.copy_(b), (to, source), {}, mutates=True)
        else:
            self.copy(to, source, non_blocking)
        return to

    def copy(self, to: Tensor, source: Tensor, non_blocking: bool) -> None:
        """Between host and device."""
        recording = self.current()
        host = source if isinstance(to, CudaTensor) else to
        pinned = self.is_pinned(host)
        number = host is source and host.dim() == 0  # passed along with the launch
        if recording is not None:
            if not pinned and not number:
                raise DeviceError("a copy from or to memory that is not pinned cannot be captured")
            recording.add(
                lambda: self._copy(to, source), [x for x in (to, source) if isinstance(x, CudaTensor)]
            )
        self._copy(to, source)
        if recording is None and not number and (not non_blocking or (not pinned and host is to)):
            self.wait("copy between host and device")

    def _copy(self, to: Tensor, source: Tensor) -> None:
        if isinstance(to, CudaTensor):
            assert not isinstance(source, CudaTensor)
            to.inner.copy_(source)
            if self.is_pinned(source):
                before = source.clone()

                def compare() -> None:
                    if not _equal(before, source):
                        raise DeviceError("pinned memory was written while a copy from it was under way")

                self._start(compare)
        else:
            assert isinstance(source, CudaTensor)
            value = source.inner.clone()
            if not self.is_pinned(to):
                to.copy_(value)
                return
            spoil(to)
            self._start(lambda: _set(to, value))

    # ------------------------------------------------------------------------------- operations

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operation of aten with a tensor of the device, or that makes one."""
        name: str = func._schema.name
        if name == "aten::copy_":
            return self.copy_(
                args[0], args[1], bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
            )
        if name == "aten::_to_copy" and not isinstance(args[0], CudaTensor):
            return self.to_device(args[0], bool(kwargs.get("non_blocking")), kwargs.get("dtype"))
        if name in ("aten::_to_copy", "aten::to") and str(kwargs.get("device")) == "cpu":
            return self.to_host(args[0], bool(kwargs.get("non_blocking")))
        if name in _READS:
            self.wait(name)
        if name == "aten::_flash_attention_forward":  # has no CPU form
            self.flashes += 1
            return (self.run(name, flash_forward, args, kwargs),)
        if name == "aten::mm" and func._overloadname in ("dtype", "dtype_out"):  # has no CPU form
            return self.run(name, mm_wide, args, kwargs, mutates="out" in kwargs)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": None if kwargs["device"] is None else torch.device("cpu")}
        if kwargs.get("pin_memory"):
            raise DeviceError("only a host's memory is pinned")
        return self.run(name, func, args, kwargs, mutates=func._schema.is_mutable)

    def run(
        self, name: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], mutates: bool = False
    ) -> Any:
        """Call it on the numbers."""
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        for x in given:
            if not isinstance(x, CudaTensor) and x.dim() > 0:
                if name == "aten::index" and x is not args[0]:  # an index, which torch copies to the device
                    self.copy(CudaTensor(torch.empty_like(x), Memory(None)), x, False)
                    continue
                raise DeviceError(
                    f"Expected all tensors to be on the same device, but got at least two, cuda:0 and cpu! ({name})"
                )
            if name.startswith("aten::index") and x is not args[0] and x.dtype in (torch.bool, torch.uint8):
                self.wait("an index of truth values")
        wrapped = {id(x.inner): x for x in given if isinstance(x, CudaTensor)}
        inner_args, inner_kwargs = tree_map(_inner, args), tree_map(_inner, kwargs)
        out = func(*inner_args, **inner_kwargs)
        roots = {x.inner.untyped_storage().data_ptr(): x.memory for x in wrapped.values() if x.inner.numel()}
        made: list[tuple[Tensor, Life]] = []

        def wrap(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            same = wrapped.get(id(x))
            if same is not None:
                return same
            memory = roots.get(x.untyped_storage().data_ptr()) if x.numel() else None
            if memory is not None and torch.is_inference_mode_enabled() and not args[0].is_inference():
                with torch.inference_mode(False):  # a view of what was made outside
                    return CudaTensor(x, memory)
            if memory is None:
                memory = self.hold(x)
                made.append((x, memory.life))
                if name in _UNFILLED and self.garbage:
                    spoil(x)
                elif name in _UNFILLED:
                    x.zero_()
            return CudaTensor(x, memory)

        result = tree_map(wrap, out)
        recording = self.current()
        if recording is not None and (mutates or made) and name not in _UNFILLED:

            def again() -> None:
                new = func(*inner_args, **inner_kwargs)
                if made:
                    for old, x in zip(tree_flatten(out)[0], tree_flatten(new)[0], strict=True):
                        if isinstance(old, Tensor) and old is not x:
                            old.copy_(x)

            recording.add(again, list(wrapped.values()))
        if recording is not None:
            recording.made += made
        return result

    def index(self, x: CudaTensor, index: Any) -> Any:
        """``x[index]``."""
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, (list, range)) for part in parts):
            self.wait("a list as index, which is copied to the device")
        return self.run("aten::index", lambda inner, at: inner[at], (x, tuple(parts)), {})

    def put(self, x: CudaTensor, index: Any, value: Any) -> None:
        """``x[index] = value``."""
        parts = index if isinstance(index, tuple) else (index,)
        if isinstance(value, Tensor) and not isinstance(value, CudaTensor) and value.dim():
            value = self.to_device(value, False)
        if any(isinstance(part, (list, range)) for part in parts):
            self.wait("a list as index, which is copied to the device")

        def write(inner: Tensor, at: Any, value: Any) -> None:
            inner[at] = value

        self.run("aten::index_put_", write, (x, tuple(parts), value), {}, mutates=True)


def _inner(x: Any) -> Any:
    return x.inner if isinstance(x, CudaTensor) else x


def _set(to: Tensor, value: Tensor) -> None:
    to.copy_(value)


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
