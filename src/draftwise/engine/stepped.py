"""`LLMEngine`: an engine whose steps the caller runs, for programs written for vLLM's class of this name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch

from draftwise import lifetime
from draftwise.config import resolve_engine_config
from draftwise.config.lora import LoRARequest
from draftwise.engine.absent import Absent
from draftwise.engine.adapters import at_once
from draftwise.engine.builder import build_engine, check_alone
from draftwise.engine.group import RequestGroup
from draftwise.engine.inspection import Inspection
from draftwise.engine.interrupts import WholeSteps
from draftwise.engine.outputs import RequestOutput
from draftwise.engine.own_steps import OwnSteps
from draftwise.engine.prompts import PromptLike, one_prompt, own_params
from draftwise.engine.surroundings import check_real, own_device
from draftwise.errors import RequestError
from draftwise.sampling.params import SamplingParams
from draftwise.sched.request import RequestUpdate


class LLMEngine(OwnSteps, Inspection, Absent):
    """Requests are added one by one, and every call of `step` computes one step for all of them.

        engine = LLMEngine.from_engine_args(EngineArgs(model="path"))
        engine.add_request("0", "def main(", SamplingParams(max_tokens=32))
        while engine.has_unfinished_requests():
            for output in engine.step():
                print(output.request_id, output.outputs[0].text)

    Takes the options of `LLM`. One thread at a time may use it.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        super().__init__()
        self._groups: dict[str, RequestGroup] = {}
        self._names: dict[int, str] = {}  # number of a request -> id of its prompt
        self._outputs: list[RequestOutput] = []  # that nobody has got, because of a signal
        with lifetime.computing():
            self._engine = build_engine(check_alone(resolve_engine_config(model=model, **options)))

    @classmethod
    def from_engine_args(cls, engine_args: Any, usage_context: Any = None) -> Self:
        """An engine with the options of an `EngineArgs`. ``usage_context``: vLLM's telemetry; there is none here."""
        return cls(**engine_args.given())

    def add_request(
        self,
        request_id: str,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a prompt under an id of the caller's; returns the id. Raises RequestError (nothing was queued). After
        Ctrl-C it is queued whole or not at all."""
        engine = self._alive()
        if request_id in self._groups:
            raise RequestError(f"request id {request_id!r} is in use")
        check_real(RequestError)
        lease = engine.adapters.lease(lora_request, at_once)
        chosen = own_params(params)
        group = engine.processor.group(one_prompt(prompt), chosen, request_id, priority, lease=lease)
        for request in group.requests:
            engine.core.scheduler.check(request.num_prompt, request.max_total)
        with WholeSteps(lambda: engine.core.computing):
            for request in group.requests:
                engine.core.add(request)
                self._names[request.rid] = request_id
            group.lease = None
            self._groups[request_id] = group
        return request_id

    def step(self) -> list[RequestOutput]:
        """Compute one step. Returns an output per changed prompt, as its ``output_kind`` asks. What Ctrl-C or
        another signal raises waits for the end of the step, whose outputs then come with those of the next call. A
        second Ctrl-C does not wait for the device: the step is computed again.

        Raises EngineDeadError if the engine was closed or fails.
        """
        engine = self._alive()
        with WholeSteps(lambda: engine.core.computing), own_device(), torch.inference_mode():
            try:
                with lifetime.computing():
                    updates = engine.core.step()
            except BaseException as error:
                self._broken_off(error)
                raise
            self._deliver(updates)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _deliver(self, updates: Sequence[RequestUpdate]) -> None:
        """Make the outputs of a step, and forget who has ended."""
        changed = dict.fromkeys(self._names[u.request.rid] for u in updates if u.request.rid in self._names)
        for name in changed:
            group = self._groups[name]
            if group.finished or group.params.output_kind != "final_only":
                self._outputs.append(group.output(group.params.output_kind))
            if group.finished:
                self._forget(name)
        if changed and not self._groups:
            self._alive().adapters.sweep(at_once)

    def abort_request(self, request_id: str | Sequence[str]) -> None:
        """Stop one request or several; unknown ids are ignored."""
        engine = self._alive()
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        with WholeSteps(lambda: engine.core.computing):
            for name in names:
                if name in self._groups:
                    for request in self._groups[name].requests:
                        engine.core.cancel(request.rid)
                    self._forget(name)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do."""
        return self._alive().core.has_work or bool(self._groups or self._outputs)

    def get_num_unfinished_requests(self) -> int:
        """The number of prompts that run or wait."""
        return len(self._groups)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter, which stays in memory until `remove_lora`; True. Raises RequestError if that cannot be."""
        self._alive().adapters.add(lora_request, at_once)
        return True

    def remove_lora(self, lora_int_id: int) -> bool:
        """Forget an adapter; its requests go on with it. False: there is no adapter of this number."""
        return self._alive().adapters.remove(lora_int_id, at_once)

    def list_loras(self) -> list[LoRARequest]:
        """The loaded adapters."""
        return self._alive().adapters.requests()

    def close(self) -> None:
        """Release models and memory. Closing twice is fine."""
        with WholeSteps():
            if self._engine is not None:
                self._engine.core.close()
                self._engine = None
                self._groups.clear()
                self._names.clear()
                self._outputs.clear()

    def _forget(self, name: str) -> None:
        for request in self._groups.pop(name).requests:
            self._names.pop(request.rid, None)
