"""The last token of every request after a verification, by inverse CDF. Launched by `..verify`, which says what the
arguments are; ``walk`` is that of `.verify`."""

import triton
import triton.language as tl

from draftwise.kernels.triton.device.compiled import kernel


@triton.jit
def residual(row, q_at, left_out, scale, v, end):
    """The weights that the last token is drawn from, at tokens v < end: max(scale p - q, 0), or p without one
    token."""
    whole = tl.load(row + v, mask=v < end, other=0.0)
    q_row = q_at.to(tl.pointer_type(tl.float32))
    q_end = tl.where(q_at != 0, end, 0)
    rest = tl.maximum(whole * scale - tl.load(q_row + v, mask=v < q_end, other=0.0), 0.0)
    return whole, tl.where(v == left_out, 0.0, rest)


@triton.jit
def source_of(p, scratch, ends, end_numbers, vocab):
    """What a request's last token is drawn from: its number, row, address of q, the token left out, and the factor."""
    m = tl.program_id(0).to(tl.int64)
    at = tl.load(ends + m * 3)
    row = tl.where(at >= 0, p + at * vocab, scratch + (-1 - at) * vocab)
    return m, row, tl.load(ends + m * 3 + 1), tl.load(ends + m * 3 + 2), tl.load(end_numbers + m * 2 + 1)


@kernel("p", "scratch", "vocab")
def residual_masses(p, scratch, ends, end_numbers, masses, vocab, PART: tl.constexpr, BLOCK: tl.constexpr):
    """One part of the vocabulary of one request: mass of the residual, and of the whole row."""
    m, row, q_at, left_out, scale64 = source_of(p, scratch, ends, end_numbers, vocab)
    part = tl.program_id(1)
    scale = scale64.to(tl.float32)
    total = scale64 * 0.0
    whole_total = scale64 * 0.0
    end = tl.minimum(part * PART + PART, vocab)
    for start in range(part * PART, end, BLOCK):
        whole, rest = residual(row, q_at, left_out, scale, start + tl.arange(0, BLOCK), end)
        total += tl.sum(rest.to(tl.float64), 0)
        whole_total += tl.sum(whole.to(tl.float64), 0)
    to = masses + (m * tl.num_programs(1) + part) * 2
    tl.store(to, total)
    tl.store(to + 1, whole_total)


@kernel("p", "scratch", "vocab")
def draw_last(
    p,
    scratch,
    ends,
    end_numbers,
    masses,
    members,
    walk,
    vocab,
    num_nodes,
    num_parts,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One request: which part, then which token; -1 where there is no weight at all."""
    m, row, q_at, left_out, scale64 = source_of(p, scratch, ends, end_numbers, vocab)
    drawn = tl.load(end_numbers + m * 2)
    scale = scale64.to(tl.float32)
    own = masses + m * num_parts * 2
    total = drawn * 0.0
    whole_total = drawn * 0.0
    for s in range(num_parts):
        total += tl.load(own + 2 * s)
        whole_total += tl.load(own + 2 * s + 1)
    # p == q up to rounding: nothing is left, and p itself is drawn from
    whole_only = tl.where(total > 0.0, 0, 1)
    limit = drawn * tl.where(total > 0.0, total, whole_total)
    running = drawn * 0.0
    before = drawn * 0.0
    part = 0
    found_part = 0
    for s in range(num_parts):
        mass = tl.load(own + 2 * s + whole_only)
        # the last part with mass, if rounding leaves none above the limit
        better = tl.where(mass > 0.0, 1 - found_part, 0)
        part = tl.where(better == 1, s, part)
        before = tl.where(better == 1, running, before)
        running += mass
        found_part = tl.where(better == 1, tl.where(running > limit, 1, 0), found_part)
    q_at = tl.where(whole_only == 1, q_at * 0, q_at)
    left_out = tl.where(whole_only == 1, left_out * 0 - 1, left_out)
    scale = tl.where(whole_only == 1, scale * 0.0 + 1.0, scale)
    running = before
    found = 2147483647
    last = -1
    end = tl.minimum(part * PART + PART, vocab)
    for start in range(part * PART, end, BLOCK):
        v = start + tl.arange(0, BLOCK)
        _, rest = residual(row, q_at, left_out, scale, v, end)
        sums = running + tl.cumsum(rest.to(tl.float64), 0)
        above = tl.where(rest > 0.0, v, 2147483647)
        found = tl.minimum(found, tl.min(tl.where(sums > limit, above, 2147483647), 0))
        last = tl.maximum(last, tl.max(tl.where(rest > 0.0, v, -1), 0))
        running += tl.sum(rest.to(tl.float64), 0)
    out = walk + tl.load(members + m).to(tl.int64) * (2 * num_nodes + 2)
    tl.store(out + 1 + num_nodes + tl.load(out), tl.where(found == 2147483647, last, found))
