"""What an engine says of itself and of prompts, the same behind every interface."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from draftwise.config import EngineConfig
from draftwise.engine.builder import Engine, tokenizer_of
from draftwise.engine.chats import chat_prompt
from draftwise.engine.defaults import default_params
from draftwise.engine.group import speculation_metrics
from draftwise.engine.metric_list import Metric, metric_list
from draftwise.engine.outputs import EngineStats, Guarantees
from draftwise.sampling.params import SamplingParams


class Inspection:
    """Part of `LLM`, `LLMEngine` and `AsyncLLM`. Nothing here changes the engine."""

    @abstractmethod
    def _inspected(self) -> Engine:
        """The engine that is asked. Raises EngineDeadError if there is none any more."""

    @property
    def config(self) -> EngineConfig:
        """The resolved configuration."""
        return self._inspected().config

    @property
    def guarantees(self) -> Guarantees:
        """Which promises hold for this engine as configured."""
        return self._inspected().guarantees

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its output together."""
        return self._inspected().processor.max_model_len

    @property
    def vocab_size(self) -> int:
        """The number of token ids: those of prompts must be smaller."""
        return self._inspected().processor.vocab_size

    def get_tokenizer(self) -> Any:
        """The Transformers tokenizer."""
        return tokenizer_of(self._inspected())

    def get_default_sampling_params(self) -> SamplingParams:
        """Sampling parameters from the checkpoint's generation_config.json (temperature, top_p, ...), else the
        defaults."""
        return default_params(self._inspected().config)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Messages -> a prompt of token ids, as the model's chat template says; ``template_options``: further
        variables of the template. A long conversation takes long; `AsyncLLM.render_chat` does not hold up its event
        loop. Raises RequestError."""
        engine = self._inspected()
        return chat_prompt(
            tokenizer_of(engine),
            messages,
            limits=engine.processor.limits,
            max_model_len=engine.processor.max_model_len,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            template_options=template_options,
        )

    def stats(self) -> EngineStats:
        """Blocks, queue and totals now."""
        return engine_stats(self._inspected())

    def get_metrics(self, prefix: str = "vllm:") -> list[Metric]:
        """`stats` as a list of counters and gauges under vLLM's names, such as "vllm:spec_decode_num_drafts"."""
        return metric_list(self.stats(), {"model_name": str(self.config.model)}, prefix)

    def check_integrity(self) -> None:
        """Raise AssertionError if the engine's books do not agree."""
        self._inspected().core.check_integrity()


def engine_stats(engine: Engine) -> EngineStats:
    """A consistent snapshot, taken under the engine's lock."""
    core = engine.core
    with core.lock:
        kv, totals = core.scheduler.kv.stats(), core.totals
        return EngineStats(
            num_blocks=core.scheduler.kv.num_blocks,
            num_free_blocks=core.scheduler.kv.num_free,
            num_used_blocks=core.scheduler.kv.num_used,
            block_size=core.scheduler.kv.block_size,
            kv_cache_bytes=engine.kv_cache_bytes,
            num_running=core.scheduler.num_running,
            num_waiting=core.scheduler.num_waiting,
            num_steps=totals.num_steps,
            num_preemptions=core.scheduler.num_preemptions,
            num_requests_finished=totals.num_requests_finished,
            finish_reasons=dict(totals.finish_reasons),
            num_prompt_tokens=totals.num_prompt_tokens,
            num_generation_tokens=totals.num_generation_tokens,
            prefix_cache_queries=kv.prefix_queries,
            prefix_cache_hits=kv.prefix_hits,
            step_time=totals.step_time,
            forward_time=totals.forward_time,
            draft_forward_time=totals.draft_forward_time,
            draft_time=totals.draft_time,
            verify_time=totals.verify_time,
            speculation=speculation_metrics(core.speculation_counts()),
            control=core.scheduler.control_stats(),
            drafter_failures=dict(totals.drafter_failures),
            adapters=engine.adapters.stats(),
        )
