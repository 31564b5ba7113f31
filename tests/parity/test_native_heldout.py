"""The promise of same bits on real text: held-out code, the embedded pair, every weight format."""

from __future__ import annotations

from typing import Any

import pytest

from draftwise import LLM, SamplingParams
from draftwise.bench.workloads import code_prompts
from draftwise.config.embedded import embedded_path
from draftwise.models.tokenizer import load_tokenizer
from tests.native import native_or_skip

FORMATS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "int8_weight_only": {"quantization": "int8_weight_only"},
    "int4": {"quantization": "int4"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_fifty_heldout_prompts_have_the_same_text_with_every_method(name: str) -> None:
    """50 prompts, 128 greedy tokens: alone without speculation, against ngram and draft_model, alone and by sixteen."""
    native_or_skip()
    tokenizer = load_tokenizer(str(embedded_path("target")))
    prompts = [{"prompt_token_ids": list(ids)} for ids in code_prompts(tokenizer, 50, 48)]
    drafters = [
        {"method": "draft_model", "model": str(embedded_path("draft")), "num_speculative_tokens": 4},
        {"method": "ngram", "num_speculative_tokens": 4},
    ]
    with LLM(
        device="cpu",
        max_num_seqs=16,
        enable_prefix_caching=False,
        speculative_config=drafters,
        speculation_control="static",
        **FORMATS[name],
    ) as llm:
        assert llm.guarantees.same_bits

        def run(method: str, together: bool) -> list[tuple[int, ...]]:
            params = SamplingParams(
                temperature=0, max_tokens=128, ignore_eos=True, speculation={"method": method}
            )
            if together:
                return [out.outputs[0].token_ids for out in llm.generate(prompts, params)]
            return [llm.generate([p], params)[0].outputs[0].token_ids for p in prompts]

        plain = run("none", together=False)
        assert len({ids[:8] for ids in plain}) > 25, "prompts that all end alike would prove little"
        for method in ("none", "draft_model", "ngram"):
            for together in (False, True):
                if method != "none" or together:
                    assert run(method, together) == plain, (method, together)
        counts = llm.stats().speculation
        assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens
