"""Memory for the rows of a step in columns, and for what is told of those that are decided (``csrc/steps.cpp``)."""

from __future__ import annotations

import ctypes
from array import array
from typing import NamedTuple

import numpy as np
import torch

from draftwise.kernels.cpu.attention import LAID_OUT, LaidOut, address
from draftwise.kernels.cpu.columns import RowPacker
from draftwise.sampling.state import DRAW
from draftwise.types import AttentionBatch, IntArray, new_record


class Laid(NamedTuple):
    """Memory that the next step of the same sizes overwrites: behind a pass, making it takes as long as filling it.

    ``facts``: as ``dw_step_size`` says them of ``requests`` requests; ``places``: what ``dw_step_rows`` writes to, from
    its rows on; ``rows``: tokens, positions and slots; ``given``, ``inputs``: as `Decided` has them; ``kept``: the
    memory of these.
    """

    facts: array[int]
    requests: int
    places: tuple[int | None, ...]
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    laid_out: LaidOut
    first_rows_np: IntArray
    logit_rows_np: IntArray | None
    given: array[int]
    inputs: tuple[int, int, int, int | None, int]
    kept: object

    def attention(self, block_size: int) -> AttentionBatch:
        """The batch of the step that was written last; what attention prepares for it is not kept for the next one."""
        found = self.laid_out
        return AttentionBatch(
            found.starts_np,
            found.contexts_np,
            found.trees_np,
            found.tables_np,
            found.ancestors_np,
            block_size,
            cache={LAID_OUT: found},
        )


def lay_out(count: int, facts: array[int], packer: RowPacker) -> Laid:
    """Memory for the rows of ``count`` requests. ``facts`` [8] int64: what ``dw_step_size`` said of them."""
    total, width, trees, sampled, decided, nodes, num_logits, _ = facts
    rows, rows_at = packer.room(total)
    all_rows = num_logits == total
    # starts, contexts, first rows, tables, and which rows have logits
    ints: IntArray = np.empty(3 * count + 1 + count * width + (0 if all_rows else num_logits), np.int32)
    at = address(ints)
    tables = 3 * count + 1
    logits = tables + count * width
    is_tree_np = np.zeros(count, np.bool_)
    trees_at = address(is_tree_np)
    ancestors_np = np.zeros(total, np.uint64) if trees else None
    ancestors_at = None if ancestors_np is None else address(ancestors_np)
    draws = bytearray(DRAW.size * decided)
    numbers, given = array("i", bytes(4 * 5 * decided)), array("i", bytes(4 * 3 * nodes))
    methods, q_at = array("i", bytes(4 * decided)), array("Q", bytes(8 * decided))
    draws_at, numbers_at, given_at = _address(draws), numbers.buffer_info()[0], given.buffer_info()[0]
    q_rows_at, methods_at = q_at.buffer_info()[0], methods.buffer_info()[0]
    starts_np, contexts_np = ints[: count + 1], ints[count + 1 : 2 * count + 1]
    tables_np = ints[tables:logits].reshape(count, width)
    laid_out = new_record(LaidOut, (
        total, starts_np, contexts_np, is_tree_np, tables_np, ancestors_np, None,
        at, at + 4 * (count + 1), trees_at, at + 4 * tables, ancestors_at, None, None,
    ))  # fmt: skip
    return Laid(
        facts,
        count,
        (
            rows_at,
            at,
            at + 4 * (count + 1),
            at + 4 * tables,
            trees_at,
            ancestors_at,
            at + 4 * (2 * count + 1),
            None if all_rows else at + 4 * logits,
            draws_at,
            numbers_at,
            given_at,
            q_rows_at,
            methods_at,
        ),
        rows,
        laid_out,
        ints[2 * count + 1 : tables],
        None if all_rows else ints[logits:],
        given,
        (draws_at, numbers_at, given_at, q_rows_at if sampled else None, methods_at),
        (draws, numbers, methods, q_at),
    )


def _address(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
