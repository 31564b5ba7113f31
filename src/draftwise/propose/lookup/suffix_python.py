"""The suffix tree in plain Python: the reference for tests of the native tree, and the fallback without a native
library. A look-up scans the occurrences of a token (docs/algorithms/suffix.md)."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from draftwise.types import IntArray

Occurrence = tuple[int, int]
"""(sequence, index of the string's last token)."""
Children = list[tuple[int, list[Occurrence]]]
"""(token, its occurrences), the most frequent first, of equally frequent ones that which occurred last."""


@dataclass(frozen=True, slots=True)
class SuffixLimits:
    """The limits of a draft: at most ``min(budget, floor(match length * factor + offset))`` nodes, none less likely
    than
    ``min_prob``, none deeper than ``max_depth``; as a chain, the likeliest nodes first (``best_first``), or the
    first nodes of a given tree (``parents``, ``ranks`` [nodes])."""

    factor: float = 1.0
    offset: float = 0.0
    min_prob: float = 0.1
    budget: int = 63
    max_depth: int = 63
    best_first: bool = False
    parents: tuple[int, ...] | None = None
    ranks: tuple[int, ...] = ()

    def nodes(self, match_len: int) -> int:
        """Nodes allowed after a match of this length."""
        return min(self.budget, math.floor(match_len * self.factor + self.offset + 1e-6))


@dataclass(frozen=True, slots=True)
class SuffixDraft:
    """A draft and the reason for its choice. ``score``: sum of the nodes' probabilities; ``source``: 0 nothing was
    found,
    1 the request's own tree, 2 the global one."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    score: float = 0.0
    match_len: int = 0
    source: int = 0

    def better_than(self, other: SuffixDraft) -> bool:
        return (self.score, self.match_len) > (other.score, other.match_len)


class PythonSuffixTree:
    """Counts of all strings of at most ``depth`` tokens in a set of sequences, which leave in the order they came.

    The occurrences of a string are the pairs (sequence, index of its last token). The probability that token t follows
    string s is count(s + t) / count(s); an s at the end of a sequence counts, though nothing follows it.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._seqs: dict[int, list[int]] = {}
        self._gone: dict[int, int] = {}  # sequence -> leading suffixes taken away
        self._removed: deque[int] = deque()
        self._ends: dict[int, list[Occurrence]] = {}  # token -> its occurrences
        self._next = 0
        self._oldest = 0

    # ------------------------------------------------------------------------------------------ sequences

    def begin(self) -> int:
        """A new, empty sequence; its number."""
        seq = self._next
        self._next += 1
        self._seqs[seq] = []
        self._gone[seq] = 0
        return seq

    def append(self, seq: int, token_ids_np: IntArray) -> None:
        """``token_ids_np`` int32 [n] follow the sequence's tokens."""
        tokens = self._seqs[seq]
        for token in token_ids_np.tolist():
            self._ends.setdefault(token, []).append((seq, len(tokens)))
            tokens.append(token)

    def close(self, seq: int) -> None:
        """Free memory that only `append` needs, because the sequence does not grow for now."""

    def remove(self, seq: int) -> None:
        """Take the oldest sequence away; `settle` does it. Raises ValueError if it is not the oldest one."""
        if seq != self._oldest:
            raise ValueError(f"sequence {seq} is not the oldest one ({self._oldest})")
        self._oldest += 1
        self._removed.append(seq)

    def settle(self, most: int) -> int:
        """Take away at most ``most`` suffixes of removed sequences, oldest first; how many are left."""
        while self._removed:
            seq = self._removed[0]
            length = len(self._seqs[seq])
            taken = min(most, length - self._gone[seq])
            self._gone[seq] += taken
            most -= taken
            if self._gone[seq] < length:
                break
            for token in set(self._seqs[seq]):
                kept = [o for o in self._ends[token] if o[0] != seq]
                if kept:
                    self._ends[token] = kept
                else:
                    del self._ends[token]
            del self._seqs[seq], self._gone[seq]
            self._removed.popleft()
        return sum(len(self._seqs[seq]) - self._gone[seq] for seq in self._removed)

    # -------------------------------------------------------------------------------------------- queries

    @property
    def num_tokens(self) -> int:
        return sum(len(tokens) - self._gone[seq] for seq, tokens in self._seqs.items())

    def length(self, seq: int) -> int:
        """Tokens of a sequence."""
        return len(self._seqs[seq])

    def agree(self, seq: int, token_ids_np: IntArray) -> int:
        """How many leading tokens of the sequence equal these (int32 [n])."""
        n = 0
        for mine, other in zip(self._seqs[seq], token_ids_np.tolist(), strict=False):
            if mine != other:
                break
            n += 1
        return n

    def count(self, tokens: Sequence[int]) -> int:
        """Occurrences of a string of at most ``depth`` tokens."""
        assert 1 <= len(tokens) <= self.depth
        found = self._of_last(tokens)
        for length in range(2, len(tokens) + 1):
            found = self._longer(found, tokens, length)
        return len(found)

    def matches(self, context: Sequence[int]) -> list[list[Occurrence]]:
        """[i]: the occurrences of the last i + 1 tokens, as long as one of them goes on within the depth."""
        out: list[list[Occurrence]] = []
        for length in range(1, min(len(context), self.depth - 1) + 1):
            found = self._of_last(context) if length == 1 else self._longer(out[-1], context, length)
            if not self.children(found, length):
                break
            out.append(found)
        return out

    def children(self, found: Sequence[Occurrence], length: int) -> Children:
        """The tokens that follow a string of ``length`` tokens, given its occurrences."""
        if length >= self.depth:
            return []
        groups: dict[int, list[Occurrence]] = {}
        for seq, end in found:
            tokens = self._seqs[seq]
            if end + 1 < len(tokens):
                groups.setdefault(tokens[end + 1], []).append((seq, end + 1))
        return sorted(groups.items(), key=lambda g: (len(g[1]), max(g[1])), reverse=True)

    def _of_last(self, tokens: Sequence[int]) -> list[Occurrence]:
        return [o for o in self._ends.get(tokens[-1], ()) if o[1] >= self._gone[o[0]]]

    def _longer(self, found: list[Occurrence], tokens: Sequence[int], length: int) -> list[Occurrence]:
        """Those occurrences of the last ``length - 1`` tokens that are occurrences of the last ``length`` ones."""
        token, back = tokens[-length], length - 1
        return [
            (seq, end)
            for seq, end in found
            if end - back >= self._gone[seq] and self._seqs[seq][end - back] == token
        ]


def draft(
    local: PythonSuffixTree | None,
    global_: PythonSuffixTree | None,
    context: Sequence[int],
    limits: SuffixLimits,
) -> SuffixDraft:
    """The best continuation of ``context``: by score, then by match length, then from the local tree."""
    best = SuffixDraft()
    for source, tree in ((1, local), (2, global_)):
        if tree is None:
            continue
        for length, found in enumerate(tree.matches(context), 1):
            tokens, parents, score = _draft_from(tree, found, length, limits)
            candidate = SuffixDraft(tuple(tokens), tuple(parents), score, length, source)
            if tokens and candidate.better_than(best):
                best = candidate
    return best


def _draft_from(
    tree: PythonSuffixTree, found: list[Occurrence], length: int, limits: SuffixLimits
) -> tuple[list[int], list[int], float]:
    if limits.parents is not None:
        return _shaped(tree, found, length, limits)
    if limits.best_first:
        return _best_first(tree, found, length, limits)
    tokens: list[int] = []
    score, prob = 0.0, 1.0
    while len(tokens) < min(limits.nodes(length), limits.max_depth):
        children = tree.children(found, length + len(tokens))
        if not children:
            break
        token, after = children[0]
        prob *= len(after) / len(found)
        if prob < limits.min_prob:
            break
        tokens.append(token)
        score += prob
        found = after
    return tokens, list(range(-1, len(tokens) - 1)), score


def _best_first(
    tree: PythonSuffixTree, found: list[Occurrence], length: int, limits: SuffixLimits
) -> tuple[list[int], list[int], float]:
    """The likeliest nodes; of equally likely ones that which was found first."""
    tokens: list[int] = []
    parents: list[int] = []
    score = 0.0
    queued = 0
    queue: list[tuple[float, int, int, list[Occurrence], int, int]] = []

    def expand(found: list[Occurrence], prob: float, parent: int, depth: int) -> None:
        nonlocal queued
        if depth >= limits.max_depth:
            return
        for token, after in tree.children(found, length + depth):
            p = prob * (len(after) / len(found))
            if p < limits.min_prob:
                break
            heapq.heappush(queue, (-p, queued, token, after, parent, depth + 1))
            queued += 1

    expand(found, 1.0, -1, 0)
    while queue and len(tokens) < limits.nodes(length):
        negated, _, token, after, parent, depth = heapq.heappop(queue)
        tokens.append(token)
        parents.append(parent)
        score += -negated
        expand(after, -negated, len(tokens) - 1, depth)
    return tokens, parents, score


def _shaped(
    tree: PythonSuffixTree, found: list[Occurrence], length: int, limits: SuffixLimits
) -> tuple[list[int], list[int], float]:
    """The first nodes of the given tree, without those that have no counterpart and what is below them."""
    assert limits.parents is not None
    tokens: list[int] = []
    parents: list[int] = []
    score = 0.0
    placed: dict[int, tuple[list[Occurrence], float, int, int]] = {-1: (found, 1.0, -1, 0)}
    for i, (parent, rank) in enumerate(zip(limits.parents, limits.ranks, strict=True)):
        if len(tokens) >= limits.nodes(length):
            break
        if parent not in placed:
            continue
        above, prob, index, depth = placed[parent]
        children = tree.children(above, length + depth)
        if depth >= limits.max_depth or rank >= len(children):
            continue
        token, after = children[rank]
        prob *= len(after) / len(above)
        if prob < limits.min_prob:
            continue
        placed[i] = (after, prob, len(tokens), depth + 1)
        tokens.append(token)
        parents.append(index)
        score += prob
    return tokens, parents, score
