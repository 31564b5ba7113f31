"""Rule ``rejection``: speculative sampling. Chains after Leviathan, Kalman, Matias (arXiv:2211.17192) and Chen
et al. (arXiv:2302.01318); trees by multi-round rejection over siblings after SpecInfer (arXiv:2305.09781)
and, without replacement, Sequoia (arXiv:2402.12374)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftwise.sampling.draw import pick
from draftwise.sampling.rows import wanted_rows
from draftwise.types import Proposal, Verification
from draftwise.verify.base import Rule, VerifyRequest
from draftwise.verify.common import accept_uniform, recover_uniform, root_uniforms, rows_of, select_rows


class RejectionRule(Rule):
    """Keep a draft x drawn from q with probability min(1, p(x)/q(x)); at the first rejection draw from
    norm(max(p - q, 0)), if all are kept from p. Point masses: keep with p(x), else draw from p without x."""

    lossless = True

    def verify(self, logits: torch.Tensor, requests: Sequence[VerifyRequest]) -> list[Verification]:
        rows, starts = rows_of(requests)
        p = select_rows(logits, rows).softmax(dim=-1)
        if len(rows) == len(requests):  # nothing was drafted
            return finish(requests, [End((), start) for start in starts], p)
        p_of, q_of = gather_drafts(p, starts, requests)
        ends = []
        for request, start, px, qx in zip(requests, starts, p_of, q_of, strict=True):
            if request.proposal.is_chain:
                ends.append(_walk_chain(request, start, px, qx))
            else:
                ends.append(walk_tree(request, p[start : start + request.num_rows], start, px, qx))
        return finish(requests, ends, p)


class End(NamedTuple):
    """Where a request's walk ended, and what its last token is drawn from: row ``p_row`` of p, minus ``q``
    where that is set, without token ``excluded`` where that is >= 0; or ``weights`` [V] as they stand."""

    path: tuple[int, ...]
    p_row: int
    q: torch.Tensor | None = None  # [V]
    excluded: int = -1
    weights: torch.Tensor | None = None  # [V], unnormalised


def gather_drafts(
    p: torch.Tensor, starts: Sequence[int], requests: Sequence[VerifyRequest]
) -> tuple[list[list[float]], list[list[float] | None]]:
    """p(x) and q(x) of every node, per request: p at its parent's row, q at its row of the proposal's q (None:
    point masses). One read of the device for p; q lies with each proposal."""
    at_rows: list[int] = []
    at_tokens: list[int] = []
    q_parts: list[torch.Tensor] = []
    for request, start in zip(requests, starts, strict=True):
        proposal = request.proposal
        at_rows.extend([start + 1 + parent for parent in proposal.parents])
        at_tokens.extend(proposal.tokens)
        if is_sampled(proposal):
            assert proposal.q is not None
            q_parts.append(_at(proposal.q, proposal.q_rows, proposal.tokens))
    p_flat = _at(p, at_rows, at_tokens).tolist() if at_rows else []
    q_flat = torch.cat(q_parts).tolist() if q_parts else []
    p_of: list[list[float]] = []
    q_of: list[list[float] | None] = []
    p_at = q_at = 0
    for request in requests:
        n = len(request.proposal)
        p_of.append(p_flat[p_at : p_at + n])
        p_at += n
        if is_sampled(request.proposal):
            q_of.append(q_flat[q_at : q_at + n])
            q_at += n
        else:
            q_of.append(None)
    return p_of, q_of


def _at(values: torch.Tensor, rows: Sequence[int], columns: Sequence[int]) -> torch.Tensor:
    """values[rows[i], columns[i]] as float32 [n]; on the host numpy indexes in a quarter of torch's time."""
    if values.device.type == "cpu":
        return torch.from_numpy(values.numpy()[list(rows), list(columns)])
    return values[list(rows), list(columns)]


def is_sampled(proposal: Proposal) -> bool:
    """Whether nodes were drawn from q; otherwise they are point masses."""
    return proposal.q is not None and proposal.draw != "fixed" and len(proposal.tokens) > 0


def _walk_chain(request: VerifyRequest, start: int, px: Sequence[float], qx: Sequence[float] | None) -> End:
    proposal = request.proposal
    for i, token in enumerate(proposal.tokens):
        u = accept_uniform(request, i, i + 1)
        if qx is None:
            if not u < px[i]:
                return End(tuple(range(i)), start + i, excluded=token)
        elif not u * qx[i] < px[i]:  # u < p/q, without dividing by a q that rounded to 0
            assert proposal.q is not None
            return End(tuple(range(i)), start + i, q=proposal.q[proposal.q_rows[i]])
    n = len(proposal.tokens)
    return End(tuple(range(n)), start + n)


