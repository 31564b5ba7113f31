"""Verification of a whole batch on the device. Launched by `..verify`, which says what the arguments are.

A request's fields in ``table`` (int64, `..verify.DraftBatch`): 0 first row, 1 nodes, 2 seed, 3 sample index,
4 committed tokens, 5 whether siblings were drawn without replacement (then none is a point mass); from 6 on its nodes'
tokens, parents, and addresses of the rows of q they were drawn from (0: point mass), N each. A request's part of
``walk`` (int32): length of the accepted path, the path [N], committed tokens [N + 1].
"""

import triton
import triton.language as tl

from draftwise.kernels.triton.device.compiled import kernel
from draftwise.kernels.triton.device.noise import gumbel, row_key, uniform


@triton.jit
def request_of(table, members, num_nodes):
    """The request that a program decides: which one of the members, which one of the batch, and its fields."""
    m = tl.program_id(0).to(tl.int64)
    r = tl.load(members + m).to(tl.int64)
    return m, r, table + r * (6 + 3 * num_nodes)


@triton.jit
def uniform_of(fields, STREAM: tl.constexpr, depth, node):
    """The uniform of a node (-1: the root), ``depth`` tokens behind those that are committed."""
    base = tl.load(fields + 4)
    return uniform(tl.load(fields + 2), tl.load(fields + 3), STREAM, base + depth, base * 0 + node, base)


@triton.jit
def end_at(fields, ends, end_numbers, m, row, q_at, left_out, kept, node, scale):
    """Say what the last token is drawn from (`.draws`), behind ``kept`` drafts, of which ``node`` is the last."""
    tl.store(ends + m * 3, row)
    tl.store(ends + m * 3 + 1, q_at)
    tl.store(ends + m * 3 + 2, left_out)
    tl.store(end_numbers + m * 2, uniform_of(fields, 3, kept, node))
    tl.store(end_numbers + m * 2 + 1, scale)


