"""Texts to token ids, whatever the text: a tokenizer's own failures become errors of the request."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from draftwise.errors import RequestError

logger = logging.getLogger(__name__)


class TextEncoder(Protocol):
    """The interface of a tokenizer for encoding."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> Sequence[int]: ...


def encode_text(tokenizer: TextEncoder, text: str, name: str, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text; ``name``: the field it stands in.

    Raises:
        RequestError: the text has no encoding (half of a pair of UTF-16), or the tokenizer's library gave up on it.
            The regular expressions that cut a text into words do so in runs of ten thousand blank lines, say.
    """
    try:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    except (TypeError, UnicodeError):
        raise RequestError(f"{name}: no text that can be encoded (half a pair of UTF-16?)") from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of Rust, which is no Exception and has no public name
            raise
        logger.warning("the tokenizer failed on a text of %d characters: %s", len(text), error)
        raise RequestError(
            f"{name}: the tokenizer failed on this text (does it hold a run of thousands of one character?)"
        ) from None
