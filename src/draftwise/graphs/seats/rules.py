"""Verification of a step of seats in plain torch, without a value read on the host. The rules are those of `verify`,
which has their papers. On Triton `graphs.seats.kernels` stands for it.

Sums over the vocabulary are torch's own: a draw by inverse CDF may differ from `sampling.draw.pick`'s by rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwise.graphs.loop import inverse_cdf
from draftwise.graphs.seats.memory import KNOWN, RULE, RULES, SAMPLE, SEED, SOURCE, SeatMemory
from draftwise.names import ACCEPT, RECOVER, SHARED, TYPICAL_DELTA, TYPICAL_EPSILON
from draftwise.sampling.noise import device_keys, gumbel_of_keys, uniforms_of_keys


@dataclass(frozen=True, slots=True)
class Deciding:
    """A step's rows: R requests of N each. ``rules``: those that somebody in it has, see `memory.RULES`; ``rates``: of
    rule ``synthetic``; ``trees``: whether somebody's drafts are a tree."""

    requests: int
    rows: int
    rules: Sequence[str]
    rates: tuple[float, ...] = ()
    trees: bool = False

    @property
    def weighs(self) -> bool:
        """Whether a rule looks at the target's distributions, and not at its most likely tokens alone."""
        return not {"greedy", "coupled", "synthetic"}.issuperset(self.rules)


class _Step:
    """The seats of a step: ``state`` [R, 18 + K], ``nodes`` [R] and ``drafts`` [R, N - 1] that are verified, and the
    uniforms of its draws, by the keys of `verify.common`."""

    def __init__(self, memory: SeatMemory, step: Deciding) -> None:
        count = step.requests
        self.state = memory.state[:count]
        self.nodes = memory.now[:count, 1]
        self.drafts = memory.waiting_drafts[:count, : step.rows - 1]
        self.sources = self.state[:, SOURCE]
        forms = memory.forms_of(count)[..., : step.rows]
        self.depths, self.parents = forms[:, 0], forms[:, 2, 1:]  # of rows [R, N], and drafts [R, N - 1]
        self.branched, self.q_rows = memory.branched(count), forms[:, 4, 1:]  # [R], [R, N - 1]
        # [R, 1] each
        self.seeds, self.samples, self.base = (self.state[:, i, None] for i in (SEED, SAMPLE, KNOWN))

    def accept(self, node: Tensor, depth: Tensor) -> Tensor:
        """``node``, ``depth`` [1, n] or [R, n] -> float64 [R, n]."""
        base = self.base
        return uniforms_of_keys(
            device_keys(ACCEPT, self.seeds, self.samples, base - 1 + depth, node, base.expand_as(base + node))
        )

    def recover(self, accepted: Tensor, node: Tensor | None = None) -> Tensor:
        """``accepted`` [R]: drafts that stay, ``node`` [R] the last of them, -1 the root; None: of a chain ->
        float64 [R]."""
        depth, base = accepted[:, None], self.base
        last = depth - 1 if node is None else node[:, None]
        keys = device_keys(RECOVER, self.seeds, self.samples, base + depth, last, base)
        return uniforms_of_keys(keys).squeeze(1)


def verify(memory: SeatMemory, scores: Tensor, step: Deciding, counters: Tensor) -> None:
    """Decide every seat by its own rule; results in ``memory.walk``.

    Args:
        memory: see there.
        scores: [R * N, V] float32, of a root and its drafts, processed; not changed.
        step: see there.
        counters: [V], `sampling.noise.token_counters`.
    """
    count, width = step.requests, step.rows
    scores = scores.view(count, width, -1)
    now = _Step(memory, step)
    drafts = memory.drafts
    kept = torch.zeros_like(now.nodes)
    last = torch.zeros_like(now.nodes)
    path = torch.arange(drafts, device=kept.device).expand(count, drafts).clone()
    p = scores.softmax(-1) if step.weighs else scores
    for rule in step.rules:
        mine = now.state[:, RULE] == RULES.index(rule)
        if rule in ("greedy", "coupled"):
            wanted = _best(scores if rule == "greedy" else scores + _shared_noise(now, counters))
            found = _walk(now, wanted)
        elif rule in ("synthetic", "synthetic_sampled"):
            sampled = rule != "synthetic"
            found = _synthetic(now, p if sampled else scores, step.rates, sampled=sampled)
        elif rule in ("typical", "typical_sampled"):
            found = _typical(now, scores, p, sampled=rule != "typical")
        else:
            found = *_sampled(memory, now, p, block=rule == "block"), path[:, : width - 1]
            if step.trees:
                trees, branched = _rejected_trees(memory, now, p), now.branched
                stay, follows = (torch.where(branched, trees[i], found[i]) for i in range(2))
                found = stay, follows, torch.where(branched[:, None], trees[2], found[2])
        stay, follows, nodes = found
        kept, last = torch.where(mine, stay, kept), torch.where(mine, follows, last)
        path[:, : width - 1] = torch.where(mine[:, None], nodes, path[:, : width - 1])
    packed = memory.walk.packed[:count]
    packed[:, 0].copy_(kept)
    packed[:, 1 : 1 + drafts].copy_(path)
    packed[:, 1 + drafts : 1 + 2 * drafts].copy_(memory.waiting_drafts[:count].gather(1, path))
    packed[:, 1 + drafts :].scatter_(1, kept[:, None], last[:, None].to(torch.int32))


