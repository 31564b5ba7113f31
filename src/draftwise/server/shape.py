"""Measures the JSON of a body before it is parsed.

A parser in C makes its objects without letting other threads run: four million numbers stop every stream for a
quarter of a second, and a hundred thousand unknown fields for a whole one. Counting costs a few operations on arrays,
which let other threads go on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_CHUNK = 1 << 20
_QUOTE, _BACKSLASH, _COLON, _COMMA = (ord(c) for c in '"\\:,')


@dataclass(frozen=True, slots=True)
class Shape:
    """``depth``: levels of nesting; ``fields``: names in objects; ``values``: members of lists and objects, and these
    themselves. Of valid JSON; of anything else some numbers that grow with it."""

    depth: int
    fields: int
    values: int

    def within(self, other: Shape) -> bool:
        return self.depth <= other.depth and self.fields <= other.fields and self.values <= other.values


def bound(data: bytes) -> Shape:
    """No less than `measure`: it counts what stands in strings, too. For short bodies, of which nearly all need no
    more."""
    opened = data.count(b"[") + data.count(b"{")
    return Shape(opened, data.count(b":"), data.count(b",") + opened)


def measure(data: bytes) -> Shape:
    """The shape of a body. Linear, in little memory, for whatever bytes.

    Example: ``{"a": [1, "x,[:"]}`` has depth 2, 1 field, and 3 values.
    """
    depth = deepest = fields = values = 0
    in_string = False  # at the beginning of a chunk
    escaping = 0  # backslashes at the end of the chunk before
    for start in range(0, len(data), _CHUNK):
        chunk_np = np.frombuffer(data, np.uint8, min(_CHUNK, len(data) - start), start)
        quotes_np, escaping = _real_quotes(chunk_np, escaping)
        kinds_np = _STRUCTURE[chunk_np]
        at_np = np.flatnonzero(kinds_np)
        before_np = np.searchsorted(quotes_np, at_np)
        found_np = kinds_np[at_np[(before_np & 1) == in_string]]
        in_string ^= bool(len(quotes_np) & 1)
        steps_np = _STEPS[found_np]
        levels_np = np.cumsum(steps_np, dtype=np.int64)
        if len(levels_np):
            deepest = max(deepest, depth + int(levels_np.max()))
            depth += int(levels_np[-1])
        fields += int(np.count_nonzero(found_np == _KIND_COLON))
        values += int(np.count_nonzero((found_np == _KIND_COMMA) | (found_np == _KIND_OPEN)))
    return Shape(deepest, fields, values)


_KIND_COLON, _KIND_COMMA, _KIND_OPEN, _KIND_CLOSE = 1, 2, 3, 4
_STRUCTURE = np.zeros(256, np.uint8)
for _char, _kind in ((":", 1), (",", 2), ("[", 3), ("{", 3), ("]", 4), ("}", 4)):
    _STRUCTURE[ord(_char)] = _kind
_STEPS = np.array([0, 0, 0, 1, -1], np.int64)  # by kind


def _real_quotes(chunk_np: npt.NDArray[np.uint8], escaping: int) -> tuple[npt.NDArray[np.int64], int]:
    """(indices of quotes that begin or end a string, backslashes at the end).

    A quote is escaped behind an odd number of backslashes; ``escaping`` of them stand before the chunk."""
    quotes_np = np.flatnonzero(chunk_np == _QUOTE)
    others_np = np.flatnonzero(chunk_np != _BACKSLASH)
    left = len(chunk_np) - 1 - int(others_np[-1]) if len(others_np) else len(chunk_np) + escaping
    if len(others_np) == len(chunk_np) and not escaping:
        return quotes_np, 0
    # Before each quote, the last one that is no backslash: quotes are none, so each finds itself first.
    others_np = np.concatenate(([-1 - escaping], others_np))
    previous_np = others_np[np.searchsorted(others_np, quotes_np) - 1]
    return quotes_np[((quotes_np - previous_np - 1) & 1) == 0], left
