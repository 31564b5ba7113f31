"""Ranks that sockets connect add up and gather what ranks that share memory do, and notice who is missing."""

from __future__ import annotations

import mmap
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from tests.fakes.ranks import on_ranks
from tests.native import native_or_skip

from draftwise.cluster.sockets import SECRET_BYTES, accept, connect, has_ended, listen
from draftwise.kernels.cpu.library import native_library
from draftwise.kernels.cpu.ranks import PIECE, SharedRanks, shared_bytes
from draftwise.kernels.ranks import Part, Ranks

T = TypeVar("T")


def on_machines(machines: list[int], work: Callable[[Ranks], T], seconds: float = 30.0) -> list[T]:
    """What ``work`` answers on ranks of which those with the same number share memory, as threads of one process."""
    native_or_skip()
    library = native_library()
    assert library is not None
    size = len(machines)
    memory = {machine: mmap.mmap(-1, shared_bytes(size)) for machine in machines}
    ends: dict[tuple[int, int], socket.socket] = {}
    for a in range(size):
        for b in range(a):
            if machines[a] != machines[b]:
                ends[a, b], ends[b, a] = socket.socketpair()
    answers: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        own = [ends[rank, r].fileno() if (rank, r) in ends else -1 for r in range(size)]
        try:
            ranks = SharedRanks(library, memory[machines[rank]], Part(rank, size), seconds, own)
            answers[rank] = work(ranks)
        except BaseException as error:
            errors.append(error)
        for r in range(size):
            if (rank, r) in ends:
                ends[rank, r].close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [answers[rank] for rank in range(size)]


def exchanged(ranks: Ranks) -> list[object]:
    """Sums, rows and bytes of all kinds of sizes; the last ones take several pieces."""
    mine = torch.Generator().manual_seed(ranks.part.rank)
    found: list[object] = []
    for count in (1, 33, 1000, PIECE // 4 + 7, 3 * PIECE // 4 + 1):
        for dtype in (torch.float32, torch.bfloat16):
            found.append(ranks.sum(torch.randn(count, generator=mine).to(dtype)))
    for rows, total in ((1, 10), (3, 50), (5, 200_001)):
        step = -(-total // ranks.part.size)
        own = max(0, min(step, total - ranks.part.rank * step))
        found.append(ranks.gather(torch.randn(rows, own, generator=mine), total))
    found.append(ranks.share(bytes([ranks.part.rank]) * (1000 + ranks.part.rank)))
    found.append(ranks.told([ranks.part.rank, "text"]))
    return found


def same(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return left == right


@pytest.mark.parametrize("machines", [[0, 1], [0, 1, 2], [0, 0, 1], [0, 1, 0, 1]], ids=str)
def test_sums_between_machines_are_those_of_one(machines: list[int]) -> None:
    expected = on_ranks(len(machines), exchanged)
    for found in on_machines(machines, exchanged):
        assert all(same(a, b) for a, b in zip(found, expected[0], strict=True))


def test_a_rank_that_has_gone_ends_the_others_at_once() -> None:
    def work(ranks: Ranks) -> float:
        ranks.sum(torch.ones(4))
        if ranks.part.rank == 2:
            return 0.0
        begun = time.monotonic()
        with pytest.raises(OSError):
            ranks.sum(torch.ones(4))
        with pytest.raises(OSError):
            ranks.sum(torch.ones(4))
        return time.monotonic() - begun

    assert max(on_machines([0, 0, 1], work)) < 25.0  # of a patience of 30


def test_a_rank_that_says_nothing_is_waited_for_no_longer_than_said() -> None:
    over = threading.Event()

    def work(ranks: Ranks) -> None:
        if ranks.part.rank == 1:
            over.wait(20)
            return
        with pytest.raises(OSError):
            ranks.sum(torch.ones(4))
        over.set()

    on_machines([0, 1], work, seconds=0.3)
    assert over.is_set()


def test_strangers_are_not_taken_for_ranks() -> None:
    secret = bytes(range(SECRET_BYTES))
    with listen("127.0.0.1") as listener:
        address = ("127.0.0.1", listener.getsockname()[1])
        strangers = [connect(address, bytes(SECRET_BYTES), 1, 5.0), connect(address, secret, 7, 5.0)]
        strangers.append(socket.create_connection(address))
        strangers[-1].close()  # says nothing
        ours = [connect(address, secret, rank, 5.0) for rank in (2, 1)]
        twice = connect(address, secret, 2, 5.0)
        found = accept(listener, secret, {1, 2}, 5.0)
        assert found.keys() == {1, 2}
        assert not has_ended(ours[0].fileno())
        found[2].close()
        assert ours[0].recv(1) == b"" and has_ended(ours[0].fileno())
        with pytest.raises(TimeoutError):
            accept(listener, secret, {3}, 0.05)
        for one in [*strangers, *ours, twice, *found.values()]:
            one.close()
