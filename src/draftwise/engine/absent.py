"""What vLLM's `LLM` can do and this engine cannot: the names are there, and say so."""

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
            f"encode: {_NO_VECTORS}. To make token ids of a text: llm.get_tokenizer().encode(text)"
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
            "beam_search: there is none; several samples of a prompt: SamplingParams(n=4), compared by "
            "cumulative_logprob with logprobs=0"
        )
