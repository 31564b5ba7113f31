"""Draftwise itself, in the driver's environment."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from channel import Engine, Generated, Load, Unsupported, serve

from draftwise import LLM, SamplingParams, __version__
from draftwise.config.embedded import embedded_path
from draftwise.models.inputs import RowInput, build_step_input

QUANTIZATION = {"bf16": None, "int8-weight-only": "int8_weight_only", "int4-weight-only": "int4_weight_only"}
HEADS = ("eagle3", "medusa", "mtp")  # shipped for the embedded target
BLOCK = 16


class Draftwise(Engine):
    def load(self, load: Load) -> dict[str, Any]:
        torch.set_num_threads(load.threads)
        drafters: list[dict[str, Any]] = []
        for method in load.methods:
            if method == "draft_model":
                drafters.append(
                    {"method": method, "model": load.draft, "num_speculative_tokens": load.num_draft}
                )
            elif method in HEADS:
                head = str(embedded_path(method))
                drafters.append({"method": method, "model": head, "num_speculative_tokens": load.num_draft})
            elif method != "plain":
                drafters.append({"method": method})
        passes = not drafters and load.batch == 1 and load.max_len > 1024
        self.llm = LLM(
            load.model,
            dtype="bfloat16",
            quantization=QUANTIZATION.get(load.format, load.format),
            speculative_config=drafters or None,
            max_model_len=load.max_len,
            max_num_seqs=max(1, load.batch),
            num_kv_blocks=max(1, load.batch) * (-(-load.max_len // BLOCK) + 8),
            num_threads=load.threads,
            skip_tokenizer_init=passes,
        )
        engine = self.llm._engine
        assert engine is not None
        self.model = engine.model
        self.storage = engine.core.executor._storage  # type: ignore[attr-defined]
        self.table = np.arange(self.storage.num_blocks, dtype=np.int32)
        self.random = np.random.default_rng(0)
        self.cached = 0
        return {"draftwise": __version__, "torch": torch.__version__, "same_bits": self.model.same_bits}

    def step(self, context: int, rows: int, repeat: int) -> list[float]:
        with torch.inference_mode():
            if self.cached < context:
                self._pass(self._tokens(context), 0, last=True)
                self.cached = context
            # the slots behind the context are written again and again; those of the context stay
            self.cached = context
            return [self._pass(self._tokens(rows), context, last=False) for _ in range(repeat)]

    def prefill(self, tokens: int) -> float:
        with torch.inference_mode():
            self.cached = 0
            return self._pass(self._tokens(tokens), 0, last=True)

    def _tokens(self, count: int) -> list[int]:
        return list(self.random.integers(10, self.model.config.vocab_size, count).tolist())

    def _pass(self, tokens: list[int], context: int, *, last: bool) -> float:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as the engine does: see `LocalExecutor`
        start = time.perf_counter()
        batch = build_step_input([RowInput(tokens, context, self.table)], BLOCK, torch.device("cpu"))
        _, logits = self.model.forward_logits(batch, self.storage, [len(tokens) - 1] if last else None)
        assert logits.shape[0] == (1 if last else len(tokens))
        seconds = time.perf_counter() - start
        torch.set_num_threads(threads)
        return seconds

    def generate(
        self, prompts: Sequence[Sequence[int]], tokens: int, method: str, temperature: float
    ) -> Generated:
        params = SamplingParams(
            temperature=temperature,
            max_tokens=tokens,
            ignore_eos=True,
            speculation={"method": "none" if method == "plain" else method},
        )
        self.llm.reset_prefix_cache()
        self.llm.reset_drafters()
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        start = time.perf_counter()
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return Generated(seconds, [list(output.outputs[0].token_ids) for output in outputs])

    def bandwidth(self) -> float:
        from draftwise.kernels.cpu.library import native_library
        from draftwise.kernels.cpu.linear import LinearKernels
        from draftwise.kernels.cpu.pool import ThreadPool
        from draftwise.kernels.cpu.probe import Probe

        library = native_library()
        if library is None:
            raise Unsupported("no native kernels")
        if not hasattr(self, "probe"):
            pool = ThreadPool(library, torch.get_num_threads())
            kernels = LinearKernels(library, pool)
            # 512 MiB in bfloat16: no cache holds a share of it that counts
            big = torch.zeros(32768, 8192, dtype=torch.bfloat16)
            self.probe = Probe(library, pool), [kernels.pack(big, None)]
        probe, weights = self.probe
        return max(probe.read_weights(weights) for _ in range(2))


if __name__ == "__main__":
    serve(Draftwise())
