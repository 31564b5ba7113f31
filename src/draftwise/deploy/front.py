"""The application in front of replicas: it looks at a request, finds its prompt, and passes both on to a replica.

A replica's application answers in full, as that of a server with one engine. What is looked at here decides where a
request goes and nothing else, so that a prompt that cannot be read here is the replica's to refuse.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import numpy as np

from draftwise.config import EngineConfig
from draftwise.deploy.messages import Message, Receive, Scope, Send, portable, whole_body
from draftwise.encoding import encode_text
from draftwise.engine.llm import chat_prompt
from draftwise.engine.workers import Lane, Workers
from draftwise.errors import DraftwiseError
from draftwise.server.config import ServerConfig
from draftwise.server.errors import APIError
from draftwise.types import IntArray

logger = logging.getLogger("draftwise.deploy")

Ask = Callable[[dict[str, Any], bytes, IntArray | None], AsyncIterator[Message]]
"""From a scope, a body and the prompt's token ids to a replica's answer. It raises `ReplicaGone` if that is lost."""

_OF_ONE = {
    "/v1/load_lora_adapter": "name adapters with --lora-modules",
    "/v1/unload_lora_adapter": "name adapters with --lora-modules",
    "/reset_prefix_cache": "each replica has its own",
    "/metrics": "each replica has its own; Ray's dashboard has those of Ray Serve",
    "/load": "each replica has its own; serve status has those of Ray Serve",
}
"""Paths that one replica would answer for itself, or change for itself, and what to do instead."""
_TRIES = 3
_SMALL = 4096
"""Bytes of a body up to which its prompt is found in the event loop."""


class ReplicaGone(Exception):
    """A replica was lost while it answered."""


class Front:
    """An ASGI application."""

    def __init__(self, ask: Ask, tokenizer: Any, engine: EngineConfig, config: ServerConfig) -> None:
        """``engine``: what the replicas are made of."""
        self._ask = ask
        self._tokenizer = tokenizer
        self._engine = engine
        self._config = config
        self._workers = Workers()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        path = scope["path"]
        if (instead := _OF_ONE.get(path)) is not None:
            await _refuse(send, 501, f"{path} is not supported on Ray Serve: {instead}")
            return
        try:
            body = await whole_body(receive)
        except ConnectionError:
            return
        ids_np = await self._prompt(path, body) if scope["method"] == "POST" else None
        answer = asyncio.ensure_future(self._answer(portable(scope), body, ids_np, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (answer, gone):
                if not task.done():
                    task.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            with contextlib.suppress(asyncio.CancelledError):
                await answer

    async def _live(self, receive: Receive, send: Send) -> None:
        """Ray tells when it begins and ends."""
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                self.close()
                await send({"type": "lifespan.shutdown.complete"})
                return
            await send({"type": "lifespan.startup.complete"})

    async def _answer(self, scope: dict[str, Any], body: bytes, ids_np: IntArray | None, send: Send) -> None:
        """Of the first replica that lives long enough to begin."""
        for tried in range(1, _TRIES + 1):
            begun, stream = False, False
            messages = self._ask(scope, body, ids_np)
            try:
                async for message in messages:
                    if message["type"] == "http.response.start":
                        begun, stream = True, _is_stream(message)
                    await send(message)
                return
            except ReplicaGone as error:
                logger.warning("a replica was lost: %s", error)
                if begun:
                    await _cut_short(send, stream, error)
                    return
                if tried == _TRIES:
                    await _refuse(send, 503, f"no replica answers: {error}")
            finally:
                close = getattr(messages, "aclose", None)
                if close is not None:
                    await close()

    async def _prompt(self, path: str, body: bytes) -> IntArray | None:
        """The token ids by which a request is routed, int32 [n]; None: it can go anywhere."""
        find = {"/v1/completions": self._of_completion, "/v1/chat/completions": self._of_chat}.get(path)
        if find is None:
            return None

        def found() -> IntArray | None:
            try:
                asked = json.loads(body)
                ids = find(asked) if isinstance(asked, Mapping) else None
                return None if ids is None else np.asarray(ids, np.int32)
            except (DraftwiseError, ValueError, TypeError, OverflowError, RecursionError):
                return None

        if len(body) < _SMALL:
            return found()
        return await self._workers.submit(Lane.TEXT, found)

    def _of_completion(self, asked: Mapping[str, Any]) -> Any:
        prompt = asked.get("prompt")
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompt = prompt[0]  # they go together
        if isinstance(prompt, str) and self._tokenizer is not None:
            return encode_text(self._tokenizer, prompt, "prompt")
        return prompt if isinstance(prompt, list) else None

    def _of_chat(self, asked: Mapping[str, Any]) -> Any:
        if self._tokenizer is None:
            return None
        options = {**self._config.default_chat_template_kwargs, **(asked.get("chat_template_kwargs") or {})}
        return chat_prompt(
            self._tokenizer,
            asked["messages"] if isinstance(asked.get("messages"), list) else [],
            limits=self._engine.request_limits,
            max_model_len=self._engine.max_model_len or 1 << 20,
            chat_template=self._config.chat_template,
            add_generation_prompt=True,
            tools=asked.get("tools"),
            template_options=options,
        )["prompt_token_ids"]

    def close(self) -> None:
        """Begin nothing more."""
        self._workers.close()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _is_stream(message: Message) -> bool:
    headers = dict(message.get("headers", ()))
    return bool(headers.get(b"content-type", b"").startswith(b"text/event-stream"))


async def _refuse(send: Send, status: int, text: str) -> None:
    error = APIError(status, text)
    data = json.dumps(error.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


async def _cut_short(send: Send, stream: bool, error: Exception) -> None:
    """End an answer that has begun: a stream with an error in its own form; any other is broken off."""
    if not stream:
        raise error
    body = APIError(503, f"the replica was lost, and what it had begun ends here; ask again: {error}").body()
    data = b"data: " + json.dumps(body).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": data, "more_body": False})
