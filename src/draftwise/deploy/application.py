"""The deployments: engines with the server's whole application each, and fronts that route to them."""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve._private.common import DeploymentID
from ray.serve.config import RequestRouterConfig
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from draftwise.deploy import noted
from draftwise.deploy.cache_log import CacheLog
from draftwise.deploy.following import Followers
from draftwise.deploy.front import Front, ReplicaGone
from draftwise.deploy.messages import Application, Message, answered
from draftwise.deploy.noted import Changes
from draftwise.deploy.plan import Plan
from draftwise.deploy.planning import Planning, RayEngines
from draftwise.deploy.routing import PrefixRouter
from draftwise.engine.async_llm import AsyncLLM
from draftwise.engine.device import load_engine_tokenizer
from draftwise.errors import EngineDeadError
from draftwise.plan.live import LoadWatch, Work
from draftwise.profile.beside import sla_of
from draftwise.server.app import create_app
from draftwise.server.gate import Gate
from draftwise.types import IntArray

_NEWS_WAIT = 1.0
"""Seconds for which a replica lets a front wait for news of its cache. A replica that drains waits for those, too."""


class Engine:
    """A replica: an engine and the server's application over it."""

    def __init__(self, plan: Plan) -> None:
        logging.getLogger("draftwise").setLevel(plan.server_config.log_level.upper())
        config = plan.server_config
        self._llm = AsyncLLM(max_chunk_rate=config.chunk_rate, **plan.engine)
        for module in config.lora_modules:
            self._llm.load_lora(module)
        spans = None
        if config.otlp_traces_endpoint is not None:
            from draftwise.server.spans import Spans

            spans = Spans(config.otlp_traces_endpoint, config.model_names[0])
        self._app = create_app(self._llm, config, spans=spans)
        self._cache = CacheLog()
        self._llm.observe_cache(self._cache.observe)
        self._load = LoadWatch(self._llm.stats, sla_of(config))
        if config.planner is not None:
            self._llm.observe(self._load.observe)

    async def answer(
        self,
        scope: dict[str, Any],
        body: bytes,
        prompt_ids_np: IntArray | None = None,
        only: str | None = None,
    ) -> AsyncIterator[Message]:
        """A request's answer, message by message. The prompt and ``only`` are for the router alone."""
        async for message in answered(self._app, scope, body):
            yield message

    def check_health(self) -> None:
        """Ray starts another replica where this raises."""
        if not self._llm.is_alive:
            raise EngineDeadError("the engine has failed")

    async def cache_changes(self, number: int | None, only: str) -> tuple[int, Changes]:
        """See `CacheLog.since`. ``only`` is for the router."""
        return await self._cache.since(number, _NEWS_WAIT)

    def ping(self) -> None:
        """Nothing: who asks wants to know which replicas there are."""

    def work(self, only: str) -> Work:
        """What was done since the planner's last call. ``only`` is for the router."""
        return self._load.work()

    def __del__(self) -> None:
        llm = getattr(self, "_llm", None)
        if llm is not None:
            llm.close()


class Scaling:
    """The one replica of the planner."""

    def __init__(self, plan: Plan, engines: Any) -> None:
        logging.getLogger("draftwise").setLevel(plan.server_config.log_level.upper())
        context = serve.get_replica_context()
        set_count = functools.partial(
            _set_count, DeploymentID(name=Engine.__name__, app_name=context.app_name)
        )
        names = lambda: noted.HERE.names  # noqa: E731
        self._planning = Planning(plan, RayEngines(engines, names, set_count))
        self._planning.start()

    def about(self) -> bytes:
        """See `Planning.about`."""
        return self._planning.about()

    def metrics(self) -> bytes:
        """See `Planning.metrics`."""
        return self._planning.metrics()

    def __del__(self) -> None:
        planning = getattr(self, "_planning", None)
        if planning is not None:
            planning.close()


def _set_count(engines: DeploymentID, count: int) -> None:
    """The call behind ``POST /api/v1/applications/NAME/deployments/NAME/scale`` of Ray's dashboard, which need not
    run."""
    controller = _get_global_client()._controller
    try:
        ray.get(controller.update_deployment_replicas.remote(engines, count))
    except RayActorError as error:
        raise EngineDeadError("Ray Serve's controller is gone") from error


@serve.ingress()
class Fronts:
    """A replica of the fronts: an ASGI application, of which Ray takes in the requests."""

    def __init__(self, plan: Plan, engines: Any, planner: Any = None) -> None:
        self._plan = plan
        self._engines = engines
        self._planner = None if planner is None else _Planner(planner)

    def __serve_build_asgi_app__(self) -> Application:
        """Called by Ray behind the constructor."""
        engine, config = self._plan.engine_config, self._plan.server_config
        front = Front(_Replicas(self._engines), load_engine_tokenizer(engine), engine, config, self._planner)
        return Gate(front, config, lambda path, status: None)


class _Replicas:
    """See `deploy.front.Replicas`: over a handle of Ray."""

    def __init__(self, engines: Any) -> None:
        self._streams = engines.options(stream=True)
        self._followers = Followers(noted.HERE, functools.partial(_changes, engines))

    def names(self) -> tuple[str, ...]:
        return noted.HERE.names

    async def ask(
        self, scope: dict[str, Any], body: bytes, ids_np: IntArray | None = None, only: str | None = None
    ) -> AsyncIterator[Message]:
        self._followers.look()
        messages = self._streams.answer.remote(scope, body, prompt_ids_np=ids_np, only=only)
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


class _Planner:
    """See `deploy.front.Planned`: over a handle of Ray."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def about(self) -> bytes:
        try:
            found: bytes = await self._handle.about.remote()
        except (RayActorError, RayServeException) as error:
            raise ReplicaGone(str(error).partition("\n")[0]) from None
        return found

    async def metrics(self) -> bytes:
        try:
            found: bytes = await self._handle.metrics.remote()
        except (RayActorError, RayServeException) as error:
            raise ReplicaGone(str(error).partition("\n")[0]) from None
        return found


async def _changes(engines: Any, name: str, number: int | None) -> tuple[int, Changes]:
    try:
        found: tuple[int, Changes] = await engines.cache_changes.remote(number, only=name)
    except (RayActorError, RayServeException) as error:
        raise ReplicaGone(str(error).partition("\n")[0]) from None
    return found


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
    )
    shared = functools.partial(
        serve.deployment,
        max_ongoing_requests=config.max_concurrent,
        graceful_shutdown_timeout_s=config.drain_timeout,
    )
    engines = shared(
        Engine,
        num_replicas=plan.first_replicas(),
        request_router_config=router,
        logging_config={
            "enable_access_log": False
        },  # fronts log requests; and they ask for news every second
        **plan.reserves(),
    )
    fronts = shared(Fronts, num_replicas=plan.num_fronts, ray_actor_options={"num_cpus": 0})
    bound = engines.bind(plan)
    if config.planner is None:
        return fronts.bind(plan, bound)
    planner = serve.deployment(Scaling, num_replicas=1, ray_actor_options={"num_cpus": 0})
    return fronts.bind(plan, bound, planner.bind(plan, bound))
