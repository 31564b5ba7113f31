"""Which passes are captured: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from draftwise.graphs.buffers import Shape

SHORT_KEYS = 8192
"""Models that reach further have their passes captured twice: for contexts up to this, and for all. A captured pass
looks into every part of the longest context it may have, if only to find nothing there."""

MOST_PIECE_ROWS = 512
"""Passes of more rows than this are not captured in pieces unless that is asked for: the device has so much to do in
each that the host keeps ahead of it."""


def request_counts(most: int) -> tuple[int, ...]:
    """Numbers of requests worth a graph of their own: 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ..., and ``most``.

    Example: 40 -> 1, 2, 4, 8, 16, 24, 32, 40. A batch is filled up to the next one.
    """
    counts, step = [1, 2, 4, 8], 8
    while counts[-1] + step < most:
        counts.append(counts[-1] + step)
        if counts[-1] >= 4 * step:
            step *= 2
    return tuple(sorted({min(c, most) for c in (*counts, most)}))


def pass_shapes(
    *,
    widths: Sequence[int],
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    sizes: Sequence[int] | None = None,
    largest: int | None = None,
) -> tuple[Shape, ...]:
    """The shapes to capture.

    Args:
        widths: rows of a request: 1 for plain decoding, 1 + K for a verification of K nodes.
        sizes: rows of whole passes, vLLM's ``cudagraph_capture_sizes``; each is cut into requests of every width that
            divides it. None: a choice for `request_counts`.
        largest: no pass has more rows, vLLM's ``max_cudagraph_capture_size``.

    Example: sizes 5, 10 and widths 1, 5: 5 x 1, 1 x 5, 10 x 1 and 2 x 5 (requests x rows).
    """
    found: set[tuple[int, int]] = set()
    for width in sorted(set(widths)):
        if sizes is None:
            counts: Sequence[int] = request_counts(max_num_seqs)
        else:
            counts = [size // width for size in sizes if size % width == 0]
        most = max(max_num_batched_tokens, width)
        if largest is not None:
            most = min(most, largest)
        found |= {(count, width) for count in counts if count <= max_num_seqs and count * width <= most}
    reach = key_limits(max_model_len)
    return tuple(Shape(count, width, keys) for keys in reach for count, width in sorted(found))


def piece_rows(
    *, max_num_batched_tokens: int, sizes: Sequence[int] | None = None, largest: int | None = None
) -> tuple[int, ...]:
    """Numbers of rows of the passes that are captured in pieces, ascending. A batch is filled up to the next one.

    Up to some hundred rows a pass costs what reading the weights costs, and rows that fill up cost next to nothing;
    beyond that every row counts, so that steps become small beside what there is: 16 up to 256, then 32.

    Args:
        sizes: vLLM's ``cudagraph_capture_sizes``. None: a choice up to `MOST_PIECE_ROWS`, or ``largest``.
        largest: as in `pass_shapes`.

    Example: 100 tokens in a step at most: 1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 100.
    """
    if sizes is not None:
        return tuple(sorted({size for size in sizes if size <= min(largest or size, max_num_batched_tokens)}))
    most = min(largest or MOST_PIECE_ROWS, max_num_batched_tokens)
    choice = (1, 2, 4, *range(8, 32, 8), *range(32, 256, 16), *range(256, most, 32))
    return (*(size for size in choice if size < most), most)


def worth_filling(pass_rows: int, piece_rows: int) -> bool:
    """Whether a batch goes into a whole pass of ``pass_rows`` rather than into one of ``piece_rows`` in pieces.

    One graph costs the host less than many with attention between them. Up to 64 rows a pass costs what reading the
    weights costs, however many rows fill up; beyond that, half as many rows again are worth it.

    Example: 128 decoding requests, of which one verifies five drafts: 133 rows would fill 768 of a whole pass of
    128 x 6, or 192 in pieces.
    """
    return pass_rows <= 64 or 2 * pass_rows <= 3 * piece_rows


def key_limits(max_model_len: int) -> tuple[int, ...]:
    """Longest contexts for which passes are captured, ascending. The last one leaves room for 64 nodes of a tree."""
    longest = max_model_len + 64
    return (SHORT_KEYS, longest) if longest > SHORT_KEYS else (longest,)
