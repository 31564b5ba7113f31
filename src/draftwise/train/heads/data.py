"""Batches for draft heads: pieces of documents with what the target computes from them, on the fly."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from draftwise.errors import ConfigError

from .batch import HeadBatch, causal_mask
from .teacher import EngineTeacher, Taught
from .text import Tokens
from .trainer import HeadRecipe

MIN_TOKENS = 8
"""Shorter pieces teach nothing: the first rows of a text have hardly any context."""


@dataclass(frozen=True, slots=True)
class Split:
    """Pieces to learn from and pieces to measure on."""

    train: list[Tokens]
    heldout: list[Tokens]

    def fingerprint(self) -> str:
        """Return a digest of all tokens: a run is resumed only on the text it began with."""
        digest = hashlib.sha256()
        for side in (self.train, self.heldout):
            for piece in side:
                digest.update(np.asarray(piece.ids, np.int64).tobytes())
                digest.update(b"|")
            digest.update(b"#")
        return digest.hexdigest()[:16]


def cut(documents: Iterable[Tokens], max_length: int) -> list[Tokens]:
    """Cut documents into pieces of at most `max_length` tokens; a last piece that is too short is dropped.

    Example: 1,300 tokens, max_length 512 -> 512, 512, 276.
    """
    pieces = []
    for document in documents:
        for start in range(0, len(document.ids), max_length):
            ids = document.ids[start : start + max_length]
            counted = document.counted[start : start + max_length]
            if len(ids) >= MIN_TOKENS and any(counted):
                pieces.append(Tokens(ids, counted))
    return pieces


def split(pieces: Sequence[Tokens], heldout_share: float, max_heldout: int = 64) -> Split:
    """Hold out pieces by a hash of their tokens, so that the same piece is always on the same side.

    At least one piece is held out where there are two; a single piece is on both sides.

    Raises:
        ConfigError: there are no pieces.
    """
    if not pieces:
        raise ConfigError(f"--data: no text of at least {MIN_TOKENS} tokens")
    keys = [hashlib.sha256(np.asarray(piece.ids, np.int64).tobytes()).digest() for piece in pieces]
    ranks = [int.from_bytes(key[:8], "big") / 2**64 for key in keys]
    chosen = [i for i, rank in enumerate(ranks) if rank < heldout_share]
    if not chosen and heldout_share > 0:
        chosen = [min(range(len(pieces)), key=ranks.__getitem__)]
    chosen = sorted(chosen, key=ranks.__getitem__)[:max_heldout] if len(pieces) > 1 else []
    train = [piece for i, piece in enumerate(pieces) if i not in set(chosen)]
    return Split(train, [pieces[i] for i in chosen] or train)


def head_batch(pieces: Sequence[Tokens], taught: Taught, least: int) -> HeadBatch:
    """Put pieces and what the target computed from them side by side.

    Args:
        least: rows are padded to at least so many tokens.
    """
    longest = max(least, *(len(piece.ids) for piece in pieces))
    ids = torch.zeros((len(pieces), longest), dtype=torch.int64)
    segments = torch.full((len(pieces), longest), -1)
    counted = torch.zeros((len(pieces), longest), dtype=torch.bool)
    for i, piece in enumerate(pieces):
        n = len(piece.ids)
        ids[i, :n] = torch.tensor(piece.ids)
        segments[i, :n] = 0
        # what is predicted after token s is token s + 1; after the last one whatever the target says
        counted[i, :n] = torch.tensor([*piece.counted[1:], piece.counted[-1]])

    def fit(x: Tensor) -> Tensor:
        missing = longest - x.shape[1]
        return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x

    device = taught.hidden.device
    return HeadBatch(
        ids.to(device),
        torch.arange(longest, device=device),
        causal_mask(longest).to(device),
        segments.to(device),
        counted.to(device),
        fit(taught.hidden),
        fit(taught.features),
        fit(taught.probs),
    )


def plan_epoch(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the batches of one epoch as piece numbers: pieces of like length together, in random order.

    Depends on nothing but the arguments, so that a resumed run sees what it would have seen.
    """
    rng = np.random.Generator(np.random.PCG64([seed, epoch]))
    order = [int(i) for i in rng.permutation(len(lengths))]
    order.sort(key=lambda i: lengths[i])  # stable: pieces of one length stay shuffled
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    return [batches[int(i)] for i in rng.permutation(len(batches))]


