"""The server's application behind `ray.serve.llm`, for those who have ``ray[llm]`` and route with its own ingress.

`ray.serve.llm` cannot be imported without vLLM or SGLang, so nothing of it is imported here before an answer needs one
of its types: `DraftwiseServer` has the methods of its ``LLMServerProtocol`` (Ray 2.60), and needs not be told of it.

    config = LLMConfig(
        model_loading_config={"model_id": "demo", "model_source": "FOLDER"}, server_cls=DraftwiseServer,
        engine_kwargs={"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    )
    serve.run(build_openai_app({"llm_configs": [config]}))
"""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import AsyncIterator
from typing import Any

from draftwise.deploy.messages import answered
from draftwise.deploy.plan import Plan
from draftwise.engine.async_llm import AsyncLLM
from draftwise.errors import ConfigError, EngineDeadError
from draftwise.server.app import create_app
from draftwise.server.config import ServerConfig

_TYPES = "ray.serve.llm.openai_api_models"


class DraftwiseServer:
    """A replica: an engine and the server's whole application."""

    def __init__(self, llm_config: Any) -> None:
        """Load the model. ``llm_config``: an ``LLMConfig``, whose ``engine_kwargs`` are keywords of `AsyncLLM`.

        Raises:
            ConfigError: a keyword is unknown, ``lora_config`` is given, or ``ray[llm]`` is missing.
            ModelLoadError: it cannot be loaded.
        """
        self._config = llm_config
        _response_types()  # says what is missing before a model is loaded
        self._llm = AsyncLLM(**_engine(llm_config))
        self._app = create_app(
            self._llm, ServerConfig(model_names=(llm_config.model_loading_config.model_id,))
        )

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
        """Options of the deployment: those of ``llm_config``, and what an engine needs of a node where they do not say
        it. Raises ConfigError."""
        found = copy.deepcopy(dict(llm_config.deployment_config))
        needed = Plan(engine=_engine(llm_config)).reserves()
        for name, value in needed.pop("ray_actor_options").items():
            found.setdefault("ray_actor_options", {}).setdefault(name, value)
        return needed | found

    async def start(self) -> None:
        """Nothing: the constructor has loaded the model."""

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """Events of a stream as texts, or one ``ChatCompletionResponse``; an ``ErrorResponse`` for what is refused."""
        return self._answer("/v1/chat/completions", request, "ChatCompletionResponse")

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """As `chat`, with one ``CompletionResponse``."""
        return self._answer("/v1/completions", request, "CompletionResponse")

    async def check_health(self) -> None:
        """Raises EngineDeadError where a new replica is needed."""
        if not self._llm.is_alive:
            raise EngineDeadError("the engine has failed")

    async def reset_prefix_cache(self) -> None:
        """Forget cached blocks."""
        self._llm.reset_prefix_cache()

    async def is_sleeping(self) -> bool:
        """Never."""
        return False

    async def is_paused(self) -> bool:
        """Never."""
        return False

    async def llm_config(self) -> Any:
        """What it was made of."""
        return self._config

    def __getattr__(self, name: str) -> Any:
        if name in _UNSUPPORTED:
            raise ConfigError(f"{name}: not supported by Draftwise behind ray.serve.llm")
        raise AttributeError(name)

    async def _answer(self, path: str, request: Any, kind: str) -> AsyncIterator[Any]:
        types = _response_types()
        body = json.dumps(request.model_dump(mode="json", exclude_unset=True)).encode()
        scope = {
            "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": path, "root_path": "",
            "raw_path": path.encode(), "query_string": b"", "asgi": {"version": "3.0"},
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        }  # fmt: skip
        status, stream, whole = 500, False, b""
        messages = answered(self._app, scope, body)
        try:
            async for message in messages:
                if message["type"] == "http.response.start":
                    status = message["status"]
                    sent = dict(message.get("headers", ())).get(b"content-type", b"")
                    stream = sent.startswith(b"text/event-stream")
                    continue
                whole += message.get("body", b"")
                if stream:
                    *events, whole = whole.split(b"\n\n")
                    for event in events:
                        yield event.decode() + "\n\n"
        finally:
            await messages.aclose()  # type: ignore[attr-defined]
        if stream:
            return
        said = json.loads(whole)
        if status != 200:
            yield types.ErrorResponse(error=said["error"] | {"code": status})
        else:
            yield getattr(types, kind)(**said)

    def __del__(self) -> None:
        llm = self.__dict__.get("_llm")
        if llm is not None:
            llm.close()


_UNSUPPORTED = frozenset({
    "embeddings", "transcriptions", "score", "tokenize", "detokenize", "sleep", "wakeup", "pause", "resume",
    "start_profile", "stop_profile",
})  # fmt: skip
"""Further methods that `ray.serve.llm` may call."""


def _engine(llm_config: Any) -> dict[str, Any]:
    """Keywords of `AsyncLLM`. Raises ConfigError."""
    if getattr(llm_config, "lora_config", None) is not None:
        raise ConfigError(
            "lora_config: adapters are not served behind ray.serve.llm; use draftwise serve --ray"
        )
    loading = llm_config.model_loading_config
    return {"model": loading.model_source or loading.model_id, **llm_config.engine_kwargs}


def _response_types() -> Any:
    try:
        return importlib.import_module(_TYPES)
    except ImportError as error:
        raise ConfigError(
            f"ray.serve.llm cannot be imported ({error}): pip install 'ray[llm]', or use draftwise serve --ray, which "
            "needs no other engine"
        ) from None
