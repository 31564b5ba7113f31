"""Settings of published cache events; names are those of vLLM's ``KVEventsConfig``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from draftwise.config import coerce as to
from draftwise.errors import ConfigError, suggest


@dataclass(frozen=True, slots=True)
class EventsConfig:
    """Whether and where changes of cached blocks are published. Raises ConfigError for bad values."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None  # "zmq" or "null"; None: zmq where events are enabled
    endpoint: str = "tcp://*:5557"  # bound if it has a "*" or "::", or is no tcp; else connected to
    replay_endpoint: str | None = None  # bound; subscribers ask here for missed messages
    buffer_steps: int = 10_000  # messages that can be replayed
    hwm: int = 100_000  # messages that wait for one subscriber
    max_queue_size: int = 100_000  # messages that wait to be sent
    topic: str = ""

    def __post_init__(self) -> None:
        if self.publisher not in (None, "zmq", "null"):
            raise ConfigError(f"kv_events_config.publisher: expected zmq or null, got {self.publisher!r}")
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            scheme, sign, place = (value or "ipc://x").partition("://")
            if scheme not in ("tcp", "ipc", "inproc") or not sign or not place:
                raise ConfigError(
                    f"kv_events_config.{name}: expected tcp://, ipc:// or inproc://, got {value!r}"
                )
            if scheme == "tcp" and not place.rpartition(":")[2].isdecimal():
                raise ConfigError(f"kv_events_config.{name}: {value!r} has no port")

    @property
    def publishes(self) -> bool:
        """Whether anything is sent."""
        return self.enable_kv_cache_events and self.publisher != "null"

    @classmethod
    def from_value(cls, name: str, value: Any) -> EventsConfig:
        """Build from user input: an instance, a mapping of some fields, or its JSON text. Raises ConfigError."""
        if isinstance(value, cls):
            return value
        given = dict(to.mapping(name, value))
        for field in given:
            if field not in _CHECKS:
                raise ConfigError(f"{name}: unknown field {field!r}{suggest(str(field), _CHECKS)}")
        checked: dict[str, Any] = {f: _CHECKS[f](f"{name}.{f}", v) for f, v in given.items() if v is not None}
        return cls(**checked)


def _text(name: str, value: Any) -> str:
    """A string, which may be empty."""
    return "" if value == "" else str(to.string(name, value))


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "enable_kv_cache_events": to.boolean,
    "publisher": to.string,
    "endpoint": to.string,
    "replay_endpoint": to.string,
    "buffer_steps": to.integer(1),
    "hwm": to.integer(0),
    "max_queue_size": to.integer(1),
    "topic": _text,
}
assert set(_CHECKS) == {f.name for f in fields(EventsConfig)}
