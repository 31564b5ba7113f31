"""Ranks as threads of one process."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from draftwise.kernels.cpu.library import native_library
from draftwise.kernels.cpu.ranks import SharedRanks, shared_bytes
from draftwise.kernels.ranks import Part, Ranks
from tests.native import native_or_skip

T = TypeVar("T")


def on_ranks(size: int, work: Callable[[Ranks], T], seconds: float = 30.0) -> list[T]:
    """What ``work`` answers on each of ``size`` ranks that share memory; raises what one of them raised."""
    native_or_skip()
    library = native_library()
    assert library is not None
    memory = mmap.mmap(-1, shared_bytes(size))
    answers: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        # Ranks of one process would share a pool of threads, and one that waits for another would keep it from that.
        torch.set_num_threads(1)
        try:
            answers[rank] = work(SharedRanks(library, memory, Part(rank, size), seconds))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [answers[rank] for rank in range(size)]
