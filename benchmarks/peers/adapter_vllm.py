"""vLLM's CPU build. One engine has one method: the driver starts a worker for each."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process: no second one to wake
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
from channel import Engine, Generated, Load, Unsupported, serve
from vllm import LLM, SamplingParams, __version__
from vllm.inputs import TokensPrompt


class VLLM(Engine):
    """bf16, from the same folders as Draftwise."""

    def load(self, load: Load) -> dict[str, Any]:
        (self.method,) = load.methods
        speculative: dict[str, Any] | None = None
        if self.method == "ngram":
            speculative = {
                "method": "ngram",
                "num_speculative_tokens": load.num_draft,
                "prompt_lookup_max": 4,
                "prompt_lookup_min": 2,
            }
        elif self.method == "suffix":
            speculative = {"method": "suffix"}
        elif self.method == "draft_model":
            speculative = {
                "method": "draft_model",
                "model": load.draft,
                "num_speculative_tokens": load.num_draft,
            }
        elif self.method != "plain":
            raise Unsupported(f"{self.method} is not measured with vLLM")
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{load.threads - 1}"
        passes = load.max_len > 1024
        self.llm = LLM(
            model=load.model,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=load.max_len,
            max_num_seqs=max(16, load.batch),
            # a prompt is one pass, as it is in the other engines
            max_num_batched_tokens=max(2048, load.max_len),
            # room for as many requests of full length, not for a whole gigabyte
            num_gpu_blocks_override=max(16, load.batch) * -(-load.max_len // 128) + 8,
            enable_prefix_caching=passes,
            speculative_config=speculative,
            disable_log_stats=True,
            seed=0,
        )
        self.random = np.random.default_rng(0)
        self.contexts: dict[int, list[int]] = {}
        self.asked = 0
        return {"vllm-cpu": __version__}

    def _prompt(self, tokens: int) -> list[int]:
        return list(self.random.integers(10, 4000, tokens).tolist())

    def step(self, context: int, rows: int, repeat: int) -> list[float]:
        """There is no way to ask for a pass over given tokens: this is a decoding step of ``rows`` requests."""
        prompt = self.contexts.setdefault(context, self._prompt(context))
        engine = self.llm.llm_engine
        params = SamplingParams(temperature=0.0, max_tokens=repeat + 3, ignore_eos=True, detokenize=False)
        for _ in range(rows):
            self.asked += 1
            engine.add_request(str(self.asked), TokensPrompt(prompt_token_ids=prompt), params)
        times: list[float] = []
        done: set[str] = set()
        while engine.has_unfinished_requests():
            start = time.perf_counter()
            outputs = engine.step()
            seconds = time.perf_counter() - start
            decoding = [o for o in outputs if len(o.outputs[0].token_ids) > 1]
            # all of them decode in this step, and none of them has ended before it
            if len(decoding) == rows == len(outputs) and not done:
                times.append(seconds)
            done |= {o.request_id for o in outputs if o.finished}
        return times[1:][:repeat]

    def prefill(self, tokens: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        prompt = TokensPrompt(prompt_token_ids=self._prompt(tokens))
        start = time.perf_counter()
        self.llm.generate([prompt], params, use_tqdm=False)
        return time.perf_counter() - start

    def _forget_outputs(self) -> None:
        """Empty the cache of outputs in which suffixes are looked up. Rounds repeat prompts: an answer of one round
        would be known word for word in the next, as no user would see it."""
        core = self.llm.llm_engine.engine_core.engine_core
        cache = core.model_executor.driver_worker.worker.model_runner.drafter.suffix_cache
        for request in list(cache.active_requests):
            cache.stop_request(request)
        for request in list(cache.cached_requests):
            cache.evict_cached_response(request)

    def generate(
        self, prompts: Sequence[Sequence[int]], tokens: int, method: str, temperature: float
    ) -> Generated:
        assert method == self.method
        if method == "suffix":
            self._forget_outputs()
        params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, detokenize=False)
        given = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
        start = time.perf_counter()
        outputs = self.llm.generate(given, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return Generated(seconds, [list(output.outputs[0].token_ids) for output in outputs])


if __name__ == "__main__":
    serve(VLLM())
