"""An engine refuses what is over its limits before it does any work, and goes on serving."""

from __future__ import annotations

import math
from typing import Any

import pytest

from draftwise import LLM, RequestError, SamplingParams
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
    with LLM(
        device="cpu", dtype="float32", num_kv_blocks=64, request_limits=limits, speculation_control="static"
    ) as llm:
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


def test_samples_of_a_prompt_share_its_preparation() -> None:
    """Twice as many samples are not twice as much of it: what is tokenized is so once."""
    with LLM(device="cpu", dtype="float32", num_kv_blocks=64, speculation_control="static") as llm:
        assert llm._engine is not None
        processor = llm._engine.processor
        watched = processor.tokenizer = Watched(processor.tokenizer)
        counts = []
        for n in (32, 64):
            watched.num_encoded = 0
            params = SamplingParams(n=n, stop=["x" * 10_000], bad_words=["two words", "more"])
            group = processor.group("import os\n", params)
            assert len({id(request.bad_words_ids) for request in group.requests}) == 1
            assert len({id(request.stop_token_ids) for request in group.requests}) == 1
            counts.append(watched.num_encoded)
        assert counts == [5, 5], "the prompt, and each word in two forms"


EXTREMES: list[dict[str, Any]] = [
    {"temperature": 1e6},
    {"temperature": 1e-5, "top_p": 1e-300},
    {"temperature": 5e-324},
    {"top_p": 5e-324},
    {"min_p": 5e-324},
    {"min_p": 1.0},
    {"top_k": 2**63 - 1},
    {"repetition_penalty": 1e-3},
    {"repetition_penalty": 1e3},
    {"repetition_penalty": 1e3, "temperature": 1e-5},
    {"presence_penalty": 2.0, "frequency_penalty": -2.0},
    {"logit_bias": dict.fromkeys(range(4000), -100.0)},
    {"logit_bias": {7: 100.0, 8: 5e-324}},
    {"max_tokens": 5, "min_tokens": 5},
    {"temperature": 1e6, "structured_outputs": {"regex": "[ab]*"}},
    {"seed": 2**64 - 1},
    {"seed": -(2**63)},
]


@pytest.mark.parametrize("method", ["none", "ngram", "draft_model", "mtp"])
def test_values_at_the_edges_are_served(method: str) -> None:
    """Whatever is let in gives tokens and finite log-probabilities, with every kind of draft."""
    common = {"max_tokens": 5, "logprobs": 0, "ignore_eos": True, "speculation": {"method": method}}
    with LLM(device="cpu", num_kv_blocks=256, speculation_control="static") as llm:
        params = [SamplingParams(**common | fields) for fields in EXTREMES]
        outputs = llm.generate(["import os\n"] * len(params), params)
        for fields, output in zip(EXTREMES, outputs, strict=True):
            sample = output.outputs[0]
            assert sample.error is None and sample.finish_reason in ("length", "stop"), (fields, sample)
            assert sample.logprobs is not None and len(sample.logprobs) == len(sample.token_ids) > 0
            assert all(math.isfinite(p.logprob) for position in sample.logprobs for p in position.values())


def test_half_a_character_of_utf_16_is_no_text() -> None:
    with LLM(device="cpu", num_kv_blocks=64, speculation_control="static") as llm:
        with pytest.raises(RequestError, match="no text that can be encoded"):
            llm.generate("half \ud800")
        with pytest.raises(RequestError, match="no text that can be encoded"):
            llm.chat(
                [{"role": "user", "content": "half \ud800"}],
                chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
            )


def test_trees_are_looked_at_before_they_are_read() -> None:
    with LLM(device="cpu", num_kv_blocks=64, speculation_control="static") as llm:
        for tree, words in (
            ([[0]] * 1_000_000, "1000000 nodes"),
            ([[0] * 1_000_000], "1000000 ranks"),
            ("[" * 1_000_000, "expected a list of paths"),
            ([["x" * 10**6]], "ranks are integers"),
            ([10**5000], "expected a list of paths"),
        ):
            with pytest.raises(RequestError, match=words) as error:
                llm.generate(
                    "a", SamplingParams(speculation={"method": "mtp", "speculative_token_tree": tree})
                )
            assert len(str(error.value)) < 500
        for field in ("num_speculative_tokens", "method", "rule", "x" * 10**6):
            with pytest.raises(RequestError) as error:
                llm.generate("a", SamplingParams(speculation={field: "y" * 10**6}))
            assert len(str(error.value)) < 500
