"""Families in every format of weights, with one head: the numbers that the checkpoint stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native import native_or_skip
from tests.parity.formats import (
    CHECKPOINTS,
    COLUMNS,
    FAMILIES,
    GGUF_FAMILIES,
    ROUNDED,
    Outcome,
    checkpoint,
    drafted,
    gguf,
    read_table,
    rounded,
    table,
)

_SAMPLE = {
    ("granite", "w4a16"), ("gpt2", "GPTQ"), ("gpt_neox", "AWQ"), ("glm4", "w8a8"), ("bloom", "GPTQ 8"),
    ("qwen3_moe", "GPTQ 8"), ("granitemoe", "w8a16"), ("stablelm", "fp8 blocks"), ("starcoder2", "GPTQ act-order"),
    ("gpt2", "nf4"), ("cohere", "bnb 8"), ("qwen2_moe", "NVFP4"), ("phi", "MXFP4"),
}  # fmt: skip
_FLOATS = ("GPTQ act-order", "fp8 blocks", "fp8", "fp8 tensor")
_EXPERTS = frozenset(
    kind for kind in FAMILIES if "moe" in kind or kind in ("mixtral", "deepseek_v2", "deepseek_v3")
)
_HEADS = {"granite", "cohere", "gemma2", "bloom"}
_ROUNDED = {("gpt_neox", "int4"), ("olmo2", "int8")}


def _marked(key: tuple[str, ...], sample: object) -> object:
    return key if key in sample else pytest.param(*key, marks=pytest.mark.slow)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("kind", "form"), [_marked((kind, form), _SAMPLE) for kind in FAMILIES for form in CHECKPOINTS]
)
@pytest.mark.filterwarnings("ignore")  # of Transformers' models
def test_a_quantised_checkpoint(kind: str, form: str, tmp_path: Path) -> None:
    native_or_skip()
    found = checkpoint(kind, form, tmp_path)
    assert found.kept != "refused", found.words
    assert found.kept == "codes" or form in _FLOATS or (form == "GPTQ 8" and kind in _EXPERTS)


@pytest.mark.parametrize("kind", [_marked((kind,), {("qwen3_moe",)}) for kind in GGUF_FAMILIES])
@pytest.mark.filterwarnings("ignore")
def test_a_gguf_file(kind: str | tuple[str], tmp_path: Path) -> None:
    native_or_skip()
    assert gguf(kind if isinstance(kind, str) else kind[0], tmp_path).kept == "codes"


def test_the_table_is_read_as_it_was_written() -> None:
    ways = {"llama": "own code", "gpt2": "put together"}
    outcomes = [
        Outcome(k, c, "floats" if k == "llama" else "codes", w) for k, w in ways.items() for c in COLUMNS
    ]
    assert read_table(table(outcomes)) == outcomes


@pytest.mark.parametrize(("kind", "scheme"), [_marked((k, s), _ROUNDED) for k in FAMILIES for s in ROUNDED])
@pytest.mark.filterwarnings("ignore")
def test_rounded_as_it_is_loaded(kind: str, scheme: str, tmp_path: Path) -> None:
    native_or_skip()
    assert rounded(kind, scheme, tmp_path).kept == "codes"


@pytest.mark.parametrize(
    "kind", [k if k in _HEADS else pytest.param(k, marks=pytest.mark.slow) for k in FAMILIES]
)
@pytest.mark.filterwarnings("ignore")
def test_a_head_that_borrows(kind: str, tmp_path: Path) -> None:
    native_or_skip()
    assert drafted(kind, tmp_path).kept == "drafts"
