"""Draftwise: LLM inference in which speculative decoding is the normal way to decode.

The names below are the public interface; they are loaded on first use, so that ``import draftwise`` is quick. Those
that vLLM has mean what they mean there: ``from draftwise import *`` takes the place of a program's imports from vLLM.
"""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = False  # without importing typing: a command is to begin quickly (draftwise.cli.signals)
if TYPE_CHECKING:
    from typing import Any

    from draftwise.config import SpeculativeConfig as SpeculativeConfig
    from draftwise.config.lora import LoRARequest as LoRARequest
    from draftwise.engine.args import AsyncEngineArgs as AsyncEngineArgs
    from draftwise.engine.args import EngineArgs as EngineArgs
    from draftwise.engine.args import FlexibleArgumentParser as FlexibleArgumentParser
    from draftwise.engine.async_llm import AsyncLLM as AsyncLLM
    from draftwise.engine.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from draftwise.engine.llm import LLM as LLM
    from draftwise.engine.metric_list import Counter as Counter
    from draftwise.engine.metric_list import Gauge as Gauge
    from draftwise.engine.metric_list import Histogram as Histogram
    from draftwise.engine.metric_list import Vector as Vector
    from draftwise.engine.outputs import CompletionOutput as CompletionOutput
    from draftwise.engine.outputs import RequestOutput as RequestOutput
    from draftwise.engine.prompts import TextPrompt as TextPrompt
    from draftwise.engine.prompts import TokensPrompt as TokensPrompt
    from draftwise.engine.stepped import LLMEngine as LLMEngine
    from draftwise.errors import ConfigError as ConfigError
    from draftwise.errors import DraftwiseError as DraftwiseError
    from draftwise.errors import EngineDeadError as EngineDeadError
    from draftwise.errors import ModelLoadError as ModelLoadError
    from draftwise.errors import RequestError as RequestError
    from draftwise.models.registry import register_model as register_model
    from draftwise.propose.registry import register_proposer as register_proposer
    from draftwise.sampling.params import RequestOutputKind as RequestOutputKind
    from draftwise.sampling.params import SamplingParams as SamplingParams
    from draftwise.sampling.structured import StructuredOutputsParams as StructuredOutputsParams
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
    "AsyncEngineArgs": "draftwise.engine.args",
    "EngineArgs": "draftwise.engine.args",
    "FlexibleArgumentParser": "draftwise.engine.args",
    "AsyncLLMEngine": "draftwise.engine.async_llm",
    "LLMEngine": "draftwise.engine.stepped",
    "TextPrompt": "draftwise.engine.prompts",
    "TokensPrompt": "draftwise.engine.prompts",
    "Counter": "draftwise.engine.metric_list",
    "Gauge": "draftwise.engine.metric_list",
    "Histogram": "draftwise.engine.metric_list",
    "Vector": "draftwise.engine.metric_list",
    "RequestOutputKind": "draftwise.sampling.params",
    "StructuredOutputsParams": "draftwise.sampling.structured",
    "register_proposer": "draftwise.propose.registry",
    "register_verifier": "draftwise.verify.registry",
    "register_model": "draftwise.models.registry",
}

__all__ = [*_EXPORTS, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'draftwise' has no attribute {name!r}")
    import importlib

    from draftwise.collector import collector_paused

    with collector_paused():
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
