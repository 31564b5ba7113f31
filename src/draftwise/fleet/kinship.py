"""Which prompts are alike: for drafters that learn from past requests, such as suffix look-up, each replica alone."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from draftwise.types import IntArray

_WINDOW = 8
"""Tokens that are compared together."""
_TAIL = 1024
"""Last tokens of a prompt that are looked at."""
_ONE_IN = 8
"""About one of this many windows is kept. A window's tokens decide, so that two prompts keep the same ones."""
_MOST = 1 << 16
"""Windows that are remembered of a replica."""
_FACTORS = np.array([pow(7919, i + 1, 1 << 64) | 1 for i in range(_WINDOW)], np.uint64)


def shingles(token_ids_np: IntArray) -> frozenset[int]:
    """Hashes of some of the windows of 8 tokens at the end of a prompt [n].

    Example: prompts "a b c d e f g h i j" and "x y c d e f g h i j" have the window "c ... j" in common. Whether it is
    among those that are kept depends on its tokens alone: it is kept of both or of neither.
    """
    tail_np = token_ids_np[-_TAIL:].astype(np.uint64)
    if len(tail_np) < _WINDOW:
        return frozenset()
    windows_np = np.lib.stride_tricks.sliding_window_view(tail_np, _WINDOW)
    hashes_np = (windows_np * _FACTORS).sum(axis=1, dtype=np.uint64)  # modulo 2**64
    hashes_np ^= hashes_np >> np.uint64(29)
    hashes_np *= np.uint64(0xBF58476D1CE4E5B9)
    hashes_np ^= hashes_np >> np.uint64(32)
    return frozenset(hashes_np[hashes_np % np.uint64(_ONE_IN) == 0].tolist())


class Kinship:
    """Windows of the prompts that one replica got, the latest ones."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, None] = OrderedDict()

    def share(self, windows: frozenset[int]) -> float:
        """The share of a prompt's windows that were seen before, 0 to 1."""
        return sum(w in self._seen for w in windows) / len(windows) if windows else 0.0

    def learn(self, windows: frozenset[int]) -> None:
        """A prompt with these windows goes there."""
        for window in windows:
            self._seen[window] = None
            self._seen.move_to_end(window)
        while len(self._seen) > _MOST:
            self._seen.popitem(last=False)