@kernel("logits", "vocab", "row_stride")
def wanted_parts(
    logits,
    table,
    members,
    part_best,
    part_token,
    vocab,
    row_stride,
    num_nodes,
    NOISY: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One part of the vocabulary behind one node of one request (0: the root): its largest logit and that token, the
    lowest of equals, -1 if nothing is finite; NOISY: of logit + shared Gumbel noise."""
    _, r, fields = request_of(table, members, num_nodes)
    j = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    if j > tl.load(fields + 1):
        return
    row = tl.load(fields) + j
    key = row * 0
    if NOISY:
        base = tl.load(fields + 4)
        position = base
        node = j - 1
        while node >= 0:
            position += 1
            node = tl.load(fields + 6 + num_nodes + node)
        key = row_key(tl.load(fields + 2), tl.load(fields + 3), 0, position, position * 0 - 1, position * 0)
    best = float("-inf")
    token = part * 0 - 1
    end = tl.minimum(part * PART + PART, vocab)
    for start in range(part * PART, end, BLOCK):
        v = start + tl.arange(0, BLOCK)
        values = tl.load(logits + row * row_stride + v, mask=v < end, other=float("-inf"))
        if NOISY:
            values += gumbel(key, v)
            values = tl.where(v < end, values, float("-inf"))
        values = tl.where(values == values, values, float("-inf"))  # not a number: never the largest
        top = tl.max(values, 0)
        first = tl.min(tl.where(values == top, v, 2147483647), 0)
        token = tl.where(top > best, first, token)
        best = tl.maximum(best, top)
    at = (r * (num_nodes + 1) + j) * tl.num_programs(2) + part
    tl.store(part_best + at, best)
    tl.store(part_token + at, token)


@triton.jit
def best_of_parts(part_best, part_token, at, num_parts, PARTS_PAD: tl.constexpr):
    """The token of the largest part; of equals the lowest, which is the first part's."""
    s = tl.arange(0, PARTS_PAD)
    values = tl.load(part_best + at * num_parts + s, mask=s < num_parts, other=float("-inf"))
    tokens = tl.load(part_token + at * num_parts + s, mask=s < num_parts, other=2147483647)
    return tl.min(tl.where(values == tl.max(values, 0), tokens, 2147483647), 0)


@kernel()
def walk_trees(table, members, walk, part_best, part_token, num_nodes, num_parts, PARTS_PAD: tl.constexpr):
    """One request: follow the tokens that the target wants; parents precede their children, so one pass will do."""
    _, r, fields = request_of(table, members, num_nodes)
    out = walk + r * (2 * num_nodes + 2)
    rows = r * (num_nodes + 1)
    node = tl.load(fields) * 0 - 1
    length = 0
    want = best_of_parts(part_best, part_token, rows, num_parts, PARTS_PAD)
    for i in range(tl.load(fields + 1)):
        fits = tl.where(tl.load(fields + 6 + num_nodes + i) == node, 1, 0)
        hit = tl.where(tl.load(fields + 6 + i) == want, fits, 0)
        if hit == 1:
            tl.store(out + 1 + length, i)
            tl.store(out + 1 + num_nodes + length, want)
            length += 1
            node = node * 0 + i
            want = best_of_parts(part_best, part_token, rows + 1 + i, num_parts, PARTS_PAD)
    tl.store(out, length)
    tl.store(out + 1 + num_nodes + length, want)


@triton.jit
def drafted(fields, i, num_nodes):
    """Token of node i, and the address of the row of q that it was drawn from; 0: a point mass."""
    return tl.load(fields + 6 + i), tl.load(fields + 6 + 2 * num_nodes + i)


@triton.jit
def q_of(q_at, token):
    """q(token) in float64; 1 of a point mass."""
    row = q_at.to(tl.pointer_type(tl.float32))
    return tl.load(row + token, mask=q_at != 0, other=1.0).to(tl.float64)


@triton.jit
def end_chain(fields, out, ends, end_numbers, m, kept, count, scale, num_nodes):
    """A chain of which ``kept`` drafts stay: write its path, and what the last token is drawn from (`draws`)."""
    for i in range(kept):
        tl.store(out + 1 + i, i)
        tl.store(out + 1 + num_nodes + i, tl.load(fields + 6 + i))
    tl.store(out, kept)
    rejected = kept < count
    token = tl.load(fields + 6 + kept, mask=rejected, other=-1)
    q_at = tl.load(fields + 6 + 2 * num_nodes + kept, mask=rejected, other=0)
    left_out = tl.where(q_at == 0, token, -1)
    scale = tl.where(q_at == 0, 1.0, scale)
    end_at(fields, ends, end_numbers, m, tl.load(fields) + kept, q_at, left_out, kept, kept - 1, scale)


@kernel("p", "vocab")
def judge_chains(p, table, members, walk, ends, end_numbers, vocab, num_nodes):
    """One chain under rule ``rejection``: keep drafts while u < p / q."""
    m, r, fields = request_of(table, members, num_nodes)
    first = tl.load(fields)
    count = tl.load(fields + 1)
    kept = count * 0
    for i in range(count):
        token, q_at = drafted(fields, i, num_nodes)
        p_x = tl.load(p + (first + i) * vocab + token).to(tl.float64)
        # u < p / q, without dividing by a q that rounded to 0
        passed = uniform_of(fields, 2, i, i) * q_of(q_at, token) < p_x
        kept += tl.where(kept == i, tl.where(passed, 1, 0), 0)
    end_chain(fields, walk + r * (2 * num_nodes + 2), ends, end_numbers, m, kept, count, 1.0, num_nodes)


@triton.jit
def next_scale(p, fields, first, i, scale, vocab, num_nodes):
    """min(1, scale p(x) / q(x)) of node i of a chain: p_{i+1} of block verification, float64."""
    token, q_at = drafted(fields, i, num_nodes)
    p_x = tl.load(p + (first + i) * vocab + token).to(tl.float64)
    q_x = q_of(q_at, token)
    # q = 0 cannot have been drawn but by rounding; the ratio is then infinite unless p is 0, too
    ratio = tl.where(q_x > 0.0, p_x / tl.where(q_x > 0.0, q_x, 1.0), tl.where(p_x > 0.0, 1e30, 0.0))
    return tl.minimum(scale * ratio, 1.0)


@kernel("p", "vocab")
def block_masses(p, table, members, masses, vocab, num_nodes, BLOCK: tl.constexpr):
    """Z_i of one chain, i = 1..n-1: what is left of p_i p after its node i - 1, less the q of node i."""
    m, _, fields = request_of(table, members, num_nodes)
    i = tl.program_id(1) + 1
    if i >= tl.load(fields + 1):
        return
    first = tl.load(fields)
    scale = q_of(first * 0, first * 0)  # 1
    for j in range(i):
        scale = next_scale(p, fields, first, j, scale, vocab, num_nodes)
    token, q_at = drafted(fields, i, num_nodes)
    row = p + (first + i) * vocab
    mass = scale * (1.0 - tl.load(row + token).to(tl.float64))
    if q_at != 0:
        q_row = q_at.to(tl.pointer_type(tl.float32))
        narrow = scale.to(tl.float32)
        mass = mass * 0.0
        for start in range(0, vocab, BLOCK):
            v = start + tl.arange(0, BLOCK)
            left = tl.load(row + v, mask=v < vocab, other=0.0) * narrow
            left -= tl.load(q_row + v, mask=v < vocab, other=0.0)
            mass += tl.sum(tl.maximum(left, 0.0).to(tl.float64), 0)
    tl.store(masses + m * num_nodes + i, mass)


@kernel("p", "vocab")
def judge_blocks(p, table, members, walk, ends, end_numbers, masses, vocab, num_nodes):
    """One chain under rule ``block``: the longest prefix whose uniform is below its chance; see `verify.block`."""
    m, r, fields = request_of(table, members, num_nodes)
    first = tl.load(fields)
    count = tl.load(fields + 1)
    kept = count * 0
    bad = count  # the first draft whose row has no distribution
    scale = q_of(count * 0, count * 0)  # 1
    kept_scale = scale
    for i in range(1, count + 1):
        token, _ = drafted(fields, i - 1, num_nodes)
        p_x = tl.load(p + (first + i - 1) * vocab + token)
        bad = tl.where((bad == count) & (p_x != p_x), count * 0 + i - 1, bad)
        scale = next_scale(p, fields, first, i - 1, scale, vocab, num_nodes)
        z = tl.load(masses + m * num_nodes + i, mask=i < count, other=0.0)
        rest = z + 1.0 - scale
        # p == q from here on: nothing to correct
        chance = tl.where(rest > 0.0, z / tl.where(rest > 0.0, rest, 1.0), 1.0)
        chance = tl.where(i < count, chance, scale)
        passed = uniform_of(fields, 2, i - 1, i - 1) < chance
        kept = tl.where(passed, count * 0 + i, kept)
        kept_scale = tl.where(passed, scale, kept_scale)
    kept = tl.where(bad < count, bad, kept)  # nothing can be drawn there: the request fails
    end_chain(
        fields, walk + r * (2 * num_nodes + 2), ends, end_numbers, m, kept, count, kept_scale, num_nodes
    )


@kernel("p", "scratch", "vocab")
def reject_trees(p, table, members, walk, ends, end_numbers, scratch, vocab, num_nodes, BLOCK: tl.constexpr):
    """One tree under rules ``rejection`` and ``block``: children of a node are tried in drawing order, each rejected
    one is taken away from p; see `verify.rejection.walk_tree`.

    ``scratch`` [members, 3, V]: two rows that the rest of p is in by turns, one for the rest of q. A child of the node
    that was kept last comes after it, so one pass over the nodes will do.
    """
    m, r, fields = request_of(table, members, num_nodes)
    out = walk + r * (2 * num_nodes + 2)
    first = tl.load(fields)
    count = tl.load(fields + 1)
    without = tl.load(fields + 5)
    own = scratch + m * 3 * vocab
    node = count * 0 - 1
    length = count * 0
    turn = count * 0 - 1  # which scratch row holds the rest of p; -1: p is whole
    worn = count * 0  # whether the rest of q is in its scratch row
    one = q_of(first * 0, first * 0)  # in float64
    left_total = one
    q_total = one
    for i in range(count):
        if tl.load(fields + 6 + num_nodes + i) == node:
            token, q_at = drafted(fields, i, num_nodes)
            left = tl.where(turn < 0, p + (first + 1 + node) * vocab, own + turn * vocab)
            q_row = tl.where(worn != 0, own + 2 * vocab, q_at.to(tl.pointer_type(tl.float32)))
            p_x = tl.load(left + token).to(tl.float64) / left_total
            q_x = tl.load(q_row + token, mask=q_at != 0, other=1.0).to(tl.float64) / q_total
            if uniform_of(fields, 2, length, i) * q_x < p_x:
                tl.store(out + 1 + length, i)
                tl.store(out + 1 + num_nodes + length, token)
                length += 1
                node = node * 0 + i
                turn = turn * 0 - 1
                worn = worn * 0
                left_total = one
                q_total = one
            else:
                other = tl.where(turn == 0, 1, 0)
                after = own + other * vocab
                total = one * 0.0
                p_scale = left_total.to(tl.float32)
                q_scale = q_total.to(tl.float32)
                q_end = tl.where(q_at != 0, vocab, 0)
                left_out = tl.where(q_at != 0, -1, token)
                for start in range(0, vocab, BLOCK):
                    v = start + tl.arange(0, BLOCK)
                    rest = tl.load(left + v, mask=v < vocab, other=0.0)
                    if q_at != 0:  # a point mass leaves the sum as it is, and takes one token away
                        rest = rest / p_scale
                    rest = tl.maximum(rest - tl.load(q_row + v, mask=v < q_end, other=0.0) / q_scale, 0.0)
                    rest = tl.where(v == left_out, 0.0, rest)
                    tl.store(after + v, rest, mask=v < vocab)
                    total += tl.sum(rest.to(tl.float64), 0)
                if without != 0:
                    worn = worn * 0 + 1
                    rest_row = own + 2 * vocab
                    q_total = one * 0.0
                    for start in range(0, vocab, BLOCK):
                        v = start + tl.arange(0, BLOCK)
                        rest = tl.load(q_row + v, mask=v < vocab, other=0.0)
                        rest = tl.where(v == token, 0.0, rest)
                        tl.store(rest_row + v, rest, mask=v < vocab)
                        q_total += tl.sum(rest.to(tl.float64), 0)
                    if q_total <= 0.0:  # the others were drawn uniformly from what was not tried
                        tl.debug_barrier()
                        for start in range(0, vocab, BLOCK):
                            v = start + tl.arange(0, BLOCK)
                            tl.store(rest_row + v, v.to(tl.float32) * 0.0 + 1.0, mask=v < vocab)
                        tl.debug_barrier()
                        q_total = one * vocab
                        for s in range(i + 1):
                            tried = tl.load(fields + 6 + s)
                            if tl.load(fields + 6 + num_nodes + s) == node:
                                q_total -= tl.load(rest_row + tried).to(tl.float64)
                                tl.debug_barrier()
                                tl.store(rest_row + tried, 0.0)
                                tl.debug_barrier()
                # else rejection had probability 0 up to rounding: go on with p as it was
                turn = tl.where(total > 0.0, other, turn)
                left_total = tl.where(total > 0.0, total, left_total)
                tl.debug_barrier()  # what the rows hold now is read by every thread
    tl.store(out, length)
    row = tl.where(turn < 0, first + 1 + node, -1 - (3 * m + turn))
    end_at(fields, ends, end_numbers, m, row, 0, -1, length, node, 1.0)
