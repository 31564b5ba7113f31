"""Hugging Face Transformers: bf16, one request at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from channel import Engine, Generated, Load, Unsupported, serve
from transformers import AutoModelForCausalLM, DynamicCache


class Transformers(Engine):
    def load(self, load: Load) -> dict[str, Any]:
        if load.format != "bf16":
            raise Unsupported(f"no {load.format} weights on CPUs without further packages")
        torch.set_num_threads(load.threads)
        self.given = load
        self.model = self._load(load.model)
        self.draft = None
        if load.draft is not None and "draft_model" in load.methods:
            self.draft = self._load(load.draft)
            self.draft.generation_config.num_assistant_tokens = load.num_draft
            self.draft.generation_config.num_assistant_tokens_schedule = "constant"
            self.draft.generation_config.assistant_confidence_threshold = 0.0
        self.generator = torch.Generator().manual_seed(0)
        self.caches: dict[int, DynamicCache] = {}
        return {"transformers": transformers.__version__, "torch": torch.__version__}

    def _load(self, folder: str) -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        model.generation_config.eos_token_id = None  # exactly as many tokens as asked for
        model.generation_config.pad_token_id = 0
        return model

    def _tokens(self, count: int) -> torch.Tensor:
        return torch.randint(10, 1000, (1, count), generator=self.generator)

    @torch.inference_mode()
    def step(self, context: int, rows: int, repeat: int) -> list[float]:
        cache = self.caches.get(context)
        if cache is None:
            cache = self.caches[context] = DynamicCache()
            self.model(input_ids=self._tokens(context), past_key_values=cache, logits_to_keep=1)
        times = []
        for _ in range(repeat):
            tokens = self._tokens(rows)
            start = time.perf_counter()
            self.model(input_ids=tokens, past_key_values=cache)
            times.append(time.perf_counter() - start)
            cache.crop(-rows)  # takes the newest away
        return times

    @torch.inference_mode()
    def prefill(self, tokens: int) -> float:
        prompt = self._tokens(tokens)
        start = time.perf_counter()
        self.model(input_ids=prompt, past_key_values=DynamicCache(), logits_to_keep=1)
        return time.perf_counter() - start

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], tokens: int, method: str, temperature: float
    ) -> Generated:
        options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": temperature > 0}
        if temperature > 0:
            options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        if method == "ngram":
            options |= {"prompt_lookup_num_tokens": self.given.num_draft}
        elif method == "draft_model":
            options |= {"assistant_model": self.draft}
        elif method != "plain":
            raise Unsupported(f"{method} is not part of Transformers")
        out = []
        start = time.perf_counter()
        for prompt in prompts:
            ids = torch.tensor([list(prompt)])
            made = self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            out.append([int(token) for token in made[0, len(prompt) :]])
        return Generated(time.perf_counter() - start, out)


if __name__ == "__main__":
    serve(Transformers())
