"""A request's place in its grammar, and the masks along the branches of a draft tree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from draftwise.errors import RequestError
from draftwise.sampling.masks import Words, exclude, pack, unpack
from draftwise.structured.base import Matcher
from draftwise.types import Proposal

Path = tuple[int, ...]
"""Draft tokens below the last committed token, root first."""


class Vocabulary:
    """Masks that all cursors of an engine share. ``eos_token_ids``: at least one, the usual one first."""

    __slots__ = ("ends", "eos_token_ids", "everything", "num_words", "ordinary", "size")

    def __init__(self, size: int, eos_token_ids: Sequence[int], num_tokens: int | None = None) -> None:
        """``size``: tokens of the model; ``num_tokens``: those a matcher's masks cover, if they are more."""
        assert eos_token_ids and all(0 <= token < size for token in eos_token_ids)
        self.size = size
        self.eos_token_ids = tuple(eos_token_ids)
        self.num_words = -(-max(size, num_tokens or 0) // 32)
        bits = np.zeros(self.num_words * 32, np.bool_)
        bits[list(self.eos_token_ids)] = True
        self.ends = pack(bits)  # end-of-sequence tokens
        bits = ~bits
        bits[size:] = False
        self.ordinary = pack(bits)  # all others that the model has
        self.everything = np.full(self.num_words, -1, np.int32)


class Cursor:
    """Answers what may follow the committed output and any path of drafts below it. One per request, owned by
    the executor.

    The matcher walks from path to path, taking back what they do not share; masks are kept (packed, one bit per
    token) until the next commit, so that those a drafter drew under serve the verification, too.

    End-of-sequence tokens are allowed exactly where the text may end; with ``ignore_eos`` only where nothing else
    can follow. Behind one of them, and behind a token that is not allowed, nothing is masked: no such node is
    ever accepted or delivered, and a row without any token would count as a mistake.
    """

    __slots__ = (
        "_ignore_eos",
        "_kept",
        "_matcher",
        "_path",
        "_vocabulary",
        "ended",
    )

    def __init__(
        self,
        matcher: Matcher,
        vocabulary: Vocabulary,
        *,
        ignore_eos: bool = False,
        output_ids: Sequence[int] = (),
    ) -> None:
        """``output_ids``: output so far, of a request that comes back after a preemption.

        Raises `RequestError` if ``output_ids`` does not follow the grammar.
        """
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._ignore_eos = ignore_eos
        self._path: Path = ()  # what the matcher took in beyond the committed tokens
        self._kept: dict[Path, Words] = {}  # masks by path
        self.ended = False  # an end-of-sequence token was committed
        self.commit(output_ids)

    # --------------------------------------------------------------------------------------------- commit

    def commit(self, token_ids: Sequence[int]) -> None:
        """The tokens became part of the output. Raises `RequestError` if the grammar does not allow them."""
        done = self._share(tuple(token_ids))
        self._back_to(done)
        self._path = ()
        self._kept = {}
        for token in token_ids[done:]:
            if self.ended:  # what follows the end is cut by the scheduler
                return
            if token in self._vocabulary.eos_token_ids:
                self.ended = True
            elif not self._matcher.advance(token):
                raise RequestError(f"structured_outputs: token {token} does not follow the grammar")

    # ---------------------------------------------------------------------------------------------- masks

    def allows(self, path: Path, token: int) -> bool:
        """Whether ``token`` may follow the committed output and ``path``."""
        return _has(self.words(path), token)

    def mask(self, path: Path = (), device: torch.device | str = "cpu") -> torch.Tensor:
        """[V] bool, True: the token may follow the committed output and ``path``. Raises `RequestError`."""
        return unpack(self.words(path), self._vocabulary.size).to(device)

    def masks(self, proposal: Proposal) -> Words:
        """[1 + nodes, W], packed: after the root, then after each node. Raises `RequestError`.

        Example: tokens (5, 7, 9), parents (-1, -1, 0): after (), (5,), (7,), (5, 9).
        """
        if not proposal.tokens:
            return self.words(())[None]
        paths = paths_of(proposal)
        return np.concatenate([self.words(path) for path in paths]).reshape(len(paths), -1)

    def words(self, path: Path) -> Words:
        """[W]: the packed mask after ``path``, not to be written to. Raises `RequestError`."""
        words = self._kept.get(path)
        if words is None:
            words = self._kept[path] = self._compute(path)
        return words

    def forced(self, limit: int) -> Path:
        """At most ``limit`` tokens that must follow the committed output, the end of the sequence included."""
        if limit < 1 or self.ended:
            return ()
        self._back_to(0)
        tokens = list(self._matcher.forced(limit))
        if len(tokens) < limit and self._move(tuple(tokens)) and self._matcher.is_finished():
            tokens.append(self._vocabulary.eos_token_ids[0])
        return tuple(tokens[:limit])

    def prune(self, proposal: Proposal) -> Proposal:
        """A proposal of point masses without the nodes that the grammar forbids, and those below them or below an
        end. Lossless for point masses alone: which nodes go does not depend on a draw.

        Example: tokens (5, 7, 9), parents (-1, -1, 0), 7 not allowed: (5, 9) with parents (-1, 0).
        """
        assert is_point_mass(proposal), "a drawn node may not go"
        index: dict[int, int] = {-1: -1}  # node -> node of what is left
        tokens: list[int] = []
        parents: list[int] = []
        for i, (path, token, parent) in enumerate(
            zip(paths_of(proposal)[1:], proposal.tokens, proposal.parents, strict=True)
        ):
            above = index.get(parent)
            if above is None or (above >= 0 and tokens[above] in self._vocabulary.eos_token_ids):
                continue
            if self.allows(path[:-1], token):
                index[i] = len(tokens)
                tokens.append(token)
                parents.append(above)
        if len(tokens) == len(proposal.tokens):
            return proposal
        return Proposal(tuple(tokens), tuple(parents), proposal.method, proposal.draw)

    # ------------------------------------------------------------------------------------------- the walk

    def _compute(self, path: Path) -> Words:
        vocabulary = self._vocabulary
        if self.ended:
            return vocabulary.everything
        if path:
            above, token = self.words(path[:-1]), path[-1]
            if above is vocabulary.everything or token in vocabulary.eos_token_ids or not _has(above, token):
                return vocabulary.everything
        if not self._move(path):
            return vocabulary.everything
        words: Words = self._matcher.mask() & vocabulary.ordinary
        if self._matcher.is_accepting() and not (self._ignore_eos and words.any()):
            words |= vocabulary.ends
        return words

    def _move(self, path: Path) -> bool:
        """Bring the matcher behind ``path``; False if it does not take it."""
        shared = self._share(path)
        self._back_to(shared)
        for i in range(shared, len(path)):
            if not self._matcher.advance(path[i]):
                return False
            self._path = path[: i + 1]
        return True

    def _share(self, path: Path) -> int:
        """Tokens that ``path`` begins with and the matcher has taken in."""
        length = len(self._path)
        if path[:length] == self._path:  # mostly: one token further
            return length
        shared = 0
        for ours, theirs in zip(self._path, path, strict=False):
            if ours != theirs:
                break
            shared += 1
        return shared

    def _back_to(self, length: int) -> None:
        if len(self._path) > length:
            self._matcher.rollback(len(self._path) - length)
            self._path = self._path[:length]


def is_point_mass(proposal: Proposal) -> bool:
    """Whether the nodes are point masses: chosen, not drawn from a reported q."""
    return proposal.q is None or proposal.draw == "fixed"


def paths_of(proposal: Proposal) -> list[Path]:
    """Tokens from the root to each node: [1 + nodes] paths, the root's () first."""
    paths: list[Path] = [()]
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        paths.append((*paths[parent + 1], token))
    return paths


def mask_drafts(logits: torch.Tensor, cursors: Sequence[Cursor | None], paths: Sequence[Path]) -> None:
    """Exclude from a drafter's ``logits`` [R, V] float32, in place, what may not follow ``paths[i]`` in the grammar
    of ``cursors[i]``. Raises `RequestError`."""
    members = [i for i, cursor in enumerate(cursors) if cursor is not None]
    if not members:
        return
    found = [cursor.words(path) for cursor, path in zip(cursors, paths, strict=True) if cursor is not None]
    words = np.concatenate(found).reshape(len(found), -1)
    if len(members) == len(cursors):
        exclude(logits, words)
        return
    part = logits[members]
    exclude(part, words)
    logits[members] = part


def _has(words: Words, token: int) -> bool:
    return bool(words[token >> 5] >> (token & 31) & 1)
