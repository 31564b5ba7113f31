"""The verification rules of a step in one native call: temperature, min_p, top_k, top_p, the walk and the draws."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence
from typing import ClassVar

import torch

from draftwise.kernels.cpu.checks import require
from draftwise.kernels.cpu.library import NativeLibrary
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.types import Verification
from draftwise.verify.base import BatchRules, PassSlots, VerifyRequest
from draftwise.verify.rejection import is_sampled

_PTR, _I64 = ctypes.c_void_p, ctypes.c_int64

_REQUEST = struct.Struct("=QdffiIiiiiiiQ")
"""``dw::VerifyRequest`` of ``csrc/verify.h``."""
_RULES = {"greedy": 0, "coupled": 1, "rejection": 2, "block": 3}
_DRAWS = {"fixed": 0, "independent": 1, "without_replacement": 2}


class NativeRules(BatchRules):
    """Decides like the rules of the same names in `verify`, up to the last bits of sums: a request by itself, in one
    order of arithmetic, whatever else is in the batch and however many threads there are.

    Args:
        library: The native library.
        pool: Threads that share large steps.
    """

    names: ClassVar[frozenset[str]] = frozenset(_RULES)
    shapes: ClassVar[bool] = True
    compacts: ClassVar[bool] = False

    def __init__(self, library: NativeLibrary, pool: ThreadPool) -> None:
        self._pool = pool
        self._verify = library.function(
            "dw_verify", None, [_PTR, _PTR, _I64, _I64, ctypes.c_char_p, _I64, _PTR, _PTR]
        )

    def verify(
        self,
        logits: torch.Tensor,
        requests: Sequence[VerifyRequest],
        rules: Sequence[str],
        stored: PassSlots | None = None,
    ) -> list[Verification]:
        require(logits.dtype is torch.float32 and logits.device.type == "cpu", "float32 logits on the CPU")
        logits = logits.contiguous()
        packed: list[bytes] = []
        tokens: list[int] = []
        parents: list[int] = []
        q_rows: list[int] = []
        kept_q: list[torch.Tensor] = []
        last_q: torch.Tensor | None = None
        last_q_at = 0
        pack = _REQUEST.pack
        for request, rule in zip(requests, rules, strict=True):
            state, proposal = request.state, request.proposal
            nodes = len(proposal.tokens)
            draw = q_at = 0
            if nodes:
                tokens += proposal.tokens
                parents += proposal.parents
                if is_sampled(proposal):
                    q = proposal.q
                    if q is not last_q:  # requests that were drafted together share it
                        require(
                            q is not None and q.dtype is torch.float32 and q.shape[1] == logits.shape[1],
                            "float32 q for each token",
                        )
                        assert q is not None
                        kept_q.append(q.contiguous())
                        last_q, last_q_at = q, kept_q[-1].data_ptr()
                    draw, q_at = _DRAWS[proposal.draw], last_q_at
                    q_rows += proposal.q_rows
                else:
                    q_rows += proposal.parents  # not read
            packed.append(
                pack(
                    *state.draw_fields,
                    state.num_tokens,
                    request.first_row,
                    nodes,
                    _RULES[rule],
                    draw,
                    0,
                    q_at,
                )
            )
        count, total = len(packed), len(tokens)
        given = array("i", tokens + parents + q_rows)
        found = array("i", bytes(4 * (2 * count + total)))
        self._verify(
            self._pool.pointer,
            logits.data_ptr(),
            logits.shape[1],
            count,
            b"".join(packed),
            total,
            given.buffer_info()[0],
            found.buffer_info()[0],
        )
        del kept_q
        answer = found.tolist()
        if not total:
            return [Verification((), (token,)) for token in answer[count:]]
        results = []
        at = 2 * count
        for r, request in enumerate(requests):
            own = request.proposal.tokens
            path = tuple(answer[at : at + answer[r]])
            at += len(own)
            results.append(Verification(path, (*[own[node] for node in path], answer[count + r])))
        return results