@dataclass(slots=True)
class PieceSource(ABC):
    """Pieces in the order in which training sees them; where their hidden states come from is said below."""

    pieces: Split
    teacher: EngineTeacher
    batch_size: int
    least: int
    """Rows are padded to at least so many tokens (unrolls and stride must fit)."""
    _epoch: tuple[int, list[list[int]]] = field(default=(-1, []))

    @abstractmethod
    def make_batch(self, pieces: Sequence[Tokens], least: int) -> HeadBatch:
        """Return these pieces with what the target computes from them, padded to at least so many tokens."""

    def batch(self, step: int, recipe: HeadRecipe, part: int = 0, parts: int = 1) -> HeadBatch:
        """Return one of `parts` parts of what 0-based `step` learns from.

        Example: batch size 2, 2 parts, a step of pieces a b c d: part 0 is a, c, part 1 is b, d. All are padded to the
        longest of the four.

        Raises:
            ConfigError: there are more parts than pieces.
        """
        train = self.pieces.train
        size = self.batch_size * parts
        whole, rest = divmod(len(train), size)
        count = whole + (rest >= parts)  # a last batch that is not enough for all parts is left out
        if not count:
            raise ConfigError(
                f"{len(train)} pieces of text are too few for {parts} processes and parts of a batch"
            )
        epoch, place = divmod(step, count)
        if self._epoch[0] != epoch:
            lengths = [len(piece.ids) for piece in train]
            batches = plan_epoch(lengths, size, recipe.seed, epoch)
            self._epoch = (epoch, [batch for batch in batches if len(batch) >= parts])
        chosen = [train[i] for i in self._epoch[1][place]]
        least = max(self.least, *(len(piece.ids) for piece in chosen))
        return self.make_batch(chosen[part::parts], least)

    def heldout(self) -> dict[str, Iterable[HeadBatch]]:
        """Return the held-out pieces as `text`; made anew every time, to keep memory for training."""
        return {"text": _Lazy(self)}

    def heldout_batches(self) -> Iterator[HeadBatch]:
        """Yield the held-out pieces batch by batch."""
        pieces = sorted(self.pieces.heldout, key=lambda piece: len(piece.ids))
        for start in range(0, len(pieces), self.batch_size):
            yield self.make_batch(pieces[start : start + self.batch_size], self.least)


@dataclass(frozen=True, slots=True)
class _Lazy(Iterable[HeadBatch]):
    source: PieceSource

    def __iter__(self) -> Iterator[HeadBatch]:
        return self.source.heldout_batches()


class TextSource(PieceSource):
    """Batches whose hidden states are computed when they are needed."""

    __slots__ = ()

    def make_batch(self, pieces: Sequence[Tokens], least: int) -> HeadBatch:
        return head_batch(pieces, self.teacher.teach([piece.ids for piece in pieces]), least)


def draft_vocabulary(pieces: Sequence[Tokens], vocab_size: int, size: int) -> Tensor:
    """Return the most frequent counted tokens, ascending: int64 [size]. Ties go to the smaller id.

    Example: tokens 5 5 3 9, size 2 -> (3, 5).
    """
    counts = np.zeros(vocab_size, np.int64)
    for piece in pieces:
        ids = np.asarray(piece.ids)[np.asarray(piece.counted)]
        np.add.at(counts, ids, 1)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size])).long()


def coverage(pieces: Sequence[Tokens], draft_ids: Tensor) -> float:
    """Return the share of counted tokens that a draft vocabulary holds: drafting cannot be accepted more often."""
    known = set(draft_ids.tolist())
    counted = [token for piece in pieces for token, c in zip(piece.ids, piece.counted, strict=True) if c]
    return sum(token in known for token in counted) / max(1, len(counted))
