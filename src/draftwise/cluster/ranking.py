"""A rank's own process: it joins the others, builds its part of the model, and carries out orders until it is told to
end.

Whoever starts it has said before whom it belongs to (`cluster.children.belong_to`): what is imported here takes long.
"""

from __future__ import annotations

import faulthandler
import logging
import mmap
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from draftwise.cluster.messages import Answer, Order, Start, digest, receive, send
from draftwise.config.registry import register_method
from draftwise.errors import ConfigError, ModelLoadError
from draftwise.kernels.ranks import Part, Ranks, join_torch
from draftwise.runner.executor import Executor

Work = Callable[[Any, Ranks], tuple[Executor, Any]]
"""From the setting of a `Start` and the ranks to what executes, and what the host wants to know of it."""


def run_rank(channel_fd: int, work: Work) -> int:
    """Be a rank; returns the exit code. ``channel_fd``: file descriptor of a socket to the host."""
    faulthandler.enable()
    channel = Connection(channel_fd)
    start: Start = receive(channel)
    logging.getLogger("draftwise").setLevel(start.log_level if start.rank == 0 else logging.ERROR)
    try:
        for name, path in start.methods:
            register_method(name, path)
        executor, facts = work(start.setting, _join(start))
    except BaseException as error:
        send(channel, (_failed(0, error), None))
        return 1
    send(channel, (Answer(0), facts if start.rank == 0 else None))
    try:
        with torch.inference_mode():
            _serve(channel, executor, first=start.rank == 0)
    except (EOFError, OSError):  # the host is gone
        return 1
    return 0


def _serve(channel: Connection, executor: Executor, *, first: bool) -> None:
    while True:
        order: Order = receive(channel)
        if order.call == "close":
            executor.close()
            return
        try:
            answer = Answer(order.number)
            if order.call == "execute":
                assert order.plan is not None
                result = executor.execute(order.plan)
                answer = Answer(order.number, digest(result.rows), result if first else None)
            elif order.call == "check_adapter":
                assert order.adapter is not None
                executor.check_adapter(order.adapter)
            elif order.call == "load_adapter":
                assert order.adapter is not None
                executor.load_adapter(order.slot, order.adapter)
            elif order.call == "drop_adapter":
                executor.drop_adapter(order.slot)
            else:
                executor.forget()
        except (ConfigError, ModelLoadError) as error:
            answer = Answer(order.number, refusal=error)
        except Exception as error:
            send(channel, _failed(order.number, error))
            return
        send(channel, answer)


def _failed(number: int, error: BaseException) -> Answer:
    trace = traceback.format_exc()
    print(trace, file=sys.stderr, flush=True)
    try:
        return Answer(number, error=error if _survives(error) else RuntimeError(repr(error)), trace=trace)
    except Exception:
        return Answer(number, error=RuntimeError(f"{type(error).__name__}"), trace=trace)


def _survives(error: BaseException) -> bool:
    """Whether an exception can be pickled, and be made again."""
    import pickle

    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True


def _join(start: Start) -> Ranks:
    part = Part(start.rank, start.size)
    if start.memory is None:
        assert start.meeting is not None
        return join_torch(part, start.meeting, start.seconds, torch.device(start.device))
    from draftwise.kernels.cpu.library import native_library
    from draftwise.kernels.cpu.ranks import SharedRanks, shared_bytes

    library = native_library()
    assert library is not None, "the host has looked"
    memory = mmap.mmap(start.memory, shared_bytes(start.size))
    return SharedRanks(library, memory, part, start.seconds, start.sockets)
