"""A scripted engine whose pieces come with the steps that made them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from draftwise.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from draftwise.sched.request import StepTrace
from tests.fakes.scripted_engine import ScriptedEngine, ScriptedStream

Piece = tuple[str, tuple[StepTrace, ...]]


class TracedEngine(ScriptedEngine):
    """The i-th request gets ``answers[i]``: pieces of text with the steps that made them. Tokens are bytes."""

    def __init__(self, model: str, tokenizer: Any, answers: tuple[list[Piece], ...], **more: Any) -> None:
        super().__init__(model, tokenizer, (), **more)
        self.answers = list(answers)

    def submit(self, prompt: Any, sampling_params: Any = None, request_id: Any = None, **more: Any) -> Any:
        super().submit(prompt, sampling_params, request_id)
        self.streams[request_id] = stream = TracedStream(self, request_id, sampling_params)
        stream.answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return stream


class TracedStream(ScriptedStream):
    answer: list[Piece]

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        last = len(self.answer) - 1
        for i, (text, steps) in enumerate(self.answer):
            yield self._traced(text, steps, "stop" if i == last and not self.engine.hang else None)
        if self.engine.hang:
            await self.ended.wait()
            yield self._traced("", (), "abort")

    def _traced(self, text: str, steps: tuple[StepTrace, ...], finish: str | None) -> RequestOutput:
        ids = tuple(token for step in steps for token in step.token_ids)
        completion = CompletionOutput(0, text, ids, finish, trace=steps)
        return RequestOutput(
            self.request_id,
            None,
            (1, 2, 3),
            (completion,),
            finish is not None,
            RequestMetrics(0.0, itl=0.002),
        )


def chain(method: str, draft: bytes, accepted: int, own: str) -> StepTrace:
    """A step that drafted bytes, of which some were accepted; ``own`` the target's."""
    kept = tuple(draft[:accepted]) + tuple(own.encode())
    return StepTrace(method, tuple(draft), tuple(range(-1, len(draft) - 1)), tuple(range(accepted)), kept)


def plain(text: bytes) -> tuple[StepTrace, ...]:
    return tuple(StepTrace("none", (), (), (), (byte,)) for byte in text)
