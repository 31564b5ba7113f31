"""Tokenizers: the fast ones of Transformers, and only those."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftwise.errors import ModelLoadError
from draftwise.models.loader import resolve_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(
    path: str, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a model folder or hub id.

    Raises:
        ModelLoadError: the folder has none, it cannot be read, or it is a slow one (streaming text needs the speed
            of the fast kind).
    """
    folder = resolve_path(path, revision, weights=False)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever a broken file makes it raise
        raise ModelLoadError(f"no tokenizer can be loaded from {folder}: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelLoadError(
            f"{folder} has a slow tokenizer ({type(tokenizer).__name__}); a tokenizer.json is needed"
        )
    return tokenizer
