"""How many messages a request costs between the server's process and a replica's."""

from __future__ import annotations

import asyncio
import socket
from multiprocessing import Pipe
from typing import Any

import numpy as np
import pytest

from draftwise import AsyncLLM, SamplingParams
from draftwise.engine.processor import Numbers
from draftwise.fleet import wire
from draftwise.fleet.serving import _Serving
from draftwise.fleet.wire import Cache, Channel, Hello, News, Queued, Submit, TextOnly


def test_a_first_token_is_one_message_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else there is to say by then goes along: that the request is valid, and which blocks are cached now."""
    monkeypatch.setattr(wire, "_HOLD", 60.0)  # no machine is that slow
    llm = AsyncLLM(device="cpu", num_threads=1)
    mine, theirs = Pipe()
    batches: list[list[Any]] = []
    sent: list[int] = []

    async def main() -> None:
        ends = socket.socketpair()
        replica = asyncio.ensure_future(_Serving(llm, theirs).run(ends[1].detach()))
        arrived = asyncio.Event()

        def receive(batch: list[Any]) -> None:
            batches.append(batch)
            if any(isinstance(message, News) for message in batch):
                arrived.set()

        channel = Channel(ends[0], receive, lambda: None)
        flush = channel._flush
        monkeypatch.setattr(channel, "_flush", lambda: (sent.append(1), flush()))
        params = SamplingParams(max_tokens=1, temperature=0, output_kind="delta")
        ids_np = np.arange(5, 69, dtype=np.int32)
        channel.post(Submit(1, "one", None, ids_np, params, 0, None, None, Numbers(1, 0.0)))
        channel.post(TextOnly(1))
        await asyncio.wait_for(arrived.wait(), 60)
        channel.close()
        assert await asyncio.wait_for(replica, 60) == 0

    asyncio.run(main())
    assert isinstance(mine.recv(), Hello)
    mine.close()
    assert [[type(message) for message in batch] for batch in batches] == [[Queued, Cache, News]]
    assert batches[0][-1].output.finished
    assert len(sent) == 1
