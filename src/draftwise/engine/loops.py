"""The event loop that an asynchronous call runs in."""

from __future__ import annotations

import asyncio

from draftwise.errors import RequestError


def running_loop() -> asyncio.AbstractEventLoop:
    """The running event loop of asyncio. Raises RequestError if there is none in this thread."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise RequestError(
            "AsyncLLM needs a running event loop of asyncio, and this thread has none: call it from a coroutine "
            "under asyncio.run; trio is not supported (anyio.run(..., backend='asyncio') is), and code that is not "
            "asynchronous takes LLM"
        ) from None
