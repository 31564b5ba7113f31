"""llama.cpp through llama-cpp-python: passes through its C interface, generation through its Python class."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any

import llama_cpp
import numpy as np
from channel import Engine, Generated, Load, Unsupported, serve
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding


class LlamaCpp(Engine):
    """Models are GGUF files, whose weights already have the format asked for. The Python interface speculates by
    prompt lookup only."""

    def load(self, load: Load) -> dict[str, Any]:
        self.given = load
        self.random = np.random.default_rng(0)
        self.models = {method: self._load(method) for method in load.methods}
        self.cached = 0
        return {"llama-cpp-python": llama_cpp.__version__}

    def _load(self, method: str) -> Llama:
        draft = None
        if method == "ngram":
            draft = LlamaPromptLookupDecoding(max_ngram_size=3, num_pred_tokens=self.given.num_draft)
        elif method != "plain":
            raise Unsupported(f"{method} is not part of llama-cpp-python")
        return Llama(
            self.given.model,
            n_ctx=self.given.max_len,
            n_batch=max(512, self.given.max_len // 4),
            n_ubatch=512,
            n_threads=self.given.threads,
            n_threads_batch=self.given.threads,
            draft_model=draft,
            # only generation with drafts keeps logits of more than the last row in Python's hands
            logits_all=draft is not None,
            verbose=False,
        )

    # -------------------------------------------------------------------------------------------- passes

    def _decode(self, tokens: Sequence[int], start: int, *, every: bool) -> float:
        """One call of llama_decode over tokens at positions start, start + 1, ..."""
        context = self.models["plain"].ctx
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = start + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = every or i == len(tokens) - 1
        begin = time.perf_counter()
        failed = llama_cpp.llama_decode(context, batch)
        # waits for the pass; its first logit
        value = ctypes.cast(llama_cpp.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))[0]
        seconds = time.perf_counter() - begin
        llama_cpp.llama_batch_free(batch)
        if failed or value != value:
            raise RuntimeError(f"llama_decode answered {failed}, logit {value}")
        return seconds

    def _forget(self, position: int) -> None:
        """Drop what is cached from ``position`` on."""
        memory = llama_cpp.llama_get_memory(self.models["plain"].ctx)
        llama_cpp.llama_memory_seq_rm(memory, 0, position, -1)

    def _fill(self, tokens: int) -> float:
        self._forget(0)
        seconds = 0.0
        size = self.models["plain"].n_batch
        for start in range(0, tokens, size):
            count = min(size, tokens - start)
            seconds += self._decode(self._tokens(count), start, every=False)
        return seconds

    def _tokens(self, count: int) -> list[int]:
        return list(self.random.integers(300, 4000, count).tolist())

    def step(self, context: int, rows: int, repeat: int) -> list[float]:
        if self.cached < context:
            self._fill(context)
            self.cached = context
        times = []
        for _ in range(repeat):
            self._forget(context)
            times.append(self._decode(self._tokens(rows), context, every=True))
        self.cached = context
        self._forget(context)
        return times

    def prefill(self, tokens: int) -> float:
        self.cached = 0
        return self._fill(tokens)

    # ---------------------------------------------------------------------------------------- generation

    def generate(
        self, prompts: Sequence[Sequence[int]], tokens: int, method: str, temperature: float
    ) -> Generated:
        model = self.models[method]
        out = []
        start = time.perf_counter()
        for prompt in prompts:
            model.reset()
            stream = model.generate(
                list(prompt), temp=temperature, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0, reset=True
            )
            out.append([int(token) for token in islice(stream, tokens)])
        return Generated(time.perf_counter() - start, out)


if __name__ == "__main__":
    serve(LlamaCpp())
