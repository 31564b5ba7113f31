"""What a program has set for its own use of torch, and what its threads do at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from draftwise import lifetime
from draftwise.errors import DraftwiseError


@contextmanager
def own_device() -> Iterator[None]:
    """Tensors for which no device is named are on the CPU inside, whatever `torch.set_default_device` says.

    Native code is given their addresses: on another device, such as "meta", it would read memory that is not there."""
    if torch.get_default_device().type == "cpu":
        yield
        return
    with torch.device("cpu"):
        yield


def check_real(refusal: type[DraftwiseError]) -> None:
    """Raise ``refusal`` where torch makes tensors without memory, as in a `FakeTensorMode`: native code would read at
    addresses that are none. Not for every step: it takes a microsecond."""
    if type(torch.empty(0)) is not torch.Tensor:
        raise refusal(
            "torch makes tensors without data here, as in a FakeTensorMode: build and use engines outside of it"
        )


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Torch has so many threads inside, and afterwards as many as the program gave it: an engine's number is its own.
    Steps set theirs (`runner.own_threads`)."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Alone:
    """One thread at a time is in ``with alone.take():``, and the same thread as often as it likes.

    Engines are built in it: names that Transformers loads on first use are not there yet for a second thread, and the
    number of torch's threads is one for all."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def take(self) -> AbstractContextManager[object]:
        """The lock itself: Ctrl-C cannot come between its being taken and its being held (`engine.turns`)."""
        lifetime.survive_forks(self)
        return self._lock

    def after_fork_in_child(self) -> None:
        """A thread that is gone may hold the old lock."""
        self._lock = threading.RLock()


building = Alone()
