"""Rows of a drafter's passes, made from what only the device knows. Launched by `..inputs`, which says what the
arguments are."""

import triton.language as tl

from draftwise.kernels.triton.device.compiled import kernel
from draftwise.kernels.triton.device.noise import gumbel


@kernel()
def next_rows(
    start,
    length,
    tables,
    positions,
    slots,
    context,
    requests,
    step,
    table_stride,
    num_pages,
    offset,
    max_position,
    spare_slot,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The rows of draft ``step`` of all requests, one each."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = r < requests
    key = tl.load(start + r, mask=inside, other=0) + step
    position = key + offset
    page = tl.minimum(key // PAGE, num_pages - 1)
    slot = tl.load(tables + r * table_stride + page, mask=inside, other=0).to(tl.int64) * PAGE + key % PAGE
    followed = tl.load(length + r, mask=inside, other=0) > step + 1
    slot = tl.where(followed & (position <= max_position), slot, spare_slot)
    tl.store(slots + r, slot, mask=inside)
    tl.store(positions + r, tl.minimum(tl.maximum(position, 0), max_position), mask=inside)
    tl.store(context + r, key.to(tl.int32), mask=inside)


@kernel("logits", "ids", "vocab", "stride")
def add_biases(
    logits,
    at,
    ids,
    vocab,
    stride,
    rows_each,
    MAPPED: tl.constexpr,
    LEAST: tl.constexpr,
    PART: tl.constexpr,
):
    """One part of a row: what stands at its request's address is added, LEAST at the least."""
    row = tl.program_id(0).to(tl.int64)
    found = tl.load(at + row // rows_each)
    if found == 0:
        return
    v = tl.program_id(1) * PART + tl.arange(0, PART)
    inside = v < vocab
    token = v.to(tl.int64)
    if MAPPED:
        token = tl.load(ids + v, mask=inside, other=0)
    bias = tl.load(found.to(tl.pointer_type(tl.float32)) + token, mask=inside, other=0.0)
    own = logits + row * stride + v
    tl.store(own, tl.load(own, mask=inside, other=0.0) + tl.maximum(bias, LEAST), mask=inside)


@kernel("logits", "ids", "vocab", "stride")
def part_of_best(
    logits,
    scales,
    keys,
    ids,
    values,
    tokens,
    sums,
    vocab,
    stride,
    key_stride,
    NOISY: tl.constexpr,
    MAPPED: tl.constexpr,
    SUMS: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    PART: tl.constexpr,
):
    """One part of a row: its K largest scores and their tokens, best first, the lowest token of equals; SUMS: and the
    sum of exp(score - largest)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    v = part * PART + tl.arange(0, PART)
    inside = v < vocab
    score = tl.load(logits + row * stride + v, mask=inside, other=0.0) * tl.load(scales + row)
    if NOISY:
        token = v.to(tl.int64)
        if MAPPED:
            token = tl.load(ids + v, mask=inside, other=0)
        score += gumbel(tl.load(keys + row * key_stride), token)
    score = tl.where(inside & (score == score), score, float("-inf"))
    at = (row * tl.num_programs(1) + part) * K_PAD
    if SUMS:
        top = tl.max(score, 0)
        floor = tl.where(top == float("-inf"), 0.0, top)
        tl.store(sums + at // K_PAD, tl.sum(tl.exp(score - floor), 0))
    left = tl.where(inside, 1, 0)
    for k in range(K):
        best = tl.max(tl.where(left == 1, score, float("-inf")), 0)
        found = tl.min(tl.where((left == 1) & (score == best), v, 2147483647), 0)
        left = tl.where(v == found, 0, left)
        tl.store(values + at + k, best)
        tl.store(tokens + at + k, found)


@kernel("ids")
def best_of_all(
    values,
    tokens,
    sums,
    ids,
    out_values,
    out_tokens,
    totals,
    num_parts,
    MAPPED: tl.constexpr,
    SUMS: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    PARTS_PAD: tl.constexpr,
):
    """One row: the K best of what its parts found; SUMS: and the logarithm of the sum of exp(score)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PARTS_PAD * K_PAD)
    inside = (i < num_parts * K_PAD) & (i % K_PAD < K)
    score = tl.load(values + row * num_parts * K_PAD + i, mask=inside, other=float("-inf"))
    token = tl.load(tokens + row * num_parts * K_PAD + i, mask=inside, other=2147483647)
    if SUMS:
        s = tl.arange(0, PARTS_PAD)
        # the first of a part is its largest
        tops = tl.load(values + (row * num_parts + s) * K_PAD, mask=s < num_parts, other=float("-inf"))
        mass = tl.load(sums + row * num_parts + s, mask=s < num_parts, other=0.0)
        top = tl.max(tops, 0)
        floor = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.where(tops == float("-inf"), 0.0, mass * tl.exp(tops - floor)), 0)
        tl.store(totals + row, floor + tl.log(total))
    left = tl.where(token == 2147483647, 0, 1)
    for k in range(K):
        best = tl.max(tl.where(left == 1, score, float("-inf")), 0)
        found = tl.min(tl.where((left == 1) & (score == best), token, 2147483647), 0)
        left = tl.where(token == found, 0, left)
        if MAPPED:
            found = tl.load(ids + found)
        tl.store(out_values + row * K + k, best)
        tl.store(out_tokens + row * K + k, found)


@kernel("logits", "q", "vocab", "stride", "q_stride")
def part_of_softmax(
    logits,
    scales,
    tops,
    sums,
    q,
    masses,
    vocab,
    stride,
    q_stride,
    PART: tl.constexpr,
    PARTS_PAD: tl.constexpr,
):
    """One part of a row's probabilities, float32, and their sum in float64; ``tops`` and ``sums`` are those of
    `part_of_best`."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    num_parts = tl.num_programs(1)
    s = tl.arange(0, PARTS_PAD)
    of_parts = s < num_parts
    top = tl.load(tops + row * num_parts + s, mask=of_parts, other=float("-inf"))
    mass = tl.load(sums + row * num_parts + s, mask=of_parts, other=0.0)
    best = tl.max(top, 0)
    total = tl.sum(tl.where(top == float("-inf"), 0.0, mass * tl.exp(top - best)), 0)
    v = part * PART + tl.arange(0, PART)
    inside = v < vocab
    score = tl.load(logits + row * stride + v, mask=inside, other=0.0) * tl.load(scales + row)
    weights = tl.where(inside, tl.exp(tl.minimum(score - best, 0.0)) / total, 0.0)
    tl.store(q + row * q_stride + v, weights, mask=inside)
    tl.store(masses + row * num_parts + part, tl.sum(weights.to(tl.float64), 0))


@kernel("q", "ids", "vocab", "q_stride")
def draw_sampled(
    q,
    masses,
    uniforms,
    ids,
    out,
    vocab,
    q_stride,
    uniform_stride,
    num_parts,
    MAPPED: tl.constexpr,
    PART: tl.constexpr,
    PARTS_PAD: tl.constexpr,
):
    """One row's token by inverse CDF: which part, then which token in it; the last with weight, if rounding leaves
    none."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, PARTS_PAD)
    mass = tl.load(masses + row * num_parts + s, mask=s < num_parts, other=0.0)
    limit = tl.load(uniforms + row * uniform_stride) * tl.sum(mass, 0)
    sums = tl.cumsum(mass, 0)
    part = tl.min(tl.where((sums > limit) & (mass > 0.0), s, 2147483647), 0)
    part = tl.maximum(tl.minimum(part, tl.max(tl.where(mass > 0.0, s, -1), 0)), 0)
    before = tl.sum(tl.where(s < part, mass, 0.0), 0)
    v = part * PART + tl.arange(0, PART)
    weights = tl.load(q + row * q_stride + v, mask=v < vocab, other=0.0).to(tl.float64)
    sums = before + tl.cumsum(weights, 0)
    found = tl.min(tl.where((sums > limit) & (weights > 0.0), v, 2147483647), 0)
    found = tl.maximum(tl.minimum(found, tl.max(tl.where(weights > 0.0, v, -1), 0)), 0)
    if MAPPED:
        found = tl.load(ids + found)
    tl.store(out + row, found)