def _best(scores: Tensor) -> Tensor:
    """The best token of each row, the lowest of equals; -1: the row is no distribution."""
    vocab = scores.shape[-1]
    places = torch.arange(vocab, device=scores.device)
    largest = scores.amax(-1)
    best = torch.where(scores == largest[..., None], places, vocab - 1).amin(-1)
    return torch.where(largest > -torch.inf, best, -1)


def _walk(now: _Step, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Follow the tokens ``wanted`` [R, N] behind each row. Drafts that stay [R], the token that follows [R], and the
    path [R, N - 1]; places behind it are 0."""
    drafts = now.drafts.shape[1]
    path = torch.zeros_like(now.drafts)
    row = torch.zeros_like(now.nodes)
    kept, on = torch.zeros_like(row), row == 0
    draft = torch.arange(drafts, device=row.device)
    want = wanted[:, 0]
    for level in range(drafts):
        fits = (
            (now.parents == row[:, None] - 1) & (now.drafts == want[:, None]) & (draft < now.nodes[:, None])
        )
        found = torch.where(fits, draft, drafts).amin(1)
        on = on & (found < drafts)
        path[:, level] = torch.where(on, found, 0)
        row = torch.where(on, found + 1, row)
        kept += on
        want = wanted.gather(1, row[:, None]).squeeze(1)
    return kept, want, path


def _shared_noise(now: _Step, counters: Tensor) -> Tensor:
    """[R, N, V]"""
    depths = now.depths
    keys = device_keys(SHARED, now.seeds, now.samples, now.base + depths, depths, depths)
    return gumbel_of_keys(keys.flatten(), counters).view(*depths.shape, -1)


def _synthetic(
    now: _Step, weights: Tensor, rates: Sequence[float], *, sampled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As `_walk`: first children stay while u is below the rate of their depth; rates fall. ``weights`` [R, N, V]: p,
    or scores if the last token is not ``sampled``."""
    path = torch.zeros_like(now.drafts)
    u = now.accept(torch.full_like(now.base, -1), torch.zeros_like(now.base))  # [R, 1]
    deepest = sum((u[:, 0] < rate).long() for rate in rates)
    kept, node = torch.zeros_like(now.nodes), torch.full_like(now.nodes, -1)
    for i in range(path.shape[1]):
        stays = (now.parents[:, i] == node) & (now.nodes > i) & (kept < deepest)
        path.scatter_(1, kept[:, None], torch.where(stays[:, None], i, path.gather(1, kept[:, None])))
        kept, node = kept + stays, torch.where(stays, i, node)
    return kept, _behind(now, _row(weights, node + 1), kept, node, sampled), path


def _typical(now: _Step, scores: Tensor, p: Tensor, *, sampled: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As `_walk`: the longest path of drafts that are likely enough, the first of equals; see `verify.typical`.
    ``scores``, ``p`` [R, N, V]."""
    log_totals = scores.amax(-1) - p.amax(-1).log()
    entropies = (log_totals - (p * scores.clamp(min=-1e30)).sum(-1)).double()  # [R, N]
    least = (TYPICAL_DELTA * (-entropies).exp()).clamp(max=TYPICAL_EPSILON)
    above, path = now.parents + 1, torch.zeros_like(now.drafts)
    p_of = p.flatten(1).gather(1, above * p.shape[2] + now.drafts).double()
    passed = p_of > least.gather(1, above)
    # of paths down to each row, the root counted; 0: something was left out
    lengths = torch.zeros_like(now.depths)
    lengths[:, 0].fill_(1)
    for i in range(path.shape[1]):
        over = lengths.gather(1, above[:, i : i + 1]).squeeze(1)
        lengths[:, i + 1] = torch.where(passed[:, i] & (now.nodes > i) & (over > 0), over + 1, 0)
    kept, row = lengths.amax(1) - 1, _best(lengths)
    node = row - 1
    for i in range(path.shape[1]):
        place = (kept - 1 - i).clamp(min=0)[:, None]
        path.scatter_(1, place, torch.where(row[:, None] > 0, row[:, None] - 1, path.gather(1, place)))
        row = torch.where(row > 0, above.gather(1, (row - 1).clamp(min=0)[:, None]).squeeze(1), 0)
    return kept, _behind(now, _row(p, node + 1), kept, node, sampled), path


def _behind(now: _Step, p: Tensor, kept: Tensor, node: Tensor, sampled: bool) -> Tensor:
    """The token behind ``kept`` [R] drafts, of which ``node`` is the last: ``sampled`` from p [R, V], or its most
    likely one."""
    return inverse_cdf(p, now.recover(kept, node)) if sampled else _best(p)


def _sampled(memory: SeatMemory, now: _Step, p: Tensor, *, block: bool) -> tuple[Tensor, Tensor]:
    """Rules ``rejection`` and ``block`` on chains. ``p`` [R, N, V]."""
    nodes, tokens = now.nodes, now.drafts
    drafts = tokens.shape[1]
    if not drafts:
        return torch.zeros_like(nodes), inverse_cdf(p[:, 0], now.recover(torch.zeros_like(nodes)))
    q = _drawn_from(memory, now, p)
    p_of = p[:, :drafts].gather(2, tokens[..., None]).squeeze(2).double()  # [R, N - 1]
    q_of = q.gather(2, tokens[..., None]).squeeze(2).double()
    row = torch.arange(drafts, device=p.device)[None]
    uniforms = now.accept(row, row + 1)
    scale = torch.ones_like(uniforms[:, :1])  # [R, 1]
    if block:
        kept, scales = _blocks(p, q, p_of, q_of, uniforms, nodes)
        scale = scales.gather(1, kept[:, None])
        # `verify.block`: what a point mass leaves is drawn as it is
        scale = torch.where((now.sources == 0)[:, None], 1.0, scale)
    else:
        # u < p / q, without dividing by a q that rounded to 0
        passed = (uniforms * q_of < p_of) & (row < nodes[:, None])
        kept = passed.long().cumprod(1).sum(1)  # those before the first that did not
    rejected = kept < nodes
    whole = _row(p, kept)
    at = kept.clamp(max=drafts - 1)[:, None]
    taken = q.gather(1, at[..., None].expand(-1, 1, q.shape[2])).squeeze(1)
    rest = (whole * scale.float() - taken).clamp(min=0.0)
    # nothing left: p == q up to rounding, and p itself is drawn from
    use_rest = rejected[:, None] & (rest.sum(-1, keepdim=True) > 0.0)
    return kept, inverse_cdf(torch.where(use_rest, rest, whole), now.recover(kept))


def _drawn_from(memory: SeatMemory, now: _Step, p: Tensor) -> Tensor:
    """[R, N - 1, V] the distribution that each draft was drawn from. A point mass is one, too: all of it on the
    draft."""
    drafts = now.drafts.shape[1]
    q = torch.zeros_like(p[:, :drafts]).scatter_(2, now.drafts[..., None], 1.0)
    for source, drawn in memory.q.items():
        rows = now.q_rows.clamp(max=drawn.shape[1] - 1)[..., None].expand_as(q)
        q = torch.where((now.sources == source)[:, None, None], drawn[: len(q)].gather(1, rows), q)
    return q


def _rejected_trees(memory: SeatMemory, now: _Step, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`verify.rejection.walk_tree`, for rules ``rejection`` and ``block``: as `_walk`. ``p`` [R, N, V].

    A child of the node that was accepted last comes after it, and siblings stand in drawing order: so one look at each
    draft will do. Requests for which it is not the turn of a draft keep what they have.
    """
    tokens, parents = now.drafts, now.parents
    count, drafts = tokens.shape
    q = _drawn_from(memory, now, p)
    sampled = (now.sources > 0)[:, None]
    path = torch.zeros_like(tokens)
    kept, node = torch.zeros_like(now.nodes), torch.full_like(now.nodes, -1)
    left, left_total = p[:, 0], torch.ones((count, 1), dtype=torch.float64, device=p.device)  # the rest of p
    # that of q, once a sibling was rejected
    rest, rest_total = torch.zeros_like(left), torch.ones_like(left_total)
    worn = torch.zeros_like(sampled)
    tried = torch.zeros_like(left)  # 1 at siblings that were rejected
    for i in range(drafts):
        turn = ((parents[:, i] == node) & (now.nodes > i))[:, None]
        token = tokens[:, i : i + 1]
        own = torch.where(worn, rest, q[:, i])
        total = torch.where(worn & sampled, rest_total, 1.0)
        of_p = left.gather(1, token).double() / left_total
        of_q = torch.where(sampled, own.gather(1, token).double() / total, 1.0)
        drawn = now.accept(torch.full_like(token, i), kept[:, None] + 1)
        accepted = turn & (drawn * of_q < of_p)
        rejected = turn & ~accepted
        # a point mass takes one token away, and leaves the sum as it is
        after = (left / left_total.float() - own / total.float()).clamp(min=0.0)
        after = torch.where(sampled, after, left.scatter(1, token, 0.0))
        sums = after.sum(-1, keepdim=True).double()
        # no sum: rejection had probability 0 up to rounding, and p stays as it is
        use = rejected & (sums > 0.0)
        left, left_total = torch.where(use, after, left), torch.where(use, sums, left_total)
        tried = torch.where(rejected, tried.scatter(1, token, 1.0), tried)
        without = own.scatter(1, token, 0.0)
        # nothing left of q: the others were drawn uniformly from what was not tried
        without = torch.where(without.sum(-1, keepdim=True) > 0.0, without, 1.0 - tried)
        rest = torch.where(rejected, without, rest)
        rest_total = torch.where(rejected, without.sum(-1, keepdim=True).double(), rest_total)
        worn = worn | rejected
        # below an accepted node all begins anew
        path.scatter_(1, kept[:, None], torch.where(accepted, i, path.gather(1, kept[:, None])))
        kept, node = kept + accepted[:, 0], torch.where(accepted[:, 0], i, node)
        left = torch.where(accepted, p[:, i + 1], left)
        left_total = torch.where(accepted, 1.0, left_total)
        tried, worn = torch.where(accepted, 0.0, tried), worn & ~accepted
    return kept, inverse_cdf(left, now.recover(kept, node)), path


def _blocks(
    p: Tensor, q: Tensor, p_of: Tensor, q_of: Tensor, uniforms: Tensor, nodes: Tensor
) -> tuple[Tensor, Tensor]:
    """`verify.block.BlockRule`: drafts that stay [S], and p_0 .. p_K of the paper [S, K + 1]."""
    drafts = p_of.shape[1]
    ratio = torch.where(q_of > 0.0, p_of / torch.where(q_of > 0.0, q_of, 1.0), (p_of > 0.0).double())
    scales = [torch.ones_like(ratio[:, 0])]
    for i in range(drafts):
        scales.append((scales[-1] * ratio[:, i]).clamp(max=1.0))
    kept = torch.zeros_like(nodes)
    for i in range(1, drafts + 1):
        chance = scales[i]
        if i < drafts:
            left = p[:, i] * scales[i].float()[:, None] - q[:, i]
            z = left.clamp(min=0.0).sum(-1).double()
            rest = z + 1.0 - scales[i]
            inner = torch.where(rest > 0.0, z / torch.where(rest > 0.0, rest, 1.0), 1.0)
            chance = torch.where(nodes > i, inner, chance)
        kept = torch.where((uniforms[:, i - 1] < chance) & (nodes >= i), i, kept)
    return kept, torch.stack(scales, dim=1)


def _row(x: Tensor, at: Tensor) -> Tensor:
    """``x`` [S, n, V], ``at`` [S] -> [S, V]."""
    return x.gather(1, at[:, None, None].expand(-1, 1, x.shape[2])).squeeze(1)
