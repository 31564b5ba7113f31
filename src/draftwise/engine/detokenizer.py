"""Token ids to text, one at a time, with stop strings; no step costs more because the text got longer."""

from __future__ import annotations

import codecs
import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from draftwise.engine.stops import StopStrings

_REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 5
CONTEXT_TOKENS = 4 * _CONTEXT_TOKENS
"""Tokens before the output that its text may depend on."""
_MAX_PENDING = 6
"""Tokens held back while their text ends in U+FFFD. A character has at most 4 bytes, and a token at least one:
what is not whole after more tokens than that is no character."""


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was completed; the text is cut there."""

    stop: str


class _TextStream(Protocol):
    """Text of a growing sequence of tokens."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The whole characters that these tokens complete; may be empty."""
        ...

    def flush(self) -> str:
        """The rest: an unfinished character, as U+FFFD."""
        ...


class IncrementalDetokenizer:
    """The output text of one request.

    Without stop strings, the text after `finish` equals ``tokenizer.decode`` of all tokens pushed, for
    byte-level tokenizers (GPT-2, Llama 3, Qwen, DeepSeek, ...); for others it is what the tokens add to the
    prompt's text, so that a leading space is kept. An unfinished UTF-8 character is held back.

    A stop string cuts the text where the *first* one is complete, character by character, however the
    text is divided into tokens; of several that end there, the longest counts. While one may be beginning, and
    is not to be part of the output, its text is held back.

    Example (stop "END"): "a", " E", "N", "x" gives deltas "a", " ", "", "ENx"; with "D" for "x" it gives "a",
    " ", "" and a match.
    """

    __slots__ = (
        "_held",
        "_include",
        "_min_tokens",
        "_new",
        "_num_tokens",
        "_parts",
        "_state",
        "_stopped",
        "_stops",
        "_stream",
    )

    def __init__(
        self,
        tokenizer: Any,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        stop: StopStrings | None = None,
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """
        Args:
            tokenizer: of Transformers (a fast one) or of the tokenizers library.
            prompt_ids: [n] tokens before the output; only the last 20 are looked at.
            skip_special_tokens: special tokens have no text.
            stop: stop strings; samples of one prompt share them.
            include_stop_str_in_output: cut behind the stop string and not before it.
            min_tokens: a stop string that is complete within this many tokens does not count.
        """
        self._stream = _text_stream(tokenizer, prompt_ids, skip_special_tokens)
        self._stops = stop
        self._state = 0  # of `stop`, behind all text so far
        self._include = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""  # a suffix of the text, and the beginning of a stop string
        self._parts: list[str] = []  # text that is safe to show
        self._new: list[str] = []  # of these, what `delta` has not returned
        self._stopped = False

    @property
    def text(self) -> str:
        """All text that is safe to show: no later token changes it."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    @property
    def num_tokens(self) -> int:
        """Tokens taken so far."""
        return self._num_tokens

    @property
    def stopped(self) -> bool:
        """A stop string was found."""
        return self._stopped

    def push(self, token_id: int) -> StopMatch | None:
        """Take the next output token. A match ends the text: no token may follow."""
        assert not self._stopped, "the text was cut at a stop string"
        self._num_tokens += 1
        piece = self._stream.push((token_id,))
        if not piece:
            return None
        if self._stops is None:
            self._release(piece)
            return None
        return self._push_text(self._stops, piece)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take the next output tokens, however many; only without stop strings."""
        assert self._stops is None, "a stop string may end the text between them"
        self._num_tokens += len(token_ids)
        self._release(self._stream.push(token_ids))

    def _push_text(self, stops: StopStrings, piece: str) -> StopMatch | None:
        early = self._num_tokens <= self._min_tokens
        self._state, found = stops.read(self._state, piece, ignore=early)
        pending = self._held + piece if self._held else piece
        if found is not None:
            cut = len(self._held) + found.end - (0 if self._include else len(found.stop))
            assert cut >= 0, "a part of the stop string was shown"
            self._release(pending[:cut])
            self._held = ""
            self._stopped = True
            return StopMatch(found.stop)
        # A stop string that is part of the output need not be held back while it is beginning.
        keep = 0 if self._include else stops.held(self._state)
        self._release(pending[: len(pending) - keep])
        self._held = pending[len(pending) - keep :]
        return None

    def _release(self, text: str) -> None:
        if text:
            self._parts.append(text)
            self._new.append(text)

    def delta(self) -> str:
        """The safe text that came since the last call."""
        new = "".join(self._new)
        self._new.clear()
        return new

    def finish(self) -> None:
        """Call it after the last token: text that was held back is released. No effect after a stop string or a
        second call."""
        if self._stopped:
            return
        self._release(self._held + self._stream.flush())
        self._held = ""


# ------------------------------------------------------------------------------------------------ streams


def _text_stream(tokenizer: Any, prompt_ids: Sequence[int], skip_special_tokens: bool) -> _TextStream:
    vocabulary = _vocabulary(tokenizer)
    skipped = vocabulary.special if skip_special_tokens else frozenset[int]()
    if vocabulary.byte_level:
        return _ByteStream(vocabulary, skipped)
    return _WindowStream(vocabulary.backend, prompt_ids, skipped, skip_special_tokens)


class _Vocabulary:
    """Data of a tokenizer that requests share: its special tokens, and the bytes of tokens seen so far."""

    __slots__ = ("_bytes", "backend", "byte_level", "special")

    def __init__(self, tokenizer: Any) -> None:
        self.backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self.byte_level = type(getattr(self.backend, "decoder", None)).__name__ == "ByteLevel"
        added = self.backend.get_added_tokens_decoder()
        self.special = frozenset(i for i, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token of a byte-level tokenizer; none for an id that does not exist."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = token_bytes(self.backend.id_to_token(token_id) or "")
        return data


_VOCABULARIES: weakref.WeakKeyDictionary[Any, _Vocabulary] = weakref.WeakKeyDictionary()
_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")
"""A byte, as tokenizers of the SentencePiece family spell it."""


def _vocabulary(tokenizer: Any) -> _Vocabulary:
    vocabulary = _VOCABULARIES.get(tokenizer)
    if vocabulary is None:
        vocabulary = _VOCABULARIES[tokenizer] = _Vocabulary(tokenizer)
    return vocabulary


def bytes_of_token(tokenizer: Any, token_id: int) -> bytes:
    """The bytes of a token, also of one that is only a part of a character, whose text is U+FFFD."""
    vocabulary = _vocabulary(tokenizer)
    if vocabulary.byte_level:
        return vocabulary.bytes_of(token_id)
    piece = _BYTE_PIECE.fullmatch(vocabulary.backend.id_to_token(token_id) or "")
    if piece is not None:
        return bytes.fromhex(piece[1])
    return str(vocabulary.backend.decode([token_id], skip_special_tokens=False)).encode()


@cache
def byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: which byte each character of a byte-level token stands for.

    Printable Latin-1 characters stand for themselves; the other 68 bytes, in order, for U+0100 onwards: the
    space, 0x20, is the 33rd of these and "\u0120".
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


def token_bytes(token: str) -> bytes:
    """Bytes of a byte-level token. An added token may hold characters outside the alphabet: it is plain text."""
    alphabet = byte_of_char()
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:
        return token.encode()


class _ByteStream:
    """Byte-level tokens: their bytes, one after the other, through an incremental UTF-8 decoder.

    Malformed bytes become U+FFFD as in one go (both follow the Unicode recommendation on maximal subparts).
    """

    __slots__ = ("_decoder", "_skipped", "_vocabulary")

    def __init__(self, vocabulary: _Vocabulary, skipped: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        bytes_of, skipped = self._vocabulary.bytes_of, self._skipped
        return self._decoder.decode(b"".join([bytes_of(i) for i in token_ids if i not in skipped]))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class _WindowStream:
    """Any other tokenizer: what the pending tokens add to the text of the few before them.

    Decoders of the SentencePiece family drop the space in front of the first token; the window begins with tokens
    that are shown already, so that the space is dropped from them. With tokenizers that spell bytes as
    tokens, malformed sequences may come out as fewer or more U+FFFD than in one go.
    """

    __slots__ = ("_backend", "_context", "_context_text", "_pending", "_skip", "_skipped")

    def __init__(
        self, backend: Any, prompt_ids: Sequence[int], skipped: frozenset[int], skip_special_tokens: bool
    ) -> None:
        self._backend = backend
        self._skip = skip_special_tokens
        self._skipped = skipped
        self._pending: list[int] = []
        self._context: list[int] = []
        self._context_text = ""
        tail = [i for i in prompt_ids[-CONTEXT_TOKENS:] if i not in self._skipped]
        # One of four neighbouring bytes begins a character. If no start will do, the prompt ends inside one, and
        # there is nothing to build on.
        for length in range(_CONTEXT_TOKENS, _CONTEXT_TOKENS + 4):
            text = self._decode(tail[-length:])
            if not text.endswith(_REPLACEMENT):
                self._context, self._context_text = tail[-length:], text
                break

    def _decode(self, ids: list[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=self._skip)
        return text

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push(i) for i in token_ids])

    def _push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._pending.append(token_id)
        whole = self._decode(self._context + self._pending)
        full = len(self._pending) >= _MAX_PENDING
        if not full and (whole.endswith(_REPLACEMENT) or len(whole) <= len(self._context_text)):
            return ""
        new = whole[len(self._context_text) :]
        if new:
            self._context, self._context_text = self._pending, self._decode(self._pending)
        self._pending = []
        return new

    def flush(self) -> str:
        if not self._pending:
            return ""
        new = self._decode(self._context + self._pending)[len(self._context_text) :]
        self._pending = []
        return new
