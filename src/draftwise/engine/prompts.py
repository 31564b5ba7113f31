"""The forms in which a program may give prompts, and the names that vLLM has for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from draftwise.engine.tokenizing import Prompt


class TextPrompt(TypedDict):
    """``TextPrompt(prompt="def main(")``, as in vLLM: the mapping ``{"prompt": text}``."""

    prompt: str


class TokensPrompt(TypedDict):
    """``TokensPrompt(prompt_token_ids=[1, 2, 3])``, as in vLLM: the mapping ``{"prompt_token_ids": ids}``."""

    prompt_token_ids: list[int]


PromptLike = Prompt | Sequence[int]
"""A text, ``{"prompt": text}``, ``{"prompt_token_ids": ids}``, or the ids themselves."""


def one_prompt(given: PromptLike) -> Prompt:
    """A prompt in one of the two forms that requests are made of.

    >>> one_prompt([1, 2, 3])
    {'prompt_token_ids': [1, 2, 3]}
    """
    return {"prompt_token_ids": given} if _is_ids(given) else given  # type: ignore[return-value]


def all_prompts(given: PromptLike | Sequence[PromptLike]) -> list[Prompt]:
    """One prompt or several, as a list: token ids alone are one prompt, a list of lists is several.

    >>> all_prompts([1, 2]), all_prompts([[1, 2], "a"])
    ([{'prompt_token_ids': [1, 2]}], [{'prompt_token_ids': [1, 2]}, 'a'])
    """
    if isinstance(given, str | Mapping) or _is_ids(given):
        return [one_prompt(given)]  # type: ignore[arg-type]
    return [one_prompt(prompt) for prompt in given]  # type: ignore[arg-type]


def _is_ids(given: Any) -> bool:
    return isinstance(given, list | tuple) and bool(given) and type(given[0]) is int
