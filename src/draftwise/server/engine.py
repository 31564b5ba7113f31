"""The interface that the server needs of an engine: `AsyncLLM`, or a test's stand-in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from draftwise.config import EngineConfig
from draftwise.config.lora import LoRARequest
from draftwise.engine.group import TextPiece
from draftwise.engine.outputs import EngineStats, Guarantees, RequestOutput
from draftwise.metrics.books import Books
from draftwise.sampling.params import SamplingParams
from draftwise.sched.request import RequestUpdate


class OutputStream(Protocol):
    """Outputs of one prompt. Closing it aborts what still runs."""

    @property
    def prepared(self) -> bool: ...
    async def ready(self) -> None: ...
    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...
    def pieces(self) -> AsyncIterator[RequestOutput | TextPiece]: ...
    def close(self) -> None: ...


class ServedEngine(Protocol):
    """See `AsyncLLM` for what each of these does."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def guarantees(self) -> Guarantees: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def is_alive(self) -> bool: ...
    def submit(
        self,
        prompt: str | Mapping[str, Any],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        keep_trace: bool | None = None,
        lora_request: LoRARequest | None = None,
    ) -> OutputStream: ...
    async def add_lora(self, lora_request: LoRARequest) -> None: ...
    async def remove_lora(self, lora_int_id: int) -> bool: ...
    def abort(self, request_id: str) -> bool: ...
    def abort_all(self) -> int: ...
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]: ...
    def get_tokenizer(self) -> Any: ...
    def stats(self) -> EngineStats: ...
    def reset_prefix_cache(self) -> bool: ...


class ServedAlone(ServedEngine, Protocol):
    """One engine."""

    def observe(self, observer: Callable[[Sequence[RequestUpdate]], None]) -> None: ...


@runtime_checkable
class ServedFleet(ServedEngine, Protocol):
    """Several that answer as one: see `FleetEngine`."""

    def attach(self) -> None: ...
    def books(self) -> list[Books]: ...
    def state(self) -> list[dict[str, Any]]: ...
    async def scale(self, count: int) -> None: ...
