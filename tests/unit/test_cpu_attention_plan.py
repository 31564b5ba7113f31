"""How attention is cut: what is visited, who does how much, what memory it takes. Counted on the kernels' plan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from tests.fakes.attention_batches import Part, make_batch
from tests.native import native_or_skip

from draftwise.kernels.cpu.attention_plan import PARTITION, Piece, attention_plan, shares
from draftwise.types import AttentionBatch

CHAIN = tuple(range(-1, 31))
BUSHY = (-1, -1, -1, *(i // 3 for i in range(29)))


def visited(batch: AttentionBatch, window: int | None, heads: tuple[int, int, int] = (32, 4, 64)) -> int:
    plan = attention_plan(native_or_skip(), batch, heads=heads, window=window, threads=2)
    return sum(piece.end - piece.begin for piece in plan.pieces)


@pytest.mark.parametrize(
    "part", [Part(0, 1), Part(0, 8), Part(0, 32, CHAIN[:31]), Part(0, 512)], ids=["1", "8", "tree", "512"]
)
def test_a_window_costs_the_same_at_every_context(part: Part) -> None:
    """Contexts end at the same place of a partition, so that the counts are exactly the same."""
    counts = []
    for context in (2048, 16384, 131072):
        batch, _ = make_batch([Part(context, part.rows, part.parents)])
        counts.append(visited(batch, 1024))
    assert counts[0] == counts[1] == counts[2]
    tiles = -(-part.rows // 2)  # 8 query heads share a key/value head: two rows are 16 query vectors
    assert counts[0] <= tiles * 4 * (1024 // PARTITION + 2)
    whole, _ = make_batch([Part(131072, part.rows, part.parents)])
    assert visited(whole, None) > 80 * counts[0]


def test_keys_that_nobody_sees_are_not_visited() -> None:
    batch, _ = make_batch([Part(10000, 1, first=9990), Part(10000, 1, first=9000)])
    pieces = attention_plan(native_or_skip(), batch, heads=(4, 4, 64)).pieces
    assert {(p.request, p.begin, p.end) for p in pieces} == {(0, 39, 40), (1, 35, 40)}


def work_of_tasks(pieces: Sequence[Piece], parts: Sequence[Part], group: int) -> list[float]:
    """Keys times query vectors, and reading a key as much as four of them."""
    work = [0.0] * (pieces[-1].task + 1)
    for piece in pieces:
        low, high = reach(parts[piece.request], piece.first_row, piece.rows, None)
        keys = min(high + 1, piece.end * PARTITION) - max(low, piece.begin * PARTITION)
        work[piece.task] += keys * (piece.rows * group + 4)
    return work


HEADS = [(32, 4, 64), (32, 8, 128), (14, 2, 64), (8, 8, 96), (40, 2, 128), (8, 1, 128)]
"""Query heads, those of keys and values, size."""

ROWS = {
    "row": [Part(16384, 1)],
    "drafts": [Part(16380, 6)],
    "chain as a tree": [Part(16380, 32, CHAIN[:31])],
    "tree": [Part(16380, 32, BUSHY[:31])],
    "chunk": [Part(16384, 512)],
    "short chunk": [Part(16384, 37)],
    "beside short ones": [Part(16384, 1), *(Part(20 * i, 1) for i in range(1, 25))],
    "beside a prompt": [Part(16384, 5), Part(0, 100), Part(300, 1)],
}


@pytest.mark.parametrize(
    "heads", [(32, 4, 64), (32, 8, 128), (14, 2, 64), (8, 8, 96), (40, 2, 128), (8, 1, 128)], ids=str
)
@pytest.mark.parametrize("threads", [2, 8, 16])
@pytest.mark.parametrize("parts", ROWS.values(), ids=list(ROWS))
def test_one_long_request_keeps_every_thread_busy(
    parts: list[Part], threads: int, heads: tuple[int, int, int]
) -> None:
    """Where threads claim tasks, and in a team, where each has its own."""
    batch, _ = make_batch(parts)
    for per_thread in (4, 1):
        plan = attention_plan(
            native_or_skip(), batch, heads=heads, threads=threads, tasks_per_thread=per_thread
        )
        loads = shares(work_of_tasks(plan.pieces, parts, heads[0] // heads[1]), threads)
        assert max(loads) <= 1.2 * sum(loads) / threads, (per_thread, loads)


def test_what_is_even_already_is_not_cut() -> None:
    """Four heads on two threads need no second phase; nor does a long prompt."""
    for parts in ([Part(16384, 1)], [Part(0, 4096)], [Part(200, 1)] * 16):
        batch, _ = make_batch(parts)
        plan = attention_plan(native_or_skip(), batch, heads=(32, 4, 64), threads=2)
        assert not any(piece.cut for piece in plan.pieces) and plan.workspace == 0


@pytest.mark.parametrize("rows", [1, 3])
def test_the_workspace_does_not_grow_with_the_context(rows: int) -> None:
    """Pieces leave a state per level of the tree of partitions, not one per partition."""
    sizes = []
    for context in (16384, 131072, 1 << 20):
        batch, _ = make_batch([Part(context, rows)])
        plan = attention_plan(native_or_skip(), batch, heads=(32, 2, 128), threads=16)
        pieces = [piece for piece in plan.pieces if piece.cut]
        levels = 2 * (context // PARTITION // len(pieces) * 2 + 1).bit_length()
        states = sum(piece.rows for piece in pieces) * 16  # a row has 16 heads that share keys
        assert 0 < plan.workspace <= states * levels * (128 + 2 + 2) * 4
        sizes.append(plan.workspace)
    assert sizes[2] < 4 * sizes[0]


def test_every_key_of_every_row_is_visited_once() -> None:
    """In random batches, windows and numbers of threads."""
    random = np.random.default_rng(5)
    for _ in range(60):
        parts = []
        for _ in range(int(random.integers(1, 12))):
            context = int(random.choice([0, 1, 255, 256, 3000, 20000]))
            rows = int(random.choice([1, 2, 9, 32, 100]))
            tree = rows <= 32 and random.random() < 0.4
            parents = tuple(int(random.integers(-1, i)) if i else -1 for i in range(rows - 1))
            parts.append(
                Part(context, rows, parents if tree else None, first=int(random.integers(0, context + 1)))
            )
        batch, _ = make_batch(parts)
        window = [None, 1, 100, 5000][int(random.integers(4))]
        heads = [(4, 2, 64), (8, 1, 64), (20, 20, 32)][int(random.integers(3))]
        threads = int(random.integers(1, 20))
        plan = attention_plan(native_or_skip(), batch, heads=heads, window=window, threads=threads)
        tasks = [piece.task for piece in plan.pieces]
        assert tasks == sorted(tasks) and set(tasks) == set(range(tasks[-1] + 1))
        assert tasks[-1] < max(4 * threads, 1) + 1
        spans: dict[tuple[int, int, int], list[Piece]] = {}
        for piece in plan.pieces:
            spans.setdefault((piece.request, piece.first_row, piece.head), []).append(piece)
        rows_seen = {(r, first + i, h) for (r, first, h), (p, *_) in spans.items() for i in range(p.rows)}
        assert rows_seen == {
            (r, i, h) for r, part in enumerate(parts) for i in range(part.rows) for h in range(heads[1])
        }
        for (r, first, _), pieces in spans.items():
            low, high = reach(parts[r], first, pieces[0].rows, window)
            assert pieces[0].begin == low // PARTITION and pieces[-1].end == high // PARTITION + 1
            assert all(a.end == b.begin for a, b in pairwise(pieces))
            assert all(piece.begin < piece.end and piece.cut == (len(pieces) > 1) for piece in pieces)


def reach(part: Part, first: int, count: int, window: int | None) -> tuple[int, int]:
    """First and last position that rows see."""
    depths = list(range(part.rows))
    if part.parents is not None:
        depths = [0]
        for parent in part.parents:
            depths.append(depths[parent + 1] + 1)
    positions = [part.context + depth for depth in depths[first : first + count]]
    low = min(positions) - window + 1 if window else 0
    return max(low, part.first, 0), max(positions)
