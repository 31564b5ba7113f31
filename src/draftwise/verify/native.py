"""The verification rules of a step in one native call: temperature, min_p, top_k, top_p, the walk and the draws."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from draftwise.kernels.cpu.checks import refuse, require
from draftwise.kernels.cpu.library import NativeLibrary
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.types import Verification, new_record
from draftwise.verify.base import BatchRules, PassSlots, VerifyColumns, VerifyRequest

_PTR, _I64 = ctypes.c_void_p, ctypes.c_int64

RULES = {"greedy": 0, "coupled": 1, "rejection": 2, "block": 3}
DRAWS = {"fixed": 0, "independent": 1, "without_replacement": 2}


class NativeRules(BatchRules):
    """Decides like the rules of the same names in `verify`, up to the last bits of sums: a request by itself, in one
    order of arithmetic, whatever else is in the batch and however many threads there are.

    Args:
        library: The native library.
        pool: Threads that share large steps.
    """

    names: ClassVar[frozenset[str]] = frozenset(RULES)
    shapes: ClassVar[bool] = True
    compacts: ClassVar[bool] = False

    def __init__(self, library: NativeLibrary, pool: ThreadPool) -> None:
        self.pool = pool
        self._verify = library.function(
            "dw_verify", None, [_PTR, _PTR, _I64, _I64, _PTR, _PTR, _PTR, _I64, _PTR, _PTR]
        )

    def verify(
        self,
        logits: torch.Tensor,
        requests: Sequence[VerifyRequest],
        rules: Sequence[str],
        stored: PassSlots | None = None,
    ) -> list[Verification]:
        columns = VerifyColumns(
            [request.state for request in requests],
            [request.proposal for request in requests],
            [request.first_row for request in requests],
            rules,
        )
        return self.deciding(columns)(logits)

    def decide_at(
        self,
        logits: torch.Tensor,
        count: int,
        draws_at: int,
        numbers_at: int,
        q_at: int | None,
        total: int,
        given_at: int,
        found_at: int,
        rows: int,
    ) -> None:
        """Decide ``count`` requests with ``total`` nodes, of which all that `dw_verify` wants to know lies in memory.
        ``logits`` [M, V] float32, contiguous; ``rows``: M, as whoever wrote down the requests' first rows knows it."""
        if logits.dtype is not torch.float32 or not logits.is_cpu or not logits.is_contiguous():
            refuse("float32 logits on the CPU")
        if logits.shape[0] != rows or count + total > rows:
            refuse("logits of all rows")
        self._verify(
            self.pool.pointer,
            logits.data_ptr(),
            logits.shape[1],
            count,
            draws_at,
            numbers_at,
            q_at,
            total,
            given_at,
            found_at,
        )

    def deciding(self, columns: VerifyColumns) -> Callable[[torch.Tensor], list[Verification]]:
        states, proposals, first_rows, rules = columns
        count = len(states)
        require(count == len(proposals) == len(first_rows) == len(rules), "columns of the same length")
        own: list[int] = []
        draws: list[int] = []
        q_at: list[int] = []
        tokens: list[int] = []
        parents: list[int] = []
        q_rows: list[int] = []
        kept_q: list[torch.Tensor] = []
        last_q: torch.Tensor | None = None
        last_q_at = 0
        for proposal in proposals:
            draw = place = 0
            if proposal.tokens:
                tokens += proposal.tokens
                parents += proposal.parents
                q = proposal.q
                if q is None or proposal.draw == "fixed":
                    q_rows += proposal.parents  # not read
                else:
                    if q is not last_q:  # requests that were drafted together share it
                        require(q.dtype is torch.float32, "float32 q")
                        kept_q.append(q.contiguous())
                        last_q, last_q_at = q, kept_q[-1].data_ptr()
                    draw, place = DRAWS[proposal.draw], last_q_at
                    q_rows += proposal.q_rows
            own.append(len(proposal.tokens))
            draws.append(draw)
            q_at.append(place)
        total = len(tokens)
        numbers = array("i", [state.num_tokens for state in states])
        numbers.extend([*first_rows, *own, *map(RULES.__getitem__, rules), *draws])
        given = array("i", tokens + parents + q_rows)
        places = array("Q", q_at) if kept_q else None
        draw_bytes = b"".join([state.draw_bytes for state in states])

        def decide(logits: torch.Tensor) -> list[Verification]:
            require(logits.dtype is torch.float32 and logits.is_cpu, "float32 logits on the CPU")
            if not logits.is_contiguous():
                logits = logits.contiguous()
            vocab = logits.shape[1]
            require(all(q.shape[1] == vocab for q in kept_q), "a q for each token")
            found = array("i", bytes(4 * (2 * count + total)))
            self._verify(
                self.pool.pointer,
                logits.data_ptr(),
                vocab,
                count,
                draw_bytes,
                numbers.buffer_info()[0],
                None if places is None else places.buffer_info()[0],
                total,
                given.buffer_info()[0],
                found.buffer_info()[0],
            )
            return _answers(found.tolist(), own, tokens, total)

        return decide


def _answers(found: list[int], own: list[int], tokens: list[int], total: int) -> list[Verification]:
    """The kernel's answer for each request: the number of kept nodes, the token behind them, the path.

    ``own``: nodes of each; ``tokens`` [total]: of all.
    """
    count = len(own)
    if not total:
        return [new_record(Verification, ((), (token,), None)) for token in found[count:]]
    results = []
    first = 0  # node of the request
    at = 2 * count
    for size, length, last in zip(own, found, found[count:at], strict=False):
        if not length:
            results.append(new_record(Verification, ((), (last,), None)))
        else:
            begin = at + first
            path = tuple(found[begin : begin + length])
            if path[-1] == length - 1:  # nodes 0, 1, ...
                kept = (*tokens[first : first + length], last)
            else:
                kept = (*[tokens[first + node] for node in path], last)
            results.append(new_record(Verification, (path, kept, None)))
        first += size
    return results
