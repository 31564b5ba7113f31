"""Texts that a tokenizer cannot cut into tokens fail their request, with words a user understands."""

import pytest

from draftwise.config.embedded import embedded_path
from draftwise.encoding import encode_text
from draftwise.errors import RequestError
from draftwise.models.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(embedded_path("target")))


def test_a_text(tokenizer) -> None:
    ids = encode_text(tokenizer, "def main(", "prompt")
    assert tokenizer.decode(ids) == "def main("


def test_half_a_pair_of_utf16(tokenizer) -> None:
    with pytest.raises(RequestError, match=r"prompt: no text that can be encoded \(half a pair of UTF-16"):
        encode_text(tokenizer, "a \ud800", "prompt")


def test_a_run_on_which_the_tokenizers_library_gives_up(tokenizer, caplog) -> None:
    """Its regular expression has a limit on going back, and it answers with a panic, which is no Exception."""
    with pytest.raises(RequestError, match="stop: the tokenizer failed on this text"):
        encode_text(tokenizer, "\n" * 20_000, "stop")
    assert "20000 characters" in caplog.text


def test_what_ends_a_program_ends_it(tokenizer) -> None:
    class Interrupted:
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode_text(Interrupted(), "a", "prompt")
