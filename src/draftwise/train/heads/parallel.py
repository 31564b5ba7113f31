"""Data parallel training: several processes learn from a part of each step's texts each, and stay equal.

Gradients are added up by torch's own DistributedDataParallel; what else processes have to agree on (the weight of all
rows, the clock that a time budget goes by, whether somebody pressed Ctrl-C) goes through `Ranks`. Texts are dealt out
so that N processes learn what one process with N times the batch size learns, to rounding.

Processes come from torchrun (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT`` in the environment), or are
started here (`with_ranks`).
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from inspect import signature
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from draftwise import lifetime
from draftwise.errors import ConfigError, DraftwiseError

from .child import be_child

T = TypeVar("T")

_SYNC = "forward_sync_buffers"
if _SYNC not in signature(DistributedDataParallel).parameters:  # before torch 2.13
    _SYNC = "broadcast_buffers"
"""Whether every pass sends buffers around; ours are the target's, the same everywhere."""
_PATIENCE = timedelta(hours=24)
"""How long a process waits for the others: the first one writes text and measures meanwhile."""
_NOTICED = 5.0
"""Seconds in which the end of another process has been noticed."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that train together."""

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def first(self) -> bool:
        """Whether it writes, measures and reports."""
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Each value, added up over all processes."""
        if self.world == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return [float(x) for x in total]

    def wait(self) -> None:
        """Go on when all processes are here."""
        self.sum(0.0)

    def first_says(self, value: float) -> float:
        """The first process's value."""
        return self.sum(value if self.first else 0.0)[0]

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module whose backward passes average gradients over processes; all begin with the first one's weights."""
        if self.world == 1:
            return module
        ids = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=ids, **{_SYNC: False})  # type: ignore[arg-type]

    def hold(self, module: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Around a forward and a backward pass: gradients are averaged in the ``last`` one of a step."""
        if last or not isinstance(module, DistributedDataParallel):
            return nullcontext()
        return module.no_sync()


class Learning(nn.Module):
    """A head's loss as a module's forward pass, as DistributedDataParallel wants it."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, *args: object) -> tuple[Tensor, Tensor, Tensor]:
        """As the head's ``loss``."""
        return self.head.loss(*args)  # type: ignore[operator, no-any-return]


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """The device that ``--device`` names; ``cuda`` alone is the process's own.

    Raises:
        ConfigError: there is no such device.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"--device {name!r} is not a device of torch: {str(error).splitlines()[0]}"
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name!r}: training runs on cpu or cuda")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        index = local_rank if device.index is None else device.index
        if index >= count:
            raise ConfigError(
                f"--device {name!r}: there are {count} CUDA devices, device {index} is asked for"
            )
        return torch.device("cuda", index)
    return device


def _meeting(folder: Path) -> str:
    """A URL of a file there, as torch reads it: quoted on Windows alone. Elsewhere a folder with a space in its name
    would be another one, in which everybody waits."""
    file = folder / "meeting"
    return file.as_uri() if sys.platform == "win32" else f"file://{file}"


def _folder_of(meeting: str) -> Path:
    """The folder of a URL of `_meeting`."""
    path = urlsplit(meeting).path
    return Path(url2pathname(path) if sys.platform == "win32" else path).parent


def _ready(folder: Path, rank: int) -> Path:
    return folder / f"ready-{rank}"


def _await(started: Sequence[BaseProcess], folder: Path) -> None:
    """Wait until all processes are about to join. Joining itself would wait for one that ended before for a day, deaf
    to signals.

    Raises:
        DraftwiseError: one has ended.
    """
    while waiting := [i for i in range(1, len(started) + 1) if not _ready(folder, i).exists()]:
        for rank in waiting:
            if started[rank - 1].exitcode is not None:
                raise DraftwiseError(
                    f"training process {rank} of {len(started) + 1} failed; its message is above"
                )
        time.sleep(0.02)


def _failed(started: Sequence[BaseProcess]) -> int | None:
    """The number of a process that failed, once that can be seen; None: all run."""
    deadline = time.monotonic() + _NOTICED
    while time.monotonic() < deadline:
        for number, process in enumerate(started, 1):
            if process.exitcode not in (None, 0):
                return number
        time.sleep(0.02)
    return None


@contextmanager
def joined(device: str, rank: int, world: int, address: str) -> Iterator[Ranks]:
    """Be one of the processes: ``address`` is torch's ``init_method``."""
    local = int(os.environ.get("LOCAL_RANK", rank))
    chosen = choose_device(device, local)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if rank and address.startswith("file:"):
        _ready(_folder_of(address), rank).touch()
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=world, timeout=_PATIENCE)
    try:
        yield Ranks(rank, world, chosen)
    finally:
        dist.destroy_process_group()


def _told(name: str, value: str, least: int) -> int:
    """A number that torchrun leaves in the environment. Raises ConfigError if it is none."""
    if not value.isdecimal() or int(value) < least:
        raise ConfigError(
            f"{name}={value}: expected an integer >= {least} in the environment, as torchrun sets it"
        )
    return int(value)


def with_ranks(size: int, device: str, run: Callable[[Ranks], T], others: Callable[[int, str], None]) -> T:
    """Run as one of the processes that torchrun started, or start ``size`` of them, or run alone.

    Args:
        run: what a process does; the first one's answer is returned.
        others: does the same in a process of number ``rank`` that was started here; it can be pickled. It gets what
            `joined` needs beside: its rank, and the address.

    Raises:
        ConfigError: ``size`` is not what torchrun says, or there is no such device.
        DraftwiseError: a process that was started here failed.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        world = _told("WORLD_SIZE", os.environ["WORLD_SIZE"], 1)
        rank = _told("RANK", os.environ["RANK"], 0)
        if size not in (1, world):
            raise ConfigError(f"--data-parallel-size {size}, but WORLD_SIZE is {world}")
        if world > 1:
            with joined(device, rank, world, "env://") as ranks:
                return run(ranks)
    if size == 1:
        return run(Ranks(device=choose_device(device)))
    choose_device(device, size - 1)
    context = torch.multiprocessing.get_context("spawn")
    with lifetime.passing_folder("draftwise-train-") as folder:
        address = _meeting(Path(folder))
        work = pickle.dumps(others)
        started = [context.Process(target=be_child, args=(work, rank, address)) for rank in range(1, size)]
        try:
            for process in started:
                process.start()
            _await(started, Path(folder))
            with joined(device, 0, size, address) as ranks:
                try:
                    answer = run(ranks)
                except RuntimeError as error:  # perhaps a collective that lost its partner
                    dead = _failed(started)
                    if dead is None:
                        raise
                    raise DraftwiseError(
                        f"training process {dead} of {size} failed; its message is above"
                    ) from error
            for process in started:
                process.join(timeout=30)
            return answer
        finally:  # after an error nobody needs them: they would wait for this process
            for process in started:
                if process.is_alive():
                    process.kill()
