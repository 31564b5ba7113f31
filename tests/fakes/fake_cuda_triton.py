"""Launches of Triton kernels on a `FakeCuda`: each is checked as a device and Triton's own launcher would, then run in
Triton's interpreter, compiled for a GPU of compute capability 9.0, or nothing at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

from torch import Tensor
from triton.runtime.jit import KernelInterface

from draftwise.kernels import replaced
from draftwise.kernels.triton import attention, availability, linear
from draftwise.models import self_test
from draftwise.runner import step_checks
from tests.fakes.fake_cuda_device import FakeCuda
from tests.fakes.fake_cuda_tensor import CudaTensor, DeviceError

_OPTIONS = {"num_warps", "num_stages", "num_ctas", "enable_fp_fusion", "maxnreg"}
_STRIDED = {"keys", "uniforms"}
"""Vectors of which kernels are told the stride."""
_MOST = (2**31 - 1, 65535, 65535)
"""Programs along the three dimensions of a grid."""

How = Literal["interpret", "skip", "compile"]
Effect = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Launch:
    """What was launched, as Triton's compiler sees it: a type or a constant per argument."""

    kernel: str
    arguments: tuple[tuple[str, str], ...]


@dataclass
class Launches:
    """``seen``: each kind of launch with one grid of it; ``count``: of all launches."""

    how: How
    seen: dict[Launch, tuple[int, ...]] = field(default_factory=dict)
    count: int = 0
    effects: dict[str, Effect] = field(default_factory=dict)
    """By kernel: what to do, on the arguments by name, where kernels are not run."""
    compiled: Callable[[Launch, Any], None] = lambda launch, binary: None
    """Is told what Triton's compiler made."""

    def kernels(self) -> set[str]:
        return {launch.kernel for launch in self.seen}


def _launch(
    device: FakeCuda,
    launches: Launches,
    kernel: Any,
    grid: tuple[int, ...],
    args: Any,
    kwargs: dict[str, Any],
) -> None:
    name, names = kernel.fn.__name__, kernel.arg_names
    given = dict(zip(names, args, strict=False)) | kwargs
    options = {key: given.pop(key) for key in list(given) if key not in names}
    if not options.keys() <= _OPTIONS:
        raise DeviceError(f"{name}: keyword arguments {options.keys() - _OPTIONS} are none of Triton's")
    missing = [key for key in names if key not in given]
    if missing:
        raise DeviceError(f"{name}: dynamic_func() missing arguments {missing}")
    for size, most in zip(grid, _MOST, strict=False):
        if type(size) is not int or not 0 <= size <= most:
            raise DeviceError(f"{name}: a grid of {grid} programs cannot be launched")
    plain = _not_specialized(kernel)
    kinds = tuple(
        (key, kind_of(f"{name}: argument {key}", key, value, key in plain)) for key, value in given.items()
    )
    found = Launch(name, kinds)
    if launches.how == "compile" and found not in launches.seen:
        launches.compiled(found, kernel.run(**given, grid=grid, warmup=True, **options))
    launches.seen.setdefault(found, grid)
    launches.count += 1
    inner = {key: value.inner if isinstance(value, CudaTensor) else value for key, value in given.items()}
    effect = launches.effects.get(name)

    def run() -> None:
        if launches.how == "interpret":
            kernel.run(**inner, grid=grid, warmup=False)
        elif effect is not None:
            effect(inner | {"programs": grid[0]})

    run()
    recording = device.current()
    if recording is not None:
        recording.add(run, [value for value in given.values() if isinstance(value, CudaTensor)])


def _not_specialized(kernel: Any) -> set[str]:
    """Arguments of which the compiler is told nothing but their type."""
    said = getattr(kernel, "kwargs", None) or vars(
        kernel
    )  # of the interpreter's functions, of the compiler's
    return {*(said["do_not_specialize"] or ()), *(said["do_not_specialize_on_alignment"] or ())}


def kind_of(what: str, name: str, value: Any, plain: bool) -> str:
    """How Triton's compiler takes an argument: what it would compile anew for is something else. ``plain``: it is not
    told more than the type."""
    if name.isupper():
        return repr(value)
    if isinstance(value, Tensor):
        if not isinstance(value, CudaTensor):
            raise DeviceError(f"{what}: Pointer argument cannot be accessed from Triton (cpu tensor?)")
        last = value.stride()[-1] if value.dim() and value.shape[-1] > 1 else 1
        if last != 1 and not (value.dim() == 1 and name in _STRIDED):
            raise DeviceError(f"{what} has elements {last} apart")
        aligned = "" if plain or value.inner.data_ptr() % 16 else " aligned"
        return f"*{str(value.dtype).removeprefix('torch.')}{aligned}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise DeviceError(f"{what} is {value!r}")
    if isinstance(value, float):
        return "fp32"
    if not -(2**63) <= value < 2**63:
        raise DeviceError(f"{what} has more than 64 bits")
    if value == 1 and not plain:
        return "1"
    return ("i32" if -(2**31) <= value < 2**31 else "i64") + ("" if plain or value % 16 else " aligned")


class _Driver:
    """What Triton's launcher asks of a driver before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def _compile_for_no_device() -> None:
    from triton.runtime.driver import driver

    driver.set_active(_Driver())


@contextmanager
def fake_launches(device: FakeCuda, how: How, *, tested: bool = False) -> Iterator[Launches]:
    """All kernels are launched as said; models take them for a device's. ``tested``: engines compare them with torch
    first, which takes the interpreter seconds."""
    launches = Launches(how)
    device.garbage = how == "interpret"

    def kernel(self: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: _launch(device, launches, self, grid, args, kwargs)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(KernelInterface, "__getitem__", kernel))
        # who asks whether kernels are interpreted: on a device they are not, but in truth the products are
        asking = (availability,) if how == "interpret" else (availability, attention, linear)
        for module in asking:
            stack.enter_context(mock.patch.object(module, "interpreted", lambda: False))
        if not tested:
            for module in (self_test, step_checks):
                stack.enter_context(mock.patch.object(module, "TESTED", frozenset()))
        stack.enter_context(mock.patch.dict(replaced._replaced))
        if how == "compile":
            _compile_for_no_device()
        stack.enter_context(mock.patch.dict("os.environ"))
        os.environ.pop("DRAFTWISE_KERNELS", None)  # what a user has, who gets these kernels by default
        yield launches
