"""Verification of a resident step in plain torch, without a value read on the host. The rules are those of `verify`,
which has their papers; chains only. On Triton `kernels/triton/resident.py` stands for it.

Sums over the vocabulary are torch's own: a draw by inverse CDF may differ from `sampling.draw.pick`'s by rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwise.kernels.resident import KNOWN, SAMPLE, SEED, ResidentMemory, ResidentRule
from draftwise.names import ACCEPT, RECOVER, SHARED
from draftwise.sampling.noise import device_keys, gumbel_of_keys, uniforms_of_keys

_BELOW_ONE = 1.0 - 2.0**-52


class _Numbers:
    """The uniforms of a step, by the keys of `verify.common`."""

    def __init__(self, memory: ResidentMemory) -> None:
        self.seeds = memory.state[:, SEED, None]
        self.samples = memory.state[:, SAMPLE, None]
        self.base = memory.state[:, KNOWN, None]  # [S, 1]

    def accept(self, node: Tensor, depth: Tensor) -> Tensor:
        """``node``, ``depth`` [1, n] or [S, n] -> float64 [S, n]."""
        base = self.base
        return uniforms_of_keys(
            device_keys(ACCEPT, self.seeds, self.samples, base - 1 + depth, node, base.expand_as(base + node))
        )

    def recover(self, accepted: Tensor) -> Tensor:
        """``accepted`` [S]: drafts of a chain that stay -> float64 [S]."""
        depth, base = accepted[:, None], self.base
        keys = device_keys(RECOVER, self.seeds, self.samples, base + depth, depth - 1, base)
        return uniforms_of_keys(keys).squeeze(1)


def verify(
    memory: ResidentMemory, logits: Tensor, rule: ResidentRule, q: Tensor | None, counters: Tensor
) -> None:
    """Decide every slot; results in ``memory.walk``.

    Args:
        memory: see there.
        logits: [S * (K + 1), V] float32, of a root and its drafts; not changed.
        rule: the same for all.
        q: [S, K, V] float32, what the drafts were drawn from; None: point masses.
        counters: [V], `sampling.noise.token_counters`.
    """
    slots, drafts = memory.slots, memory.drafts
    scores = logits.view(slots, drafts + 1, -1)
    if rule.name != "greedy":
        scores = scores / memory.temperatures.float()[:, None, None]
    nodes = memory.now[:, 1]
    if rule.name in ("greedy", "coupled"):
        if rule.name == "coupled":
            scores = scores + _shared_noise(memory, counters)
        wanted = _best(scores)  # [S, K + 1]
        kept = _leading(memory.waiting_drafts == wanted[:, :drafts], nodes)
        last = wanted.gather(1, kept[:, None]).squeeze(1)
    elif rule.name == "synthetic":
        kept, last = _synthetic(memory, scores, rule, nodes)
    else:
        kept, last = _sampled(memory, scores, rule, nodes, q)
    packed = memory.walk.packed
    packed[:, 0].copy_(kept)
    packed[:, 1 : 1 + drafts].copy_(torch.arange(drafts, device=packed.device))
    packed[:, 1 + drafts : 1 + 2 * drafts].copy_(memory.waiting_drafts)
    packed[:, 1 + drafts :].scatter_(1, kept[:, None], last[:, None].to(torch.int32))


def _best(scores: Tensor) -> Tensor:
    """The best token of each row, the lowest of equals."""
    vocab = scores.shape[-1]
    places = torch.arange(vocab, device=scores.device)
    return torch.where(scores == scores.amax(-1, keepdim=True), places, vocab - 1).amin(-1)


def _leading(passed: Tensor, nodes: Tensor) -> Tensor:
    """How many of the first ``nodes`` [S] passed [S, K] without one before that did not: int64 [S]."""
    row = torch.arange(passed.shape[1], device=passed.device)
    return (passed & (row < nodes[:, None])).long().cumprod(1).sum(1)


def _shared_noise(memory: ResidentMemory, counters: Tensor) -> Tensor:
    """[S, K + 1, V]"""
    row = torch.arange(memory.drafts + 1, device=counters.device)
    seeds, samples = memory.state[:, SEED, None], memory.state[:, SAMPLE, None]
    positions = memory.state[:, KNOWN, None] + row
    keys = device_keys(SHARED, seeds, samples, positions, row, row)
    return gumbel_of_keys(keys.flatten(), counters).view(memory.slots, memory.drafts + 1, -1)


def _synthetic(
    memory: ResidentMemory, scores: Tensor, rule: ResidentRule, nodes: Tensor
) -> tuple[Tensor, Tensor]:
    numbers = _Numbers(memory)
    u = numbers.accept(torch.full_like(numbers.base, -1), torch.zeros_like(numbers.base))  # [S, 1]
    kept = torch.zeros_like(nodes)
    for i, rate in enumerate(rule.rates[: memory.drafts]):
        kept = kept + ((u[:, 0] < rate) & (nodes > i)).long()
    p = _row(scores, kept).softmax(-1)
    return kept, _pick(p, numbers.recover(kept)) if rule.sampled else _best(p)


def _sampled(
    memory: ResidentMemory, scores: Tensor, rule: ResidentRule, nodes: Tensor, q: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Rules ``rejection`` and ``block``."""
    drafts, numbers = memory.drafts, _Numbers(memory)
    p = scores.softmax(-1)
    if not drafts:
        kept = torch.zeros_like(nodes)
        return kept, _pick(p[:, 0], numbers.recover(kept))
    tokens = memory.waiting_drafts
    p_of = p[:, :drafts].gather(2, tokens[..., None]).squeeze(2).double()  # [S, K]
    q_of = torch.ones_like(p_of) if q is None else q.gather(2, tokens[..., None]).squeeze(2).double()
    row = torch.arange(drafts, device=p.device)[None]
    uniforms = numbers.accept(row, row + 1)
    scale = torch.ones_like(uniforms[:, :1])  # [S, 1]
    if rule.name == "rejection":
        # u < p / q, without dividing by a q that rounded to 0
        kept = _leading(uniforms * q_of < p_of, nodes)
    else:
        kept, scales = _blocks(p, q, p_of, q_of, uniforms, nodes)
        scale = scales.gather(1, kept[:, None])
    rejected = kept < nodes
    whole = _row(p, kept)
    at = kept.clamp(max=drafts - 1)[:, None]
    if q is None:
        rest = whole.scatter(1, tokens.gather(1, at), 0.0)
    else:
        taken = q.gather(1, at[..., None].expand(-1, 1, q.shape[2])).squeeze(1)
        rest = (whole * scale.float() - taken).clamp(min=0.0)
    # nothing left: p == q up to rounding, and p itself is drawn from
    use_rest = rejected[:, None] & (rest.sum(-1, keepdim=True) > 0.0)
    return kept, _pick(torch.where(use_rest, rest, whole), numbers.recover(kept))


def _blocks(
    p: Tensor, q: Tensor | None, p_of: Tensor, q_of: Tensor, uniforms: Tensor, nodes: Tensor
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
            if q is None:
                z = scales[i] * (1.0 - p_of[:, i])
            else:
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


def _pick(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse CDF, int64 [S]; -1: no weight. A token of weight 0 is never drawn."""
    sums = weights.cumsum(-1, dtype=torch.float64)
    total = sums[:, -1:]
    target = uniforms[:, None].clamp(max=_BELOW_ONE) * total
    found = torch.searchsorted(sums, target, right=True).squeeze(1).clamp(max=weights.shape[1] - 1)
    return torch.where(total[:, 0] > 0.0, found, -1)
