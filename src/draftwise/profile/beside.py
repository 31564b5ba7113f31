"""The planner beside a server: made from a profile and the server's options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftwise.config import EngineConfig
from draftwise.errors import ConfigError
from draftwise.plan.capacity import ModelCapacity
from draftwise.plan.live import read_state
from draftwise.plan.operating import Sla
from draftwise.plan.planner import Planner, PlannerConfig
from draftwise.plan.profile import Profile
from draftwise.plan.ticks import ENGINES
from draftwise.profile.report import settings_known
from draftwise.profile.run import machine, model_name
from draftwise.server.config import ServerConfig


def scales(config: ServerConfig) -> bool:
    """Whether a planner owns the number of replicas."""
    return config.planner is not None and config.planner_mode == "scale"


def fleet_size(config: ServerConfig, engine: EngineConfig, first: int) -> tuple[int, int]:
    """(replicas to begin with, most there may be) of replicas that a planner scales: as many as it wanted before the
    restart, else ``first``.

    Raises:
        ConfigError: the profile or the state cannot be used, or the numbers contradict each other.
    """
    setting = profile_of(config).setting(
        _weights(profile_of(config).settings, engine.quantization, engine.dtype)
    )
    assert config.planner_budget is not None, "checked by ServerConfig"
    most = config.planner_budget // setting.devices
    if most < max(config.planner_least, first):
        raise ConfigError(
            f"planner_budget: {config.planner_budget} devices are {most} replicas of {setting.devices}, fewer than "
            f"{max(config.planner_least, first)} (planner_least, or those to begin with)"
        )
    wanted = first
    if config.planner_state is not None and Path(config.planner_state).exists():
        planner = planner_of(config, engine)
        planner.restore(read_state(Path(config.planner_state)))
        wanted = planner.wanted if planner.wanted is not None else wanted
    return min(max(wanted, config.planner_least), most), most


def profile_of(config: ServerConfig) -> Profile:
    assert config.planner is not None
    return Profile.load(Path(config.planner))


def planner_of(config: ServerConfig, engine: EngineConfig) -> Planner:
    """``engine``: what each replica is made of."""
    profile = profile_of(config)
    weights = _weights(profile.settings, engine.quantization, engine.dtype)
    times, acceptance = profile.times(weights), profile.acceptance()
    loaded = {drafter.method for drafter in engine.drafters}
    limits: dict[str, Any] = {"most_requests": engine.max_num_seqs or 256}
    if times.most_drafts is not None:
        limits["most_drafts"] = max(times.most_drafts, 1)
    methods = [m for m in settings_known(times, acceptance) if m in loaded]
    capacity = ModelCapacity(times, acceptance, sla_of(config), methods=methods, **limits)
    return Planner(_settings(config, profile.setting(weights).devices), capacity)


def _settings(config: ServerConfig, devices: int) -> PlannerConfig:
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


def checked_planner(config: ServerConfig, engine: EngineConfig) -> Planner:
    """The planner for replicas of ``engine`` on this machine.

    Raises:
        ConfigError: the profile is none, of another model or machine, or says too little.
    """
    profile_of(config).check_of(model_name(engine), machine(engine.device, engine.num_threads))
    return planner_of(config, engine)


def state_path(config: ServerConfig) -> Path | None:
    """Where it remembers."""
    return None if config.planner_state is None else Path(config.planner_state)


def sla_of(config: ServerConfig) -> Sla:
    """The planner's limits."""
    return Sla(*(None if ms is None else ms / 1000 for ms in (config.planner_ttft, config.planner_itl)))
