"""Options of `draftwise serve` besides those of the engine."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftwise.config.lora import LoRARequest
from draftwise.cpus import processors
from draftwise.errors import ConfigError, suggest
from draftwise.server.hosts import check_hosts
from draftwise.server.reasoning import reasoning_class
from draftwise.server.template_options import may_be_set
from draftwise.server.tool_parsers import parser_class

DEFAULT_MODEL_NAME = "draftwise-demo"
"""The embedded model's name in answers."""

_LEAST_VALUES = 1 << 18
UNKNOWN_FIELDS = ("refuse", "warn")

_COUNTS = (
    "max_header_size", "max_headers", "max_body_size", "max_body_depth", "max_body_fields",
    "max_body_memory", "max_concurrent", "max_queue", "max_samples", "max_logprobs",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Resolved settings of the HTTP server. Sizes in bytes, durations in seconds.

    Raises ConfigError for values out of range.
    """

    model_names: tuple[str, ...] = (DEFAULT_MODEL_NAME,)  # the first one stands in answers
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    api_keys: tuple[str, ...] = ()  # none: open
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    allowed_hosts: tuple[str, ...] = ()  # names of this server besides those that `Hosts` knows; "*": any
    allowed_origins: tuple[str, ...] = ()  # CORS; none: no cross-origin page may read answers
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    max_header_size: int = 64 << 10  # a request's first line and headers together
    max_headers: int = 128
    max_body_size: int = 8 << 20
    max_body_depth: int = 128  # levels of nesting in its JSON
    max_body_fields: int = 32768  # names in its objects
    max_body_values: int | None = (
        None  # members of its lists and objects; None: 256 Ki, or twice max_model_len
    )
    max_body_memory: int = 256 << 20  # bytes of large bodies held at once
    unknown_fields: str = "refuse"  # or "warn": they are left out, and the log says so once
    max_concurrent: int = 1024  # requests being answered
    max_queue: int = 1024  # samples that wait for the engine
    max_samples: int = 256  # prompts times n of one request
    max_logprobs: int = 20
    request_timeout: float | None = None  # deadline of a request that names none
    max_chunk_rate: float | None = (
        None  # chunks per second over all streams; None: 1250 per core, 0: no limit
    )
    header_timeout: float = 15.0  # how long the headers of a request may take to come
    body_timeout: float = 60.0  # and its body
    send_timeout: float = 120.0  # how long a client may leave an answer unread
    drain_timeout: float = 30.0  # how long running requests may go on after SIGTERM
    chat_template: str | None = None  # text of a Jinja template; None: the model's
    default_chat_template_kwargs: Mapping[str, Any] = field(
        default_factory=dict
    )  # a request's own come first
    trust_request_chat_template: bool = False
    enable_force_include_usage: bool = False  # at the end of every stream
    return_tokens_as_token_ids: bool = False  # of requests that do not say
    tool_call_parser: str = "hermes"  # the form in which the model writes tool calls
    reasoning_parser: str | None = None  # the form in which it marks its reasoning; None: reasoning is text
    otlp_traces_endpoint: str | None = None  # URL of an OpenTelemetry collector (OTLP over HTTP)
    lora_modules: tuple[LoRARequest, ...] = ()  # loaded before the server listens
    planner: str | None = None  # file of a profile: a planner beside the engine
    planner_mode: str = "advise"  # or "scale": it starts and drains replicas of this server
    planner_ttft: float | None = None  # its limits, milliseconds
    planner_itl: float | None = None
    planner_interval: float = 60.0  # between its decisions
    planner_least: int = 1  # replicas
    planner_budget: int | None = None  # devices; None: 8 to plan with, and none to scale with
    planner_predictor: str = "constant"
    planner_state: str | None = None  # file in which it remembers
    metrics_prefix: str = "draftwise"  # of names in /metrics; "vllm" suits what reads vLLM's
    log_interval: float = 10.0  # between log lines of statistics; 0: none
    access_log: bool = False
    log_level: str = "info"

    @property
    def chunk_rate(self) -> float | None:
        """Chunks per second; None: no limit. A chunk costs some 30 us: the default is a small share of the cores."""
        if self.max_chunk_rate is None:
            return 1250.0 * processors().threads
        return self.max_chunk_rate or None

    def body_values(self, max_model_len: int) -> int:
        """Most values in a body. Token ids are the most that an honest one holds: those of a whole prompt twice."""
        return self.max_body_values or max(_LEAST_VALUES, 2 * max_model_len)

    def _check_planner(self) -> None:
        if self.planner_mode not in ("advise", "scale"):
            raise ConfigError(f"planner_mode: expected advise or scale, got {self.planner_mode!r}")
        if not 0 < self.planner_interval < math.inf:
            raise ConfigError(f"planner_interval: expected seconds > 0, got {self.planner_interval:g}")
        if self.planner_least < 1:
            raise ConfigError(f"planner_least: expected an integer >= 1, got {self.planner_least}")
        if self.planner_budget is not None and self.planner_budget < 1:
            raise ConfigError(f"planner_budget: expected an integer >= 1, got {self.planner_budget}")
        if self.planner is None:
            for name in ("planner_state", "planner_budget"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{name}: needs planner")
            if self.planner_mode == "scale":
                raise ConfigError("planner_mode: scale needs planner, the profile it plans with")
        elif self.planner_mode == "scale" and self.planner_budget is None:
            raise ConfigError(
                "planner_mode: scale needs planner_budget, the most devices its replicas may have"
            )

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected an integer >= 1, got {getattr(self, name)}")
        if not re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", self.metrics_prefix):
            raise ConfigError(
                f"metrics_prefix: expected letters, digits and underscores, say vllm, got {self.metrics_prefix!r}"
            )
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port: expected a port in 0..65535, got {self.port}")
        # No timer takes inf or nan, and each of them would show late: at the start, at a request, at the end.
        if self.request_timeout is not None and not 0 < self.request_timeout < math.inf:
            raise ConfigError(f"request_timeout: expected finite seconds > 0, got {self.request_timeout:g}")
        for name in ("header_timeout", "body_timeout", "send_timeout", "drain_timeout", "log_interval"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name}: expected finite seconds >= 0, got {getattr(self, name):g}")
        self._check_planner()
        if self.max_chunk_rate is not None and not self.max_chunk_rate >= 0:
            raise ConfigError(f"max_chunk_rate: expected chunks per second >= 0, got {self.max_chunk_rate:g}")
        if not self.model_names or not all(self.model_names):
            raise ConfigError("served_model_name: expected at least one name")
        doubled = sorted({m.lora_name for m in self.lora_modules} & set(self.model_names))
        if doubled:
            raise ConfigError(f"lora_modules: {doubled[0]!r} is the name of the model")
        if any(not key for key in self.api_keys):
            raise ConfigError("api_key: a key must not be empty")
        if any(
            key != key.strip() for key in self.api_keys
        ):  # a header cannot carry it: no client could send the key
            raise ConfigError(
                "api_key: a key must not begin or end with white space (the line break of a file or a secret?)"
            )
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("ssl_keyfile and ssl_certfile: give both or neither")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ConfigError(
                "ssl_ca_certs: needs ssl_keyfile and ssl_certfile; without them there is no TLS"
            )
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{name}: no file {path!r}")
        if self.max_body_values is not None and self.max_body_values < 1:
            raise ConfigError(f"max_body_values: expected an integer >= 1, got {self.max_body_values}")
        if self.max_body_depth > 190:  # the parser's own end is 200
            raise ConfigError(f"max_body_depth: expected an integer in 1..190, got {self.max_body_depth}")
        if self.unknown_fields not in UNKNOWN_FIELDS:
            raise ConfigError(
                f"unknown_fields: expected refuse or warn, got {self.unknown_fields!r}"
                f"{suggest(self.unknown_fields, UNKNOWN_FIELDS)}"
            )
        check_hosts(self.allowed_hosts)
        if not isinstance(self.default_chat_template_kwargs, Mapping):
            raise ConfigError("default_chat_template_kwargs: expected a mapping")
        for name in self.default_chat_template_kwargs:
            if not isinstance(name, str) or not may_be_set(name):
                raise ConfigError(f"default_chat_template_kwargs: {str(name)[:80]!r} cannot be set")
        parser_class(self.tool_call_parser)
        if self.reasoning_parser is not None:
            reasoning_class(self.reasoning_parser)
        for name, default in (
            ("allowed_methods", ("*",)), ("allowed_headers", ("*",)), ("allow_credentials", False),
        ):  # fmt: skip
            if not self.allowed_origins and getattr(self, name) != default:
                raise ConfigError(f"{name}: needs allowed_origins; without it CORS is off")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError("allow_credentials: needs named origins, not '*'")
