"""``draftwise serve --planner``: a planner beside the engine, or one that says how many replicas there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from draftwise.engine.async_llm import AsyncLLM
    from draftwise.fleet.engine import FleetEngine
    from draftwise.plan.live import PlannerService
    from draftwise.server.config import ServerConfig


def add_planner_flags(add: Callable[..., None]) -> None:
    """Options of `ServerConfig`. ``add``: (name, help, type, ...), of the group of the server's options."""
    add(
        "planner",
        "a file made by draftwise profile: starts a planner that watches the engine",
        metavar="FILE",
    )
    add(
        "planner-mode",
        "advise: only report decisions; scale: start and drain replicas of this server (advise)",
        metavar="MODE",
    )
    add("planner-ttft", "the planner's limit: milliseconds to the first token (none)", float, metavar="MS")
    add(
        "planner-itl",
        "the planner's limit: mean milliseconds between later tokens (none)",
        float,
        metavar="MS",
    )
    add("planner-interval", "seconds between the planner's decisions (60)", float, metavar="SECONDS")
    add("planner-least", "fewest replicas that the planner may choose (1)", int, metavar="N")
    add("planner-budget", "most devices that the planner may use (8; required with scale)", int, metavar="N")
    add(
        "planner-predictor",
        "how the planner predicts the load: constant, arima, kalman or seasonal (constant)",
        metavar="NAME",
    )
    add("planner-state", "file with the planner's state, so that it goes on after a restart", metavar="FILE")


def make_service(llm: AsyncLLM | FleetEngine, config: ServerConfig) -> PlannerService | None:
    """A service that is not started yet; None without ``planner``.

    Raises ConfigError: the profile is none, of another model or machine, or says too little.
    """
    if config.planner is None:
        return None
    from draftwise.engine.async_llm import AsyncLLM
    from draftwise.plan.live import LoadWatch, PlannerService, watch_one
    from draftwise.profile.beside import checked_planner, scales, sla_of, state_path

    state = state_path(config)
    planner = checked_planner(config, llm.config if isinstance(llm, AsyncLLM) else llm.replica_config)
    if isinstance(llm, AsyncLLM):
        watch = LoadWatch(llm.stats, sla_of(config))
        service = watch_one(planner, watch, state)
        llm.observe(watch.observe)
        return service
    from draftwise.fleet.scaling import Scaler
    from draftwise.fleet.watching import RequestWatch

    fleet, requests = llm, RequestWatch(sla_of(config))
    interval = config.planner_interval
    scaler = Scaler(fleet, lambda: service.failed())
    service = PlannerService(
        planner,
        lambda now: requests.take(now, fleet.stats(), len(fleet.replicas), fleet.warming(interval)),
        carry_out=scaler.carry_out if scales(config) else None,
        state=state,
    )
    fleet.watch(requests)
    return service
