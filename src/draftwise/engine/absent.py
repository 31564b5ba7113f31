"""Methods of vLLM's `LLM` that this engine does not support. The names exist and raise an error that says so."""

from __future__ import annotations

from typing import Any, NoReturn

from draftwise.errors import RequestError

_NO_VECTORS = (
    "Draftwise generates text and makes no vectors or scores of it; use a library for embedding models"
)


class Absent:
    """Methods that raise `RequestError` with what to do instead."""

    def embed(self, *arguments: Any, **options: Any) -> NoReturn:
        """Not there: raises RequestError."""
        raise RequestError(f"embed: {_NO_VECTORS}")

    def encode(self, *arguments: Any, **options: Any) -> NoReturn:
        """Not there: raises RequestError."""
        raise RequestError(
            f"encode: {_NO_VECTORS}. To turn text into token ids, use llm.get_tokenizer().encode(text)"
        )

    def classify(self, *arguments: Any, **options: Any) -> NoReturn:
        """Not there: raises RequestError."""
        raise RequestError(f"classify: {_NO_VECTORS}")

    def score(self, *arguments: Any, **options: Any) -> NoReturn:
        """Not there: raises RequestError."""
        raise RequestError(f"score: {_NO_VECTORS}")

    def reward(self, *arguments: Any, **options: Any) -> NoReturn:
        """Not there: raises RequestError."""
        raise RequestError(f"reward: {_NO_VECTORS}")

    def beam_search(self, *arguments: Any, **options: Any) -> NoReturn:
        """Not there: raises RequestError."""
        raise RequestError(
            "beam_search: not supported; draw samples with SamplingParams(n=4, logprobs=0) and compare their "
            "cumulative_logprob with logprobs=0"
        )
