"""``draftwise serve --planner``: a planner beside the engine that is served."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwise.errors import ConfigError

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
        "profile of draftwise profile: a planner beside the engine says what it would do",
        metavar="FILE",
    )
    add("planner-mode", "what it does: advise (advise)", metavar="MODE")
    add("planner-ttft", "its limit: milliseconds to the first token (none)", float, metavar="MS")
    add("planner-itl", "its limit: mean milliseconds between tokens after it (none)", float, metavar="MS")
    add("planner-interval", "seconds between its decisions (60)", float, metavar="SECONDS")
    add("planner-budget", "most devices it may plan with (8)", int, metavar="N")
    add(
        "planner-predictor", "what it expects: constant, arima, kalman or seasonal (constant)", metavar="NAME"
    )
    add("planner-state", "where it remembers, so that it goes on after a restart", metavar="FILE")


def make_service(llm: AsyncLLM | FleetEngine, config: ServerConfig) -> PlannerService | None:
    """A service that is not started yet; None without ``planner``.

    Raises:
        ConfigError: the profile is none, of another model or machine, or says too little; or there are several engines.
    """
    if config.planner is None:
        return None
    from draftwise.engine.async_llm import AsyncLLM

    if not isinstance(llm, AsyncLLM):
        raise ConfigError("planner: it looks at one engine; leave out data_parallel_size")
    from draftwise.plan.capacity import ModelCapacity
    from draftwise.plan.live import LoadWatch, watch_one
    from draftwise.plan.operating import Sla
    from draftwise.plan.planner import Planner, PlannerConfig
    from draftwise.plan.profile import Profile
    from draftwise.plan.ticks import ENGINES
    from draftwise.profile.report import acceptance_of, settings_known
    from draftwise.profile.run import machine, model_name

    engine = llm.config
    profile = Profile.load(Path(config.planner))
    profile.check_of(model_name(engine), machine(engine.device, engine.num_threads))
    weights = _weights(profile.settings, engine.quantization, engine.dtype)
    setting = profile.setting(weights)
    times, acceptance = profile.times(weights), acceptance_of(profile)
    loaded = {drafter.method for drafter in engine.drafters}
    limits: dict[str, Any] = {"most_requests": engine.max_num_seqs or 256}
    if times.most_drafts is not None:
        limits["most_drafts"] = max(times.most_drafts, 1)
    sla = Sla(*(None if ms is None else ms / 1000 for ms in (config.planner_ttft, config.planner_itl)))
    methods = [m for m in settings_known(times, acceptance) if m in loaded]
    capacity = ModelCapacity(times, acceptance, sla, methods=methods, **limits)
    settings = PlannerConfig(
        interval=config.planner_interval,
        budget=config.planner_budget,
        devices={ENGINES: setting.devices},
        predictor=config.planner_predictor,
        period=max(round(86_400 / config.planner_interval), 2),
    )
    watch = LoadWatch(llm.stats)
    state = None if config.planner_state is None else Path(config.planner_state)
    service = watch_one(Planner(settings, capacity), watch, state)
    llm.observe(watch.observe)
    return service


def _weights(known: dict[str, Any], quantization: str | None, dtype: str) -> str | None:
    """Of the formats in a profile, the one that the engine runs. Raises ConfigError if several are and it is none."""
    for name in (quantization, dtype, "auto"):
        if name in known:
            return name
    if len(known) > 1:
        raise ConfigError(
            f"planner: the profile is of {', '.join(known)}; the engine runs {quantization or dtype}"
        )
    return None
