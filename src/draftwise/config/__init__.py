"""Frozen configurations, validated and resolved once. Importing this needs no torch.

`resolve_engine_config` turns what users write (keywords, JSON, flags) into an `EngineConfig`; a drafter is
described by a `SpeculativeConfig`. Every error is a `ConfigError` that names the field and the value.
"""

from draftwise.config.engine import ENGINE_OPTIONS, EngineConfig
from draftwise.config.limits import LIMIT_NAMES, RequestLimits
from draftwise.config.resolve import EMBEDDED_NUM_SPECULATIVE_TOKENS, resolve_engine_config
from draftwise.config.speculative import SpeculativeConfig

__all__ = [
    "EngineConfig",
    "RequestLimits",
    "LIMIT_NAMES",
    "SpeculativeConfig",
    "resolve_engine_config",
    "ENGINE_OPTIONS",
    "EMBEDDED_NUM_SPECULATIVE_TOKENS",
]
