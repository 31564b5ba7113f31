"""Rules ``synthetic`` and ``typical``: drafts stay at given rates, or where they are likely enough. Launched by
`kernels.triton.verify`."""

import triton.language as tl

from draftwise.kernels.triton.device.compiled import kernel
from draftwise.kernels.triton.device.noise import uniform
from draftwise.kernels.triton.device.verify import best_of_parts, end_at, request_of, uniform_of


@kernel()
def keep_at_rates(
    table,
    members,
    walk,
    ends,
    end_numbers,
    rates,
    part_best,
    part_token,
    num_rates,
    num_nodes,
    num_parts,
    SAMPLED: tl.constexpr,
    PARTS_PAD: tl.constexpr,
):
    """One request under rule ``synthetic``: first children stay while u is below the rate of their depth. The last one
    is the most likely token, or SAMPLED: drawn later (`.draws`)."""
    m, r, fields = request_of(table, members, num_nodes)
    out = walk + r * (2 * num_nodes + 2)
    u = uniform_of(fields, 2, -1, -1)
    count = tl.load(fields + 1)
    kept = count * 0
    node = kept - 1
    for i in range(count):
        rate = tl.load(rates + kept, mask=kept < num_rates, other=0.0)
        stays = (tl.load(fields + 6 + num_nodes + i) == node) & (u < rate)
        tl.store(out + 1 + kept, i, mask=stays)
        tl.store(out + 1 + num_nodes + kept, tl.load(fields + 6 + i).to(tl.int32), mask=stays)
        node = tl.where(stays, i, node)
        kept += tl.where(stays, 1, 0)
    tl.store(out, kept.to(tl.int32))
    if SAMPLED:
        end_at(fields, ends, end_numbers, m, tl.load(fields) + node + 1, 0, -1, kept, node, 1.0)
    else:
        want = best_of_parts(part_best, part_token, r * (num_nodes + 1) + node + 1, num_parts, PARTS_PAD)
        tl.store(out + 1 + num_nodes + kept, want)


@kernel("logits", "p", "vocab", "row_stride")
def entropies(logits, p, table, members, found, vocab, row_stride, num_nodes, BLOCK: tl.constexpr):
    """Entropy in nats of the row behind one node (0: the root) of one request: log(sum exp l) - sum p l, of which the
    first is max l - log max p."""
    m, _, fields = request_of(table, members, num_nodes)
    j = tl.program_id(1).to(tl.int64)
    if j > tl.load(fields + 1):
        return
    row = tl.load(fields) + j
    top = float("-inf")
    top_p = 0.0
    total = uniform(row * 0, row * 0, 2, row * 0, row * 0, row * 0) * 0.0
    for start in range(0, vocab, BLOCK):
        v = start + tl.arange(0, BLOCK)
        logit = tl.load(logits + row * row_stride + v, mask=v < vocab, other=float("-inf"))
        weight = tl.load(p + row * vocab + v, mask=v < vocab, other=0.0)
        top = tl.maximum(top, tl.max(logit, 0))
        top_p = tl.maximum(top_p, tl.max(weight, 0))
        total += tl.sum((weight * tl.maximum(logit, -1e30)).to(tl.float64), 0)
    tl.store(found + m * (num_nodes + 1) + j, (top - tl.log(top_p)).to(tl.float64) - total)


@kernel("p", "vocab")
def keep_typical(
    p,
    table,
    members,
    walk,
    ends,
    end_numbers,
    entropies,
    part_best,
    part_token,
    vocab,
    num_nodes,
    num_parts,
    EPSILON: tl.constexpr,
    DELTA: tl.constexpr,
    SAMPLED: tl.constexpr,
    PARTS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One request under rule ``typical``: the longest path of nodes with p(x) > min(EPSILON, DELTA exp(-H)), the first
    of equals. The last token as in `keep_at_rates`."""
    m, r, fields = request_of(table, members, num_nodes)
    out = walk + r * (2 * num_nodes + 2)
    count = tl.load(fields + 1)
    row = tl.arange(0, BLOCK)  # of the root, then of the nodes
    real = (row > 0) & (row <= count)
    above = 1 + tl.load(fields + 6 + num_nodes + row - 1, mask=real, other=-1)
    token = tl.load(fields + 6 + row - 1, mask=real, other=0)
    p_x = tl.load(p + (tl.load(fields) + above) * vocab + token, mask=real, other=0.0).to(tl.float64)
    entropy = tl.load(entropies + m * (num_nodes + 1) + above, mask=real, other=0.0)
    passed = tl.where(real & (p_x > tl.minimum(DELTA * tl.exp(-entropy), EPSILON)), 1, 0)
    # of paths down to each row, the root counted; 0: something was left out
    lengths = tl.where(row == 0, 1, 0)
    for i in range(1, count + 1):
        parent = 1 + tl.load(fields + 6 + num_nodes + i - 1)
        over = tl.sum(tl.where(row == parent, lengths, 0), 0)
        lengths = tl.where((row == i) & (passed > 0) & (over > 0), over + 1, lengths)
    kept = tl.max(lengths, 0).to(tl.int64) - 1
    node = tl.min(tl.where(lengths == kept + 1, row, BLOCK), 0).to(tl.int64) - 1
    tl.store(out, kept.to(tl.int32))
    at = node
    left = kept
    while left > 0:
        left -= 1
        tl.store(out + 1 + left, at.to(tl.int32))
        tl.store(out + 1 + num_nodes + left, tl.load(fields + 6 + at).to(tl.int32))
        at = tl.load(fields + 6 + num_nodes + at)
    if SAMPLED:
        end_at(fields, ends, end_numbers, m, tl.load(fields) + node + 1, 0, -1, kept, node, 1.0)
    else:
        want = best_of_parts(part_best, part_token, r * (num_nodes + 1) + node + 1, num_parts, PARTS_PAD)
        tl.store(out + 1 + num_nodes + kept, want)
