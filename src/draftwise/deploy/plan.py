"""The parts of a deployment: engines, fronts, and the resources of each; as arguments, and as the YAML that
``serve deploy`` takes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Self

from draftwise.config import EngineConfig
from draftwise.config.lora import LoRARequest
from draftwise.config.resolve import resolve_engine_config
from draftwise.errors import ConfigError, suggest
from draftwise.profile.beside import fleet_size, scales
from draftwise.server.config import ServerConfig

IMPORT_PATH = "draftwise.cluster.serve:app"
"""Where Ray finds the application."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The arguments of the application. Whoever decides on the number of replicas writes ``num_replicas`` here and
    deploys again: it stands nowhere else, and Ray Serve starts and drains what differs. A planner that scales begins
    with this number and says then how many there are."""

    engine: Mapping[str, Any] = field(default_factory=dict)  # keywords of `AsyncLLM`
    server: Mapping[str, Any] = field(default_factory=dict)  # fields of `ServerConfig`
    num_replicas: int = 1  # engines
    num_fronts: int = 1  # processes that take requests and pass them on

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """From a mapping, as YAML has it. Raises ConfigError for unknown names and values out of range."""
        names = {f.name for f in fields(cls)}
        for name in arguments:
            if name not in names:
                raise ConfigError(f"args: unknown name {name!r}{suggest(str(name), names)}")
        plan = cls(**arguments)
        for name in ("num_replicas", "num_fronts"):
            count = getattr(plan, name)
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ConfigError(f"{name}: expected an integer >= 1, got {count!r}")
        for name in ("engine", "server"):
            if not isinstance(getattr(plan, name), Mapping):
                raise ConfigError(f"args: {name}: expected names and values, got {getattr(plan, name)!r}")
        return plan

    @property
    def server_config(self) -> ServerConfig:
        """Keys of clients that are not given are this process's ``DRAFTWISE_API_KEY``. Raises ConfigError."""
        known = {f.name for f in fields(ServerConfig)}
        for name in self.server:
            if name not in known:
                raise ConfigError(f"server: unknown name {name!r}{suggest(str(name), known)}")
        values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in self.server.items()}
        if modules := values.get("lora_modules"):
            values["lora_modules"] = tuple(
                m if isinstance(m, LoRARequest) else _adapter(m, i + 1) for i, m in enumerate(modules)
            )
        if not values.get("api_keys") and (key := os.environ.get("DRAFTWISE_API_KEY")):
            values["api_keys"] = (key,)
        config = ServerConfig(**values)
        if config.ssl_keyfile or config.ssl_ca_certs:
            raise ConfigError(
                "ssl_keyfile: Ray Serve's proxies take no certificates; put a proxy with them in front"
            )
        return config

    @property
    def engine_config(self) -> EngineConfig:
        """Raises ConfigError."""
        return resolve_engine_config(**self.engine)

    @property
    def is_scaled(self) -> bool:
        """Whether a planner owns the number of replicas."""
        return scales(self.server_config)

    def first_replicas(self) -> int:
        """Engines to begin with: ``num_replicas``, or as many as a planner wanted before a restart.

        Raises:
            ConfigError: the planner's profile, state or numbers cannot be used.
        """
        if not self.is_scaled:
            return self.num_replicas
        return fleet_size(self.server_config, self.engine_config, self.num_replicas)[0]

    def reserves(self) -> dict[str, Any]:
        """Options of Ray for each engine: what it needs of a node, or of several where its ranks are on Ray.

        Example: 2 ranks of 4 threads on Ray are a placement group of {CPU: 1} for the engine and twice {CPU: 4}.
        """
        config = self.engine_config
        cuda = config.device.startswith("cuda")
        size, threads = config.tensor_parallel_size, config.num_threads or 1
        if config.distributed_executor_backend == "ray":
            rank = {"CPU": threads} | ({"GPU": 1} if cuda else {})
            return {
                "ray_actor_options": {"num_cpus": 1},
                "placement_group_bundles": [{"CPU": 1}, *([rank] * size)],
                "placement_group_strategy": "PACK",
            }
        return {"ray_actor_options": {"num_cpus": threads * size} | ({"num_gpus": size} if cuda else {})}

    def written(self) -> dict[str, Any]:
        """The content of a file for ``serve deploy``, without keys of clients.

        Raises:
            ConfigError: a value cannot be written into a file.
        """
        server = self.server_config
        shown = {
            f.name: _plain(f.name, getattr(server, f.name))
            for f in fields(server)
            if f.name != "api_keys"
            and getattr(server, f.name) != (f.default if f.default is not MISSING else {})
        }
        arguments = {
            "engine": {name: _plain(name, value) for name, value in self.engine.items()},
            "server": shown,
            "num_replicas": self.num_replicas,
            "num_fronts": self.num_fronts,
        }
        return {
            "proxy_location": "EveryNode",
            "http_options": {"host": server.host, "port": server.port},
            "applications": [
                {
                    "name": "draftwise",
                    "route_prefix": "/",
                    "import_path": IMPORT_PATH,
                    **({"external_scaler_enabled": True} if self.is_scaled else {}),
                    "args": arguments,
                }
            ],
        }


def _adapter(given: Any, number: int) -> LoRARequest:
    """The adapter of {"name": ..., "path": ...}."""
    if not isinstance(given, Mapping) or set(given) != {"name", "path"}:
        raise ConfigError(f"server: lora_modules: expected a name and a path, got {given!r}")
    return LoRARequest(given["name"], number, given["path"])


def _plain(name: str, value: Any) -> Any:
    """As YAML can have it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, LoRARequest):
        return {"name": value.lora_name, "path": value.lora_path}
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}.{key}", inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, inner) for inner in value]
    raise ConfigError(f"{name}: {value!r} cannot be written into a file")
