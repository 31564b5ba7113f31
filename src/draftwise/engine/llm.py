"""`LLM`: the synchronous facade."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
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
from draftwise.engine.progress import RequestProgress, on_terminal
from draftwise.engine.prompts import PromptLike, all_prompts, own_params, unlike_params
from draftwise.engine.surroundings import check_real, own_device
from draftwise.engine.turns import Turns
from draftwise.errors import RequestError, shown
from draftwise.sampling.params import SamplingParams


class LLM(OwnSteps, Inspection, Absent):
    """A model, its drafters, and an engine that generates with them.

    ``model`` is a local folder, a GGUF file or a hub id; omitted, it is the embedded demo model with its MTP layer,
    which drafts, and its draft model. Keywords are those of `EngineConfig`, above all ``speculative_config``.

    Threads may share it: their calls of `generate` and `chat` take turns. `AsyncLLM` serves callers at once.

    Raises `ConfigError` for settings, `ModelLoadError` for checkpoints.

        with LLM("path/to/model", speculative_config={"method": "ngram"}) as llm:
            print(llm.generate("def main(", SamplingParams(max_tokens=32))[0].outputs[0].text)
    """

    def __init__(self, model: str | None = None, *, keep_trace: bool = False, **options: Any) -> None:
        """``keep_trace``: remember every verified tree in the outputs' ``trace`` (for reports; costs memory)."""
        self._turns = Turns()
        super().__init__()
        with lifetime.computing():
            self._engine = build_engine(
                check_alone(resolve_engine_config(model=model, **options)), keep_trace=keep_trace
            )

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> Self:
        """An engine with the options of an `EngineArgs`."""
        return cls(**engine_args.given())

    # ------------------------------------------------------------------------------------------- generating

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        priority: Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or several; answers in their order.

        ``sampling_params``: one for all or one each. ``use_tqdm``: progress bar on stderr (default: when there are
        several prompts and stderr is a terminal). ``priority``: lower values first. ``lora_request``: an adapter for
        all, or one (or None) each; read when it is first named. Prompts with more than ``max_loras`` of them wait for
        one another. All prompts are validated before any is run.

        Raises RequestError for an invalid request (nothing was run), EngineDeadError if the engine was closed or
        fails. A request that fails while it runs is answered with ``finish_reason == "error"``.
        What a handler of a signal raises (Ctrl-C, an alarm) ends the call between two steps; the engine stays usable.
        """
        many = all_prompts(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [own_params(sampling_params)] * len(many)
        elif isinstance(sampling_params, Mapping | str) or not isinstance(sampling_params, Iterable):
            raise unlike_params(sampling_params)
        else:
            params = [own_params(p) for p in sampling_params]
        if len(params) != len(many):
            raise RequestError(f"{len(many)} prompts but {len(params)} sampling_params")
        if isinstance(priority, int):
            raise RequestError("priority is a list, with a number for each prompt")
        ranks = [0] * len(many) if priority is None else list(priority)
        if len(ranks) != len(many):
            raise RequestError(f"{len(many)} prompts but {len(ranks)} priorities")
        adapters = _one_each(lora_request, len(many))
        check_real(RequestError)
        with self._turns.take(), own_device():
            engine = self._alive()
            groups = [
                engine.processor.group(
                    prompt, p, priority=rank, lease=engine.adapters.lease(adapter, at_once)
                )
                for prompt, p, rank, adapter in zip(many, params, ranks, adapters, strict=True)
            ]
            for group in groups:
                for request in group.requests:
                    engine.core.scheduler.check(request.num_prompt, request.max_total)
            show = use_tqdm if use_tqdm is not None else len(groups) > 1 and on_terminal()
            with _progress(sum(len(group.requests) for group in groups) if show else 0) as progress:
                self._run(groups, progress)
            engine.adapters.sweep(at_once)
        return [group.output() for group in groups]

    def _run(self, groups: Sequence[RequestGroup], progress: RequestProgress | None) -> None:
        engine = self._alive()
        requests = [request for group in groups for request in group.requests]
        open_rids = {request.rid for request in requests}
        with WholeSteps(lambda: engine.core.computing) as steps:
            try:
                with torch.inference_mode(), engine.core.executor.many_steps():
                    for request in requests:
                        request.read_at_end = True
                        engine.core.add(request)
                    for group in groups:
                        group.lease = None
                    # Nothing is under way afterwards: a process may fork then.
                    while open_rids or engine.core.in_flight:
                        for update in engine.core.step():
                            if update.request.rid not in open_rids:
                                continue  # it ended with an earlier call that was broken off
                            if update.finished:
                                open_rids.discard(update.request.rid)
                            if progress is not None:
                                progress.update(update.num_new, update.finished)
                        steps.check()
            except BaseException as error:
                self._broken_off(error, open_rids, asked=steps.broken_off)
                raise

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several, through the model's chat template.

        A message's content is a text, or a list of parts of type "text". ``continue_final_message``: go on with the
        last message, not with a new one. ``chat_template_kwargs``: further variables of the template, such as
        ``enable_thinking``. ``chat_template_content_format``: "auto" or "string"; templates get contents as text.

        Raises RequestError if the model has no chat template and none is given, and what `generate` raises.
        """
        if chat_template_content_format not in ("auto", "string"):
            raise RequestError(
                f"chat_template_content_format is {shown(chat_template_content_format)}; it must be auto or string: "
                "templates get contents as text"
            )
        options = {} if chat_template_kwargs is None else chat_template_kwargs
        if continue_final_message and isinstance(options, Mapping):
            options = {**options, "continue_final_message": True}
        conversations: list[Any] = list(messages)
        if conversations and isinstance(conversations[0], Mapping):
            conversations = [conversations]
        prompts = [
            self.apply_chat_template(
                c,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                tools=tools,
                template_options=options,
            )
            for c in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    # ------------------------------------------------------------------------------------------ what is kept

    def reset_drafters(self) -> None:
        """Make drafters forget what they learned from past requests (method ``suffix``: their outputs)."""
        with self._turns.take():
            super().reset_drafters()

    # ------------------------------------------------------------------------------------------- life cycle

    def close(self) -> None:
        """Release models and memory, when no thread generates any more. Closing twice is fine."""
        with self._turns.take(), WholeSteps():
            if self._engine is not None:
                self._engine.core.close()
                self._engine = None

    def after_fork_in_child(self) -> None:
        self._turns = Turns()  # threads that are gone may hold the old one
        super().after_fork_in_child()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def _progress(total: int) -> Iterator[RequestProgress | None]:
    """A bar for so many requests; none for 0."""
    if not total:
        yield None
        return
    progress = RequestProgress(total)
    try:
        yield progress
    finally:
        progress.close()


def _one_each(
    given: LoRARequest | Sequence[LoRARequest | None] | None, count: int
) -> list[LoRARequest | None]:
    if given is None or isinstance(given, LoRARequest):
        return [given] * count
    found = list(given)
    if len(found) != count:
        raise RequestError(f"{count} prompts but {len(found)} lora_requests")
    return found
