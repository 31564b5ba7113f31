"""The forms in which a program may give prompts, and the names that vLLM has for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from draftwise.engine.tokenizing import Prompt
from draftwise.errors import RequestError, shown
from draftwise.sampling.params import SamplingParams


class TextPrompt(TypedDict):
    """``TextPrompt(prompt="def main(")``, as in vLLM: the mapping ``{"prompt": text}``."""

    prompt: str


class TokensPrompt(TypedDict):
    """``TokensPrompt(prompt_token_ids=[1, 2, 3])``, as in vLLM: the mapping ``{"prompt_token_ids": ids}``."""

    prompt_token_ids: list[int]


PromptLike = Prompt | Sequence[int]
"""A text, ``{"prompt": text}``, ``{"prompt_token_ids": ids}``, or the ids themselves."""


def one_prompt(given: PromptLike) -> Prompt:
    """A prompt in one of the two forms that requests are made of. Anything else stays, and is refused later.

    >>> one_prompt([1, 2, 3])
    {'prompt_token_ids': [1, 2, 3]}
    """
    if isinstance(given, Mapping):
        left_out = [name for name in _OPTIONAL if name in given and given[name] is None]
        return {name: value for name, value in given.items() if name not in left_out} if left_out else given
    return {"prompt_token_ids": given} if _is_ids(given, empty=True) else given  # type: ignore[return-value]


_OPTIONAL = (
    "prompt", "prompt_token_ids", "multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "cache_salt"
)  # fmt: skip
"""Fields of vLLM's prompts; None is as good as absent."""


def all_prompts(given: PromptLike | Sequence[PromptLike]) -> list[Prompt]:
    """One prompt or several, as a list: token ids alone are one prompt, a list of lists is several.

    >>> all_prompts([1, 2]), all_prompts([[1, 2], "a"])
    ([{'prompt_token_ids': [1, 2]}], [{'prompt_token_ids': [1, 2]}, 'a'])
    """
    if isinstance(given, str | bytes | Mapping) or _is_ids(given) or not isinstance(given, Iterable):
        return [one_prompt(given)]  # type: ignore[arg-type]
    return [one_prompt(prompt) for prompt in given]  # type: ignore[arg-type]


def _is_ids(given: Any, *, empty: bool = False) -> bool:
    """``empty``: what to say of an empty list."""
    return isinstance(given, list | tuple) and (type(given[0]) is int if given else empty)


def own_params(given: Any) -> SamplingParams:
    """A request's own copy of its parameters; None: the defaults. Raises RequestError."""
    if given is None:
        return SamplingParams()
    if not isinstance(given, SamplingParams):
        raise unlike_params(given)
    return given.clone()


def unlike_params(given: Any) -> RequestError:
    """The error for what is no `SamplingParams`."""
    hint = "; SamplingParams.from_dict makes them of a mapping" if isinstance(given, Mapping) else ""
    return RequestError(f"sampling_params is {shown(given)}; it must be SamplingParams{hint}")
