"""Quantised weights in the whole engine: the same greedy text with and without speculation, in any company."""

from __future__ import annotations

import pytest

from draftwise import LLM, SamplingParams
from draftwise.errors import ConfigError
from tests.native import native_or_skip

PROMPTS = [
    "import os\n\n\nclass Path:\n    def __init__(self, name):\n",
    "def read(self, size=-1):\n    if self.closed:\n",
    "for key, value in sorted(items.items()):\n    ",
    'class Error(Exception):\n    """Base class for exceptions in this module."""\n\n\nclass ',
]


def greedy(llm: LLM, prompts: list[str], method: str) -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, speculation={"method": method})
    return [tuple(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize(
    "quantization",
    [  # each width and each kind of activations; --all: together
        "int8",
        pytest.param("int8_weight_only", marks=pytest.mark.slow),
        pytest.param("int4", marks=pytest.mark.slow),
        "int4_weight_only",
    ],
)
def test_same_text_with_and_without_speculation(quantization: str) -> None:
    native_or_skip()
    with LLM(quantization=quantization, speculation_control="static") as llm:
        assert llm.guarantees.same_bits
        alone = [greedy(llm, [prompt], "none")[0] for prompt in PROMPTS]
        assert greedy(llm, PROMPTS, "none") == alone
        for method in ("ngram", "draft_model"):
            assert greedy(llm, PROMPTS, method) == alone
            assert greedy(llm, PROMPTS[:1], method) == alone[:1]
    assert len(set(alone)) == len(alone)


def test_the_draft_model_has_a_format_of_its_own() -> None:
    native_or_skip()
    from draftwise.config.embedded import embedded_path

    drafter = {"method": "draft_model", "model": str(embedded_path("draft")), "num_speculative_tokens": 3}
    with (
        LLM(speculation_control="static") as plain,
        LLM(
            speculative_config={**drafter, "quantization": "int8_dynamic"}, speculation_control="static"
        ) as llm,
    ):
        assert greedy(llm, PROMPTS[:2], "draft_model") == greedy(plain, PROMPTS[:2], "none")


def test_what_a_format_needs() -> None:
    native_or_skip()
    with pytest.raises(ConfigError, match="int4_weight_only needs dtype bfloat16"):
        LLM(quantization="int4_weight_only", dtype="float32", speculation_control="static")
    with pytest.raises(ConfigError, match="int8_dynamic needs the native kernels"):
        LLM(quantization="int8", dtype="float16", speculation_control="static")
    with LLM(quantization="int4", dtype="float32", speculation_control="static") as llm:
        assert llm.guarantees.same_bits


@pytest.mark.parametrize(
    ("name", "hint"), [("int4_g48", "32, 64, 128"), ("int8_dynamc", "int8_dynamic"), ("fp8", "Triton")]
)
def test_unknown_formats(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        LLM(quantization=name, speculation_control="static")