def walk_tree(
    request: VerifyRequest, p: torch.Tensor, start: int, px: Sequence[float], qx: Sequence[float] | None
) -> End:
    """Multi-round rejection. ``p`` [1 + nodes, V]: the root's row, then each node's.

    The children of a node are tried in drawing order. A rejected child leaves the residual norm(max(p - q, 0))
    as the next one's p; drawn without replacement, q loses the child and is renormalised, too (if nothing is
    left of q, the rest were drawn uniformly from the untried). Fixed children are point masses: p loses them.
    Whatever is left of p when no child is left gives the next token.
    """
    proposal = request.proposal
    tokens = proposal.tokens
    children: dict[int, list[int]] = {}
    for i, parent in enumerate(proposal.parents):
        children.setdefault(parent, []).append(i)
    path: list[int] = []
    node = -1
    while True:
        siblings = children.get(node, [])
        accepted = -1
        left: torch.Tensor | None = None  # p after rejections, unnormalised; None: untouched
        left_total = 1.0
        q: torch.Tensor | None = None
        q_total = 1.0
        for tried, child in enumerate(siblings):
            x = tokens[child]
            u = accept_uniform(request, child, len(path) + 1)
            p_x = px[child] if left is None else float(left[x]) / left_total
            if qx is None:
                q_x = 1.0
            elif q is None:
                q_x = qx[child]
            else:
                q_x = float(q[x]) / q_total
            if u * q_x < p_x:
                accepted = child
                break
            before = p[1 + node] if left is None else left
            if qx is None:
                after = before.clone()
                after[x] = 0.0
            else:
                if q is None:
                    assert proposal.q is not None
                    q = proposal.q[proposal.q_rows[child]]
                after = (before / left_total - q / q_total).clamp_(min=0.0)
                if proposal.draw == "without_replacement":
                    q = q.clone()
                    q[x] = 0.0
                    q_total = float(q.sum())
                    if q_total <= 0.0:
                        q = torch.ones_like(q)
                        q[[tokens[s] for s in siblings[: tried + 1]]] = 0.0
                        q_total = float(q.sum())
            total = float(after.sum())
            if total > 0.0:  # else rejection had probability 0 up to rounding: go on with p as it was
                left, left_total = after, total
        if accepted < 0:
            return End(tuple(path), start + 1 + node, weights=left)
        path.append(accepted)
        node = accepted


def finish(requests: Sequence[VerifyRequest], ends: Sequence[End], p: torch.Tensor) -> list[Verification]:
    """Draw every request's last token: one residual, one draw over all of them."""
    weights = p
    if len(ends) < p.shape[0]:  # else nothing was drafted: every root's row is drawn from as it stands
        weights = p.index_select(0, torch.tensor([end.p_row for end in ends], device=p.device))
    subtracted = False
    out_rows: list[int] = []
    out_tokens: list[int] = []
    for r, end in enumerate(ends):
        if end.weights is not None:
            weights[r] = end.weights
        elif end.q is not None:
            weights[r].sub_(end.q)
            subtracted = True
        elif end.excluded >= 0:
            out_rows.append(r)
            out_tokens.append(end.excluded)
    if subtracted:
        weights.clamp_(min=0.0)
    if out_rows:
        weights[out_rows, out_tokens] = 0.0
    if weights is p:
        uniforms = root_uniforms(requests)
    else:
        uniforms = [
            recover_uniform(request, end.path[-1] if end.path else -1, len(end.path))
            for request, end in zip(requests, ends, strict=True)
        ]
    greedy = [r for r, request in enumerate(requests) if request.state.is_greedy]
    if greedy:  # only rules that also serve temperature 0 (typical, synthetic) get here
        best = wanted_rows(weights)
    last = pick(weights, uniforms)
    for r in greedy:
        last[r] = best[r]
    for r, end in enumerate(ends):
        if last[r] < 0:  # p == q up to rounding: nothing was left of the residual
            last[r] = pick(p[end.p_row : end.p_row + 1], uniforms[r : r + 1])[0]
    return [
        Verification(end.path, (*[request.proposal.tokens[i] for i in end.path], token))
        for request, end, token in zip(requests, ends, last, strict=True)
    ]
