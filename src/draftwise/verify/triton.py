"""The verification rules of a step as kernels: one table goes to the device, one answer comes back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftwise.kernels.triton.rows import compact_paths
from draftwise.kernels.triton.verify import (
    DraftBatch,
    DraftFields,
    draft_table,
    keep_typical,
    reject_chains,
    reject_trees,
    walk_trees,
)
from draftwise.types import Verification
from draftwise.verify.base import BatchRules, PassSlots, VerifyRequest
from draftwise.verify.rejection import is_sampled


class TritonRules(BatchRules):
    """Decides like the rules of the same names in `verify`, up to the last bits of sums."""

    names = frozenset({"greedy", "coupled", "rejection", "block", "typical"})

    def verify(
        self,
        logits: Tensor,
        requests: Sequence[VerifyRequest],
        rules: Sequence[str],
        stored: PassSlots | None = None,
    ) -> list[Verification]:
        fields: list[DraftFields] = []
        kept: list[Tensor] = []  # what the table holds addresses of
        groups: dict[str, list[int]] = {}
        for r, (request, rule) in enumerate(zip(requests, rules, strict=True)):
            fields.append(_fields(request, logits.device, kept))
            tree = rule in ("rejection", "block") and not request.proposal.is_chain
            name = "tree" if tree else rule
            if name == "typical" and not request.state.is_greedy:
                name = "typical_sampled"
            groups.setdefault(name, []).append(r)
        table_np = draft_table(fields)
        members_np = np.concatenate([np.asarray(group, np.int64) for group in groups.values()])
        roots_np = np.array([request.pass_row for request in requests], np.int64)
        joined = torch.from_numpy(np.concatenate((table_np.reshape(-1), roots_np, members_np)))
        if logits.device.type == "cuda":
            joined = joined.pin_memory()
        joined = joined.to(logits.device, non_blocking=True)
        nodes = max(len(f.tokens) for f in fields)
        table, roots, every = torch.split(joined, [table_np.size, len(roots_np), len(members_np)])
        batch = DraftBatch.of(table.view(table_np.shape), nodes)
        order = torch.split(every.to(torch.int32), [len(group) for group in groups.values()])
        p = logits.softmax(dim=-1) if groups.keys() - {"greedy", "coupled"} else logits
        for name, members in zip(groups, order, strict=True):
            if name in ("greedy", "coupled"):
                walk_trees(logits, batch, members, coupled=name == "coupled")
            elif name == "tree":
                reject_trees(p, batch, members)
            elif name in ("typical", "typical_sampled"):
                keep_typical(logits, p, batch, members, sampled=name != "typical")
            else:
                reject_chains(p, batch, members, block=name == "block")
        if stored is not None and not all(request.proposal.is_chain for request in requests):
            slots = stored.slots.to(
                logits.device, non_blocking=True
            )  # of captured passes they lie on the host
            for pool in stored.storage.pools:
                compact_paths(pool, slots, roots, batch.walk)
        results = []
        for row in batch.walk.packed.tolist():
            length = row[0]
            first = 1 + nodes
            results.append(Verification(tuple(row[1 : 1 + length]), tuple(row[first : first + length + 1])))
        return results


def _fields(request: VerifyRequest, device: torch.device, kept: list[Tensor]) -> DraftFields:
    state, proposal = request.state, request.proposal
    at: list[int] = []
    if is_sampled(proposal):
        q = proposal.q
        assert q is not None
        q = q.to(device, torch.float32).contiguous()
        kept.append(q)
        start, width = q.data_ptr(), q.shape[1] * q.element_size()
        at = [start + row * width for row in proposal.q_rows]
    return DraftFields(
        first_row=request.first_row,
        seed=state.seed,
        sample_index=state.sample_index,
        num_tokens=state.num_tokens,
        tokens=proposal.tokens,
        parents=proposal.parents,
        q_at=at,
        without_replacement=bool(at) and proposal.draw == "without_replacement",
    )
