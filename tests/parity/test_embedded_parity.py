"""The models shipped in the package give the logits that Transformers gives from the same files."""

from __future__ import annotations

import json

import pytest
import torch

from draftwise.config.embedded import embedded_path
from draftwise.errors import ModelLoadError
from draftwise.models.loader import load_config
from draftwise.models.tokenizer import load_tokenizer
from tests.parity.helpers import Driver, expected_logits, load

CODE = """def mean(values):
    if not values:
        raise ValueError("mean of nothing")
    return sum(values) / len(values)
"""


@pytest.fixture(params=["target", "draft"])
def folder(request: pytest.FixtureRequest) -> str:
    try:
        return str(embedded_path(request.param))
    except ModelLoadError as error:
        pytest.skip(str(error))


def test_logits_equal(folder: str) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = load_tokenizer(folder).encode(CODE)
    expected = expected_logits(reference, tokens)
    driver = Driver(load(folder))
    for rid, chunk in enumerate((None, 7)):
        torch.testing.assert_close(driver.whole(rid, tokens, chunk), expected, atol=2e-4, rtol=0)


def test_vocabulary_fits_tokenizer_and_end_token(folder: str) -> None:
    config, tokenizer = load_config(folder), load_tokenizer(folder)
    assert len(tokenizer) <= config.vocab_size
    assert tokenizer.eos_token_id in config.eos_token_ids
    with open(f"{folder}/config.json") as file:
        assert config.tied == json.load(file)["tie_word_embeddings"]
    assert tokenizer.decode(tokenizer.encode(CODE)) == CODE
