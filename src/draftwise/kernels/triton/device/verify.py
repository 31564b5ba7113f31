"""Verification of a whole batch on the device. Launched by `..verify`, which says what the arguments are."""

import triton
import triton.language as tl


@triton.jit
def argmax_rows(logits, keys, out, vocab, stride, NOISY: tl.constexpr, BLOCK: tl.constexpr):
    """One row: its largest logit's token, the lowest of equals; NOISY: of logit + Gumbel noise (`sampling.noise`)."""
    row = tl.program_id(0).to(tl.int64)
    best = float("-inf")
    token = 0
    for start in range(0, vocab, BLOCK):
        v = start + tl.arange(0, BLOCK)
        values = tl.load(logits + row * stride + v, mask=v < vocab, other=float("-inf"))
        if NOISY:
            # splitmix64 in signed words: a right shift copies the sign, so what it shifts in is masked off
            z = (v.to(tl.int64) + 1) * -7046029254386353131 + tl.load(keys + row)
            z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
            z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
            z = z ^ ((z >> 31) & 0x1FFFFFFFF)
            bits = ((z >> 24) & 0xFFFFFFFFFF).to(tl.float32)
            u = tl.minimum((bits + 0.5) * 9.094947017729282e-13, 0.99999994)  # 2^-40; below 1
            # log(1 - u) to the last bits for small u: log(w) u / (1 - w) with w the rounded 1 - u
            w = 1.0 - u
            taken = 1.0 - w
            exponential = tl.where(taken == 0.0, u, -tl.log(w) * (u / tl.where(taken == 0.0, 1.0, taken)))
            values += -tl.log(exponential)
        top = tl.max(values, 0)
        first = tl.min(tl.where(values == top, v, 2147483647), 0)
        token = tl.where(top > best, first, token)
        best = tl.maximum(best, top)
    tl.store(out + row, token)


@triton.jit
def walk_trees(tokens, parents, counts, wanted, paths, accepted, out_tokens, num_nodes):
    """One request: follow the tokens that the target wants; parents precede their children, so one pass will do."""
    r = tl.program_id(0)
    base = r * num_nodes
    rows = r * (num_nodes + 1)
    node = -1
    length = 0
    want = tl.load(wanted + rows)
    for i in range(tl.load(counts + r)):
        fits = tl.where(tl.load(parents + base + i) == node, 1, 0)
        hit = tl.where(tl.load(tokens + base + i) == want, fits, 0)
        if hit == 1:
            tl.store(paths + base + length, i)
            tl.store(out_tokens + rows + length, want)
            length += 1
            node = i
            want = tl.load(wanted + rows + 1 + i)
    tl.store(accepted + r, length)
    tl.store(out_tokens + rows + length, want)


@triton.jit
def reject_chains(
    p,
    q,
    first_rows,
    q_rows,
    tokens,
    counts,
    accept,
    recover,
    accepted,
    out_tokens,
    vocab,
    num_nodes,
    BLOCK: tl.constexpr,
):
    """One request: judge its drafts in order, then draw from what the rejected one leaves of p, or from p."""
    r = tl.program_id(0)
    first = tl.load(first_rows + r)
    q_first = tl.load(q_rows + r)
    count = tl.load(counts + r)
    base = r * num_nodes
    out = out_tokens + r * (num_nodes + 1)
    length = 0
    going = 1
    for i in range(count):
        token = tl.load(tokens + base + i)
        p_x = tl.load(p + (first + i) * vocab + token).to(tl.float64)
        q_x = tl.load(q + (q_first + i) * vocab + token, mask=q_first >= 0, other=1.0).to(tl.float64)
        # u < p / q, without dividing by a q that rounded to 0
        going = tl.where(tl.load(accept + base + i) * q_x < p_x, going, 0)
        if going == 1:
            tl.store(out + i, token)
            length += 1
    rejected = length < count
    p_row = p + (first + length) * vocab
    q_row = q + (q_first + length) * vocab
    # bounds instead of scalar masks: which tokens q is subtracted from, which token is left out
    q_end = tl.where(q_first >= 0, tl.where(rejected, vocab, 0), 0)
    left_out = tl.load(tokens + base + length, mask=rejected, other=-1)
    left_out = tl.where(q_first >= 0, -1, left_out)
    uniform = tl.load(recover + r * (num_nodes + 1) + length)
    total = uniform * 0.0  # float64, as what is added in the loop
    p_total = uniform * 0.0
    for start in range(0, vocab, BLOCK):
        v = start + tl.arange(0, BLOCK)
        whole = tl.load(p_row + v, mask=v < vocab, other=0.0)
        weights = tl.maximum(whole - tl.load(q_row + v, mask=v < q_end, other=0.0), 0.0)
        weights = tl.where(v == left_out, 0.0, weights)
        total += tl.sum(weights.to(tl.float64), 0)
        p_total += tl.sum(whole.to(tl.float64), 0)
    # p == q up to rounding: nothing is left, and p itself is drawn from
    nothing = total <= 0.0
    q_end = tl.where(nothing, 0, q_end)
    left_out = tl.where(nothing, -1, left_out)
    total = tl.where(nothing, p_total, total)
    limit = uniform * total
    running = total * 0.0
    found = 2147483647
    for start in range(0, vocab, BLOCK):
        v = start + tl.arange(0, BLOCK)
        whole = tl.load(p_row + v, mask=v < vocab, other=0.0)
        weights = tl.maximum(whole - tl.load(q_row + v, mask=v < q_end, other=0.0), 0.0)
        weights = tl.where(v == left_out, 0.0, weights).to(tl.float64)
        sums = running + tl.cumsum(weights, 0)
        above = tl.min(tl.where(sums > limit, tl.where(weights > 0.0, v, 2147483647), 2147483647), 0)
        found = tl.minimum(found, above)
        running += tl.sum(weights, 0)
    tl.store(accepted + r, length)
    tl.store(out + length, tl.where(found == 2147483647, -1, found))
