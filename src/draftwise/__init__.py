"""Draftwise: LLM inference in which speculative decoding is the normal way to decode.

The names below are the public interface; they are loaded on first use, so that ``import draftwise`` is quick.
"""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = False  # without importing typing: a command is to begin quickly (draftwise.cli.signals)
if TYPE_CHECKING:
    from typing import Any

    from draftwise.config import SpeculativeConfig as SpeculativeConfig
    from draftwise.config.lora import LoRARequest as LoRARequest
    from draftwise.engine.async_llm import AsyncLLM as AsyncLLM
    from draftwise.engine.llm import LLM as LLM
    from draftwise.engine.outputs import CompletionOutput as CompletionOutput
    from draftwise.engine.outputs import RequestOutput as RequestOutput
    from draftwise.errors import ConfigError as ConfigError
    from draftwise.errors import DraftwiseError as DraftwiseError
    from draftwise.errors import EngineDeadError as EngineDeadError
    from draftwise.errors import ModelLoadError as ModelLoadError
    from draftwise.errors import RequestError as RequestError
    from draftwise.models.registry import register_model as register_model
    from draftwise.propose.registry import register_proposer as register_proposer
    from draftwise.sampling.params import SamplingParams as SamplingParams
    from draftwise.verify.registry import register_verifier as register_verifier

_EXPORTS = {
    "LLM": "draftwise.engine.llm",
    "AsyncLLM": "draftwise.engine.async_llm",
    "SamplingParams": "draftwise.sampling.params",
    "LoRARequest": "draftwise.config.lora",
    "SpeculativeConfig": "draftwise.config",
    "RequestOutput": "draftwise.engine.outputs",
    "CompletionOutput": "draftwise.engine.outputs",
    "DraftwiseError": "draftwise.errors",
    "ConfigError": "draftwise.errors",
    "ModelLoadError": "draftwise.errors",
    "RequestError": "draftwise.errors",
    "EngineDeadError": "draftwise.errors",
    "register_proposer": "draftwise.propose.registry",
    "register_verifier": "draftwise.verify.registry",
    "register_model": "draftwise.models.registry",
}

__all__ = [*_EXPORTS, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'draftwise' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
