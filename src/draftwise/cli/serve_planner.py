"""``draftwise serve --planner``: a planner beside the engine, or one that says how many replicas there are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwise.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from draftwise.config import EngineConfig
    from draftwise.engine.async_llm import AsyncLLM
    from draftwise.fleet.engine import FleetEngine
    from draftwise.plan.live import PlannerService
    from draftwise.plan.operating import Sla
    from draftwise.plan.planner import Planner, PlannerConfig
    from draftwise.plan.profile import Profile
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


def scales(config: ServerConfig) -> bool:
    """Whether a planner owns the number of replicas."""
    return config.planner is not None and config.planner_mode == "scale"


def fleet_size(config: ServerConfig, engine: EngineConfig) -> tuple[int, int]:
    """(replicas to begin with, most there may be) of a fleet that a planner scales: as many as it wanted before the
    restart, else as ``data_parallel_size`` says.

    Raises:
        ConfigError: the profile or the state cannot be used, or the numbers contradict each other.
    """
    from draftwise.plan.live import read_state

    setting = _profile(config).setting(_weights(_profile(config).settings, engine.quantization, engine.dtype))
    assert config.planner_budget is not None, "checked by ServerConfig"
    most = config.planner_budget // setting.devices
    if most < max(config.planner_least, engine.data_parallel_size):
        raise ConfigError(
            f"planner_budget: {config.planner_budget} devices are {most} replicas of {setting.devices}, fewer than "
            f"{max(config.planner_least, engine.data_parallel_size)} (planner_least, data_parallel_size)"
        )
    wanted = engine.data_parallel_size
    if config.planner_state is not None and Path(config.planner_state).exists():
        planner = _planner(config, engine)
        planner.restore(read_state(Path(config.planner_state)))
        wanted = planner.wanted if planner.wanted is not None else wanted
    return min(max(wanted, config.planner_least), most), most


def make_service(llm: AsyncLLM | FleetEngine, config: ServerConfig) -> PlannerService | None:
    """A service that is not started yet; None without ``planner``.

    Raises ConfigError: the profile is none, of another model or machine, or says too little.
    """
    if config.planner is None:
        return None
    from draftwise.engine.async_llm import AsyncLLM
    from draftwise.plan.live import LoadWatch, PlannerService, watch_one
    from draftwise.profile.run import machine, model_name

    state = None if config.planner_state is None else Path(config.planner_state)
    engine = llm.config if isinstance(llm, AsyncLLM) else llm.replica_config
    _profile(config).check_of(model_name(engine), machine(engine.device, engine.num_threads))
    planner = _planner(config, engine)
    if isinstance(llm, AsyncLLM):
        watch = LoadWatch(llm.stats, _sla(config))
        service = watch_one(planner, watch, state)
        llm.observe(watch.observe)
        return service
    from draftwise.fleet.scaling import Scaler
    from draftwise.fleet.watching import RequestWatch

    fleet, requests = llm, RequestWatch(_sla(config))
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


def _profile(config: ServerConfig) -> Profile:
    from draftwise.plan.profile import Profile

    assert config.planner is not None
    return Profile.load(Path(config.planner))


def _planner(config: ServerConfig, engine: EngineConfig) -> Planner:
    """``engine``: what each replica is made of."""
    from draftwise.plan.capacity import ModelCapacity
    from draftwise.plan.planner import Planner
    from draftwise.profile.report import settings_known

    profile = _profile(config)
    weights = _weights(profile.settings, engine.quantization, engine.dtype)
    times, acceptance = profile.times(weights), profile.acceptance()
    loaded = {drafter.method for drafter in engine.drafters}
    limits: dict[str, Any] = {"most_requests": engine.max_num_seqs or 256}
    if times.most_drafts is not None:
        limits["most_drafts"] = max(times.most_drafts, 1)
    methods = [m for m in settings_known(times, acceptance) if m in loaded]
    capacity = ModelCapacity(times, acceptance, _sla(config), methods=methods, **limits)
    return Planner(_settings(config, profile.setting(weights).devices), capacity)


def _sla(config: ServerConfig) -> Sla:
    from draftwise.plan.operating import Sla

    return Sla(*(None if ms is None else ms / 1000 for ms in (config.planner_ttft, config.planner_itl)))


def _settings(config: ServerConfig, devices: int) -> PlannerConfig:
    from draftwise.plan.planner import PlannerConfig
    from draftwise.plan.ticks import ENGINES

    return PlannerConfig(
        interval=config.planner_interval,
        budget=8 if config.planner_budget is None else config.planner_budget,
        devices={ENGINES: devices},
        least=config.planner_least,
        predictor=config.planner_predictor,
        period=max(round(86_400 / config.planner_interval), 2),
    )


def _weights(known: dict[str, Any], quantization: str | None, dtype: str) -> str | None:
    """The format in a profile that the engine runs. Raises ConfigError if there are several and the engine's is
    missing."""
    for name in (quantization, dtype, "auto"):
        if name in known:
            return name
    if len(known) > 1:
        raise ConfigError(
            f"planner: the profile is of {', '.join(known)}; the engine runs {quantization or dtype}"
        )
    return None
