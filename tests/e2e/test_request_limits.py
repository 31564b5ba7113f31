"""An engine refuses what is over its limits before it does any work, and goes on serving."""

from __future__ import annotations

from typing import Any

import pytest

from draftwise import LLM, SamplingParams
from draftwise.errors import LimitError


class Watched:
    """A tokenizer that counts how often it is asked to encode."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_encoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        self.num_encoded += 1
        ids: list[int] = self._tokenizer.encode(*args, **kwargs)
        return ids


def test_what_is_over_a_limit_is_never_tokenized() -> None:
    limits = {"max_stop_strings": 2, "max_prompt_chars": 1000}
    template = "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}"
    with LLM(device="cpu", dtype="float32", num_kv_blocks=64, request_limits=limits) as llm:
        assert llm._engine is not None
        processor = llm._engine.processor
        watched = processor.tokenizer = Watched(processor.tokenizer)
        with pytest.raises(LimitError, match="max_stop_strings"):
            llm.generate("a", SamplingParams(stop=["a", "b", "c"]))
        with pytest.raises(LimitError, match="max_prompt_chars"):
            llm.generate("a" * 1001)
        for text in ("x" * 1001, "x" * 501):  # the second one is too long when it is rendered
            with pytest.raises(LimitError, match="max_prompt_chars"):
                llm.chat([{"role": "user", "content": text}], chat_template=template)
        assert watched.num_encoded == 0
        ok = llm.generate("def main(", SamplingParams(stop=["a", "b"], max_tokens=3, temperature=0))
        assert watched.num_encoded == 1 and ok[0].finished
