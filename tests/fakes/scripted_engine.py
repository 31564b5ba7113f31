"""An engine that says what it is told to, piece by piece: for what a random model would never say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from draftwise.adapt.controller import ControlStats
from draftwise.config import EngineConfig, resolve_engine_config
from draftwise.engine.chats import chat_prompt
from draftwise.engine.outputs import (
    CompletionOutput,
    EngineStats,
    Guarantees,
    RequestMetrics,
    RequestOutput,
    SpeculationMetrics,
)
from draftwise.errors import EngineDeadError
from draftwise.sampling.params import SamplingParams


class ScriptedEngine:
    """Answers every prompt with ``pieces``, one output per piece; ``hang``: and then with nothing more."""

    def __init__(self, model: str, tokenizer: Any, pieces: Sequence[str], *, hang: bool = False) -> None:
        self.pieces = list(pieces)
        self.hang = hang
        self.is_alive = True
        self.aborted: list[str] = []
        self.closed: list[str] = []
        self.params: list[SamplingParams] = []
        self.prompts: list[Any] = []
        self.max_model_len = 512
        self.guarantees = Guarantees(True, True, True)
        self.config: EngineConfig = resolve_engine_config(model=model)
        self._tokenizer = tokenizer
        self.streams: dict[str, ScriptedStream] = {}

    def submit(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        keep_trace: bool | None = None,
        lora_request: Any = None,
    ) -> ScriptedStream:
        assert sampling_params is not None and request_id is not None
        self.params.append(sampling_params)
        self.prompts.append(prompt)
        self.streams[request_id] = ScriptedStream(self, request_id, sampling_params)
        return self.streams[request_id]

    def die(self) -> None:
        """Call it in the event loop."""
        self.is_alive = False
        for stream in self.streams.values():
            stream.ended.set()

    def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        self.streams[request_id].ended.set()
        return True

    def abort_all(self) -> int:
        running = [name for name, stream in self.streams.items() if not stream.ended.is_set()]
        return sum(self.abort(name) for name in running)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        limits: dict[str, Any] = {
            "limits": self.config.request_limits,
            "max_model_len": self.max_model_len,
        }
        return chat_prompt(
            self._tokenizer, messages, **{"tools": None, "chat_template": None, **options, **limits}
        )

    def get_tokenizer(self) -> Any:
        return self._tokenizer

    def stats(self) -> EngineStats:
        zero: dict[str, Any] = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
        return EngineStats(
            **{
                **zero,
                "num_blocks": 1,
                "finish_reasons": {},
                "drafter_failures": {},
                "adapters": None,
                "speculation": SpeculationMetrics(),
                "control": ControlStats(),
            }
        )

    def observe(self, observer: Any) -> None:
        pass

    def reset_prefix_cache(self) -> bool:
        return True


class ScriptedStream:
    def __init__(self, engine: ScriptedEngine, request_id: str, params: SamplingParams) -> None:
        self.engine = engine
        self.request_id = request_id
        self.params = params
        self.ended = asyncio.Event()

    prepared = True

    async def ready(self) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        pieces = self.engine.pieces
        if self.params.output_kind == "final_only":
            pieces = ["".join(pieces)]
        for i, piece in enumerate(pieces):
            await asyncio.sleep(0)
            last = i == len(pieces) - 1 and not self.engine.hang
            yield self._output(piece, "stop" if last else None)
        if self.engine.hang:
            await self.ended.wait()
            if not self.engine.is_alive:
                raise EngineDeadError("the engine failed: scripted")
            yield self._output("", "abort")

    def pieces(self) -> AsyncIterator[RequestOutput]:
        return self.__aiter__()

    def _output(self, text: str, finish: str | None) -> RequestOutput:
        completions = tuple(
            CompletionOutput(i, text, tuple(text.encode()), finish) for i in range(self.params.n)
        )
        return RequestOutput(
            self.request_id, None, (1, 2, 3), completions, finish is not None, RequestMetrics(0.0)
        )

    def close(self) -> None:
        self.engine.closed.append(self.request_id)
