"""A model that speaks another vocabulary: token ids are mapped on the way in, logits on the way out.

Source: Timor et al., *Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
Vocabularies* (2502.05202), algorithm 4 (token-level intersection).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftwise.errors import ConfigError
from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel
from draftwise.models.wrapped import WrappedDecoder
from draftwise.types import StepInput, TargetOutput

_UNSHARED = -1e30
"""Logit of a token that the model lacks: probability 0 beside any shared one. Finite, so that what a grammar leaves of
the vocabulary always has a distribution, be it without one shared token."""


@dataclass(frozen=True, slots=True)
class VocabularyMap:
    """Which tokens two vocabularies share.

    Example: outer {0: "a", 1: "b", 2: "c"}, inner {0: "c", 1: "x", 2: "a"}, unknown token 1: shared_inner [2, 0],
    shared_outer [0, 2], to_inner [2, 1, 0].
    """

    shared_inner: Tensor  # int64 [S] ids in the model's own vocabulary ...
    shared_outer: Tensor  # int64 [S] ... and the same tokens' ids outside, rising
    to_inner: Tensor  # int64 [V] own id of each outer token; the unknown token's where there is none

    @staticmethod
    def of(outer: Any, inner: Any, outer_size: int, inner_size: int) -> VocabularyMap:
        """Tokens of equal bytes are the same token, in whatever way the two tokenizers (of Transformers) write them.

        ``outer_size``, ``inner_size``: rows of the models' output layers, which may exceed the tokenizers'.

        Raises:
            ConfigError: they share no token.
        """
        own: dict[bytes, int] = {}
        for token, key in sorted(_tokens(inner, inner_size).items()):
            own.setdefault(key, token)
        to_inner = torch.full((outer_size,), _unknown(inner, inner_size), dtype=torch.int64)
        shared = [
            (own[key], token) for token, key in sorted(_tokens(outer, outer_size).items()) if key in own
        ]
        if not shared:
            raise ConfigError(
                "speculative_config.use_heterogeneous_vocab: the two vocabularies have no token in common"
            )
        # A token of the model that stands for several outer ones (spelt differently) drafts the first of them.
        first: dict[int, int] = {}
        for mine, token in shared:
            to_inner[token] = mine
            first.setdefault(mine, token)
        pairs = sorted((token, mine) for mine, token in first.items())
        return VocabularyMap(
            torch.tensor([mine for _, mine in pairs]), torch.tensor([token for token, _ in pairs]), to_inner
        )


class MappedDecoder(WrappedDecoder):
    """``inner`` as a model of another vocabulary: it reads a token it lacks as its unknown token, one for one, so that
    positions and slots stay those of the text; and never says one that the other side lacks."""

    def __init__(self, inner: DecoderModel, vocabulary: VocabularyMap) -> None:
        super().__init__(inner)
        self.config = replace(inner.config, vocab_size=len(vocabulary.to_inner))
        self._shared_inner = vocabulary.shared_inner.to(inner.device)
        self._shared_outer = vocabulary.shared_outer.to(inner.device)
        self._to_inner = vocabulary.to_inner.to(inner.device)

    def forward(self, batch: StepInput, kv: KVStorage, capture: Sequence[int] = ()) -> TargetOutput:
        return self.inner.forward(self._mapped(batch), kv, capture)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._outer(self.inner.logits(hidden))

    def forward_logits(
        self, batch: StepInput, kv: KVStorage, rows: Sequence[int] | None = None, capture: Sequence[int] = ()
    ) -> tuple[TargetOutput, Tensor]:
        output, logits = self.inner.forward_logits(self._mapped(batch), kv, rows, capture)
        return output, self._outer(logits)

    def logits_alone(self, batch: StepInput, kv: KVStorage, rows: Sequence[int] | None = None) -> Tensor:
        return self._outer(self.inner.logits_alone(self._mapped(batch), kv, rows))

    def _mapped(self, batch: StepInput) -> StepInput:
        return replace(batch, token_ids=self._to_inner[batch.token_ids])

    def _outer(self, logits: Tensor) -> Tensor:
        """[M, inner vocabulary] -> [M, V] float32."""
        out = logits.new_full((logits.shape[0], self.config.vocab_size), _UNSHARED)
        out[:, self._shared_outer] = logits[:, self._shared_inner]
        return out


def _unknown(tokenizer: Any, size: int) -> int:
    """The replacement for a token that the model lacks: its unknown token, or another one without a meaning."""
    for name in ("unk_token_id", "pad_token_id", "eos_token_id", "bos_token_id"):
        token = getattr(tokenizer, name, None)
        if isinstance(token, int) and 0 <= token < size:
            return token
    return 0


def _tokens(tokenizer: Any, size: int) -> dict[int, bytes]:
    """The bytes of every token below ``size``. Special tokens are told from text that looks like them."""
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    special = set(tokenizer.all_special_tokens)
    letters = _byte_letters()
    # GPT-2's byte letters are in use where a space is written as one of them and not as a block.
    spaces = [sum(piece.startswith(mark) for piece in vocabulary) for mark in ("\u0120", "\u2581")]
    byte_level = spaces[0] > spaces[1]
    out: dict[int, bytes] = {}
    for piece, token in vocabulary.items():
        if not 0 <= token < size:
            continue
        if piece in special:
            out[token] = b"special:" + piece.encode()
        elif byte_level and all(letter in letters for letter in piece):
            out[token] = b"text:" + bytes(letters[letter] for letter in piece)
        elif not byte_level and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            out[token] = b"text:" + bytes([int(piece[3:5], 16)])
        else:
            out[token] = b"text:" + piece.replace("\u2581", " ").encode()
    return out


@functools.lru_cache(maxsize=1)
def _byte_letters() -> dict[str, int]:
    """The letter with which byte-level vocabularies write each byte: printable ones stand for themselves, the others
    for letters from U+0100 on, in rising order (so a space, the 33rd of them, is U+0120)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    letters.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return letters
