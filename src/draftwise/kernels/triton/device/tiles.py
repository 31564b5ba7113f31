"""What a tile of keys adds to the sums of attention: the same instructions for every kernel."""

import triton
import triton.language as tl

from draftwise.kernels.triton.device.fp8 import from_fp8


@triton.jit
def keys_and_values(
    query,
    kv,
    scales,
    table,
    key,
    taken,
    head,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    CODES: tl.constexpr,
    FP8: tl.constexpr,
):
    """Keys [DIM_PAD, N] and values [N, DIM_PAD] of one head, as numbers of the queries' type. ``key`` [N]: which ones,
    of the sequence whose pages are ``table``; those that are not ``taken`` are not read."""
    d = tl.arange(0, DIM_PAD)
    in_dim = d < DIM
    page = tl.load(table + key // PAGE, mask=taken, other=0)
    at = (page.to(tl.int64) * PAGE + key % PAGE) * (2 * KV_HEADS)
    k = tl.load(kv + (at + head)[None, :] * DIM + d[:, None], mask=taken[None, :] & in_dim[:, None], other=0)
    v = tl.load(
        kv + (at + KV_HEADS + head)[:, None] * DIM + d[None, :],
        mask=taken[:, None] & in_dim[None, :],
        other=0,
    )
    if CODES:
        k_scale = tl.load(scales + at + head, mask=taken, other=0.0)
        v_scale = tl.load(scales + at + KV_HEADS + head, mask=taken, other=0.0)
        if FP8:
            k = from_fp8(k)
            v = from_fp8(v)
        k = k.to(tl.float32) * k_scale[None, :]
        v = v.to(tl.float32) * v_scale[:, None]
    return k.to(query.dtype), v.to(query.dtype)


@triton.jit
def scores_of(query, k, scale, softcap, CAPPED: tl.constexpr):
    """[M, N]: query * key, scaled and capped."""
    scores = tl.dot(query, k, input_precision="ieee") * scale
    if CAPPED:
        # softcap * tanh(x / softcap): tanh(y) = 1 - 2 / (exp(2 y) + 1), y bounded where it is 1 anyway
        y = tl.minimum(tl.maximum(scores / softcap, -15.0), 15.0)
        scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * y) + 1.0))
    return scores


@triton.jit
def with_tile(query, scores, v, best, total, acc):
    """The sums of every lane, those of a tile included: greatest score, sum of weights, weighted values. ``scores``:
    -inf where a lane does not see a key."""
    new_best = tl.maximum(best, tl.max(scores, 1))
    safe = tl.where(new_best == float("-inf"), 0.0, new_best)  # nothing seen yet: no -inf - -inf
    keep = tl.exp(best - safe)
    weights = tl.exp(scores - safe[:, None])
    total = total * keep + tl.sum(weights, 1)
    acc = acc * keep[:, None] + tl.dot(weights.to(query.dtype), v, input_precision="ieee")
    return new_best, total, acc
