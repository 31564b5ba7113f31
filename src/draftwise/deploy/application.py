"""The deployments: engines with the server's whole application each, and fronts that route to them."""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException

from draftwise.deploy.front import Front, ReplicaGone
from draftwise.deploy.messages import Application, Message, answered
from draftwise.deploy.plan import Plan
from draftwise.deploy.routing import PrefixRouter
from draftwise.engine.async_llm import AsyncLLM
from draftwise.engine.device import load_engine_tokenizer
from draftwise.errors import EngineDeadError
from draftwise.server.app import create_app
from draftwise.server.gate import Gate
from draftwise.types import IntArray

_STATS_PERIOD = 2.0
"""Seconds between a replica's reports to Ray."""


class Engine:
    """A replica: an engine and the server's application over it."""

    def __init__(self, plan: Plan) -> None:
        logging.getLogger("draftwise").setLevel(plan.server_config.log_level.upper())
        config = plan.server_config
        self._llm = AsyncLLM(max_chunk_rate=config.chunk_rate, **plan.engine)
        for module in config.lora_modules:
            self._llm.load_lora(module)
        self._app = create_app(self._llm, config)

    async def answer(
        self, scope: dict[str, Any], body: bytes, prompt_ids_np: IntArray | None = None
    ) -> AsyncIterator[Message]:
        """A request's answer, message by message. The prompt is for the router alone."""
        async for message in answered(self._app, scope, body):
            yield message

    def check_health(self) -> None:
        """Ray starts another replica where this raises."""
        if not self._llm.is_alive:
            raise EngineDeadError("the engine has failed")

    def record_routing_stats(self) -> dict[str, Any]:
        """What Ray passes on to routers."""
        return {"num_blocks": self._llm.stats().num_blocks}

    def __del__(self) -> None:
        llm = getattr(self, "_llm", None)
        if llm is not None:
            llm.close()


@serve.ingress()
class Fronts:
    """A replica of the fronts: an ASGI application, of which Ray takes in the requests."""

    def __init__(self, plan: Plan, engines: Any) -> None:
        self._plan = plan
        self._engines = engines.options(stream=True)

    def __serve_build_asgi_app__(self) -> Application:
        """Called by Ray behind the constructor."""
        engine, config = self._plan.engine_config, self._plan.server_config
        front = Front(self._ask, load_engine_tokenizer(engine), engine, config)
        return Gate(front, config, lambda path, status: None)

    async def _ask(
        self, scope: dict[str, Any], body: bytes, ids_np: IntArray | None
    ) -> AsyncIterator[Message]:
        messages = self._engines.answer.remote(scope, body, prompt_ids_np=ids_np)
        ended = False
        try:
            async for message in messages:
                yield message
            ended = True
        except (RayActorError, RayServeException) as error:
            ended = True
            raise ReplicaGone(str(error).partition("\n")[0]) from None
        finally:
            if not ended:
                messages.cancel()


def build(arguments: Mapping[str, Any] | Plan) -> Any:
    """The application of a plan, or of its arguments, as ``serve.run`` and ``serve deploy`` take it. Raises
    ConfigError."""
    plan = arguments if isinstance(arguments, Plan) else Plan.of(arguments)
    config, engine = plan.server_config, plan.engine_config
    router = RequestRouterConfig(
        request_router_class=PrefixRouter,
        request_router_kwargs={
            "block_size": engine.block_size,
            "kinship": engine.default_method == "suffix",
        },
        request_routing_stats_period_s=_STATS_PERIOD,
    )
    shared = functools.partial(
        serve.deployment,
        max_ongoing_requests=config.max_concurrent,
        graceful_shutdown_timeout_s=config.drain_timeout,
    )
    engines = shared(Engine, num_replicas=plan.num_replicas, request_router_config=router, **plan.reserves())
    fronts = shared(Fronts, num_replicas=plan.num_fronts, ray_actor_options={"num_cpus": 0})
    bound = engines.bind(plan)
    return fronts.bind(plan, bound)
