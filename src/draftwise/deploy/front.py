"""The application in front of replicas: it looks at a request, finds its prompt, and passes both on to a replica.

A replica's application answers in full, as that of a server with one engine. What is looked at here decides where a
request goes and nothing else, so that a prompt that cannot be read here is the replica's to refuse.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from draftwise.config import EngineConfig
from draftwise.deploy.everyone import TOGETHER, Whole
from draftwise.deploy.messages import Message, Receive, Scope, Send, portable, whole_body
from draftwise.encoding import encode_text
from draftwise.engine.chats import chat_prompt
from draftwise.engine.workers import Lane, Workers
from draftwise.errors import DraftwiseError
from draftwise.server.config import ServerConfig
from draftwise.server.errors import APIError
from draftwise.types import IntArray

logger = logging.getLogger("draftwise.deploy")

_DEPLOY = "name adapters with --lora-modules and deploy again: replicas that Ray starts later would lack them"
_REFUSED = {
    "/v1/load_lora_adapter": _DEPLOY,
    "/v1/unload_lora_adapter": _DEPLOY,
    "/scale_elastic_ep": "the number stands in num_replicas of the deployment; change it there and deploy again",
}
"""Paths that one replica would take for itself alone, and what to do instead."""
_PATIENCE = 5.0
"""Seconds in which a replica answers what all are asked."""
_TRIES = 3
_SMALL = 4096
"""Bytes of a body up to which its prompt is found in the event loop."""


class ReplicaGone(Exception):
    """A replica was lost while it answered."""


class Replicas(Protocol):
    """A front's way to them."""

    def names(self) -> Sequence[str]:
        """The replicas that are known now."""
        ...

    def ask(
        self, scope: dict[str, Any], body: bytes, ids_np: IntArray | None = None, only: str | None = None
    ) -> AsyncIterator[Message]:
        """A replica's answer to a request. ``ids_np``: the prompt by which it is routed, int32 [n]; ``only``: the
        replica that is asked. Raises `ReplicaGone` if it is lost."""
        ...


class Planned(Protocol):
    """A front's way to the planner. Its methods raise `ReplicaGone` while it is lost."""

    async def about(self) -> bytes:
        """Its decisions and reasons, as JSON."""
        ...

    async def metrics(self) -> bytes:
        """A part of the text of ``/metrics``."""
        ...


class Front:
    """An ASGI application."""

    def __init__(
        self,
        replicas: Replicas,
        tokenizer: Any,
        engine: EngineConfig,
        config: ServerConfig,
        planner: Planned | None = None,
    ) -> None:
        """``engine``: what the replicas are made of. ``planner``: one beside them."""
        self._planner = planner
        self._replicas = replicas
        self._tokenizer = tokenizer
        self._engine = engine
        self._config = config
        self._workers = Workers()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        path = scope["path"]
        if path == "/scale_elastic_ep" and self._config.planner_mode == "scale":
            await _refuse(send, 409, "a planner says how many replicas there are (--planner-mode scale)")
            return
        if path == "/planner" and self._planner is not None:
            await _say(send, await self._plans(self._planner))
            return
        if (instead := _REFUSED.get(path)) is not None:
            await _refuse(send, 501, f"{path} is not supported on Ray Serve: {instead}")
            return
        try:
            body = await whole_body(receive)
        except ConnectionError:
            return
        if path in TOGETHER:
            await self._together(portable(scope), body, send)
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
        """Send the answer of the first replica that lives long enough to begin."""
        for tried in range(1, _TRIES + 1):
            begun, stream = False, False
            messages = self._replicas.ask(scope, body, ids_np)
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

    async def _together(self, scope: dict[str, Any], body: bytes, send: Send) -> None:
        """Ask all, and make one answer of theirs: of those that answer in time. What one refuses is refused."""

        async def one(name: str | None) -> tuple[str, Whole] | None:
            try:
                async with asyncio.timeout(_PATIENCE):
                    return name or "", await _whole(self._replicas.ask(scope, body, only=name))
            except (ReplicaGone, TimeoutError) as error:
                logger.warning("replica %s does not answer %s: %s", name, scope["path"], error)
                return None

        names = self._replicas.names()
        if not names:  # nothing was asked yet: any of them makes the others known
            await one(None)
            names = self._replicas.names()
        # Each in a context of its own: Ray tells calls apart by the request in whose context they are made.
        loop = asyncio.get_running_loop()
        asked = [loop.create_task(one(name), context=contextvars.Context()) for name in names]
        answers = [found for found in await asyncio.gather(*asked) if found is not None]
        refused = [whole for _, whole in answers if whole[0] != 200]
        if refused:
            await _say(send, refused[0])
        elif not answers:
            await _refuse(send, 503, "no replica answers")
        else:
            status, kind, data = TOGETHER[scope["path"]](answers)
            if scope["path"] == "/metrics" and self._planner is not None:
                data += await self._planner_metrics(self._planner)
            await _say(send, (status, kind, data))

    async def _plans(self, planner: Planned) -> Whole:
        try:
            async with asyncio.timeout(_PATIENCE):
                return 200, "application/json", await planner.about()
        except (ReplicaGone, TimeoutError) as error:
            body = APIError(503, f"the planner does not answer: {error}").body()
            return 503, "application/json", json.dumps(body).encode()

    async def _planner_metrics(self, planner: Planned) -> bytes:
        try:
            async with asyncio.timeout(_PATIENCE):
                return await planner.metrics()
        except (ReplicaGone, TimeoutError) as error:
            logger.warning("the planner does not answer: %s", error)
            return b""

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
    await _say(send, (status, "application/json", json.dumps(error.body()).encode()))


async def _say(send: Send, whole: Whole) -> None:
    status, kind, data = whole
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


async def _whole(messages: AsyncIterator[Message]) -> Whole:
    """An answer of which nothing is sent on yet."""
    status, kind, data = 500, "text/plain", b""
    async for message in messages:
        if message["type"] == "http.response.start":
            status = message["status"]
            kind = dict(message.get("headers", ())).get(b"content-type", b"text/plain").decode()
        else:
            data += message.get("body", b"")
    return status, kind, data


async def _cut_short(send: Send, stream: bool, error: Exception) -> None:
    """End an answer that has begun: a stream with an error in its own form; any other is broken off."""
    if not stream:
        raise error
    body = APIError(503, f"the replica was lost, and what it had begun ends here; ask again: {error}").body()
    data = b"data: " + json.dumps(body).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": data, "more_body": False})
