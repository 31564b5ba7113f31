"""Prompts to token ids, and what is asked of a prompt before that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any

import numpy as np

from draftwise.encoding import encode_text
from draftwise.errors import ContextLengthError, RequestError, shown, suggest
from draftwise.models.base import ModelConfig
from draftwise.sampling.params import SamplingParams
from draftwise.types import IntArray

Prompt = str | Mapping[str, Any]
"""A text, ``{"prompt": text}`` or ``{"prompt_token_ids": [...]}``."""

_FEW_CHARS = 2000
_FEW_IDS = 16_384
_FEW_SAMPLES = 64
"""Requests up to this size are prepared in a millisecond or two."""


def prompt_text(prompt: Prompt) -> str | None:
    """The text of a prompt, if it has one."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def end_tokens(model_config: ModelConfig, tokenizer: Any | None) -> tuple[int, ...]:
    """The tokens that end a sequence: the checkpoint's, then the tokenizer's if it differs."""
    eos = list(model_config.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in eos:
        eos.append(tokenizer.eos_token_id)
    return tuple(eos)


def is_quick(prompt: Prompt, params: SamplingParams) -> bool:
    """Whether a request, but for its grammar, is prepared in a millisecond or two."""
    text = prompt_text(prompt) or ""
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
    num_ids = len(ids) if isinstance(ids, Sized) else 0
    chars = (0 if num_ids else len(text)) + sum(map(len, params.stop)) + sum(map(len, params.bad_words))
    lists = (params.stop_token_ids, params.allowed_token_ids or (), params.logit_bias or ())
    num_ids += params.n * num_ids // 16 + sum(map(len, lists))
    return chars <= _FEW_CHARS and num_ids <= _FEW_IDS and params.n <= _FEW_SAMPLES


def tokenize_prompt(
    prompt: Prompt, tokenizer: Any | None, vocab_size: int, max_model_len: int
) -> tuple[str | None, IntArray]:
    """Text (None for token ids) and token ids [n] int32 of a prompt. Raises RequestError."""
    text: str | None = None
    if isinstance(prompt, str):
        text = prompt
    elif isinstance(prompt, Mapping):
        extra = set(prompt) - {"prompt", "prompt_token_ids"}
        if extra:
            name = sorted(map(str, extra))[0]
            if name in ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs"):
                raise RequestError(
                    f"{name}: a prompt is a text or its token ids; images and sounds are not read"
                )
            raise RequestError(
                f"unknown prompt field {shown(name)}{suggest(name, ['prompt', 'prompt_token_ids'])}"
            )
        if "prompt_token_ids" in prompt:
            return prompt.get("prompt"), _checked_ids(prompt["prompt_token_ids"], vocab_size, max_model_len)
        if not isinstance(prompt.get("prompt"), str):
            raise RequestError("a prompt is a string, {'prompt': text} or {'prompt_token_ids': [...]}")
        text = prompt["prompt"]
    else:
        raise RequestError(
            f"a prompt is a string, {{'prompt': text}} or {{'prompt_token_ids': [...]}}, not {type(prompt).__name__}"
        )
    if tokenizer is None:
        raise RequestError("the engine has no tokenizer (skip_tokenizer_init): pass prompt_token_ids")
    ids = encode_text(tokenizer, text, "prompt")
    if not ids:
        raise RequestError("the prompt is empty: it has no tokens")
    return text, _checked_ids(ids, vocab_size, max_model_len)


def _checked_ids(ids: Any, vocab_size: int, max_model_len: int) -> IntArray:
    if isinstance(ids, str) or not isinstance(ids, Sequence | np.ndarray):
        raise RequestError(f"prompt_token_ids must be a list of integers, not {type(ids).__name__}")
    if len(ids) == 0:
        raise RequestError("the prompt is empty: it has no tokens")
    if len(ids) >= max_model_len:
        # The first words are OpenAI's: clients look for them, and fall back to a model with more room.
        raise ContextLengthError(
            f"This model's maximum context length is {max_model_len} tokens (max_model_len), for prompt and "
            f"output together, and the prompt has {len(ids)} tokens: no room for an output token"
        )
    if isinstance(ids, np.ndarray) and ids.dtype == np.int32 and ids.ndim == 1:
        least, largest = int(ids.min()), int(ids.max())
    else:
        if not all(issubclass(kind, int | np.integer) and kind is not bool for kind in set(map(type, ids))):
            raise RequestError("prompt_token_ids must be integers")
        least, largest = min(ids), max(ids)
    if least < 0 or largest >= vocab_size:
        bad = next(t for t in ids if not 0 <= t < vocab_size)
        raise RequestError(f"token id {bad} is out of range: the vocabulary has {vocab_size} tokens")
    return np.asarray(ids, np.int32)
