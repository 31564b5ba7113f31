"""Rule ``synthetic``: drafts stay at given rates. Launched by `kernels.triton.verify`."""

import triton
import triton.language as tl

from draftwise.kernels.triton.device.noise import uniform
from draftwise.kernels.triton.device.verify import best_of_parts


@triton.jit
def kept_at_rates(fields, rates, num_rates):
    """Rule ``synthetic``: how many drafts of one request stay."""
    base = tl.load(fields + 4)
    u = uniform(tl.load(fields + 2), tl.load(fields + 3), 2, base - 1, base * 0 - 1, base)
    count = tl.load(fields + 1)
    kept = count * 0
    for i in range(num_rates):
        kept += tl.where((u < tl.load(rates + i)) & (i < count), 1, 0)
    return kept


@triton.jit(
    do_not_specialize=["num_rates", "table_stride", "num_nodes", "num_parts"],
    do_not_specialize_on_alignment=[
        "table",
        "members",
        "rates",
        "part_best",
        "part_token",
        "ends",
        "end_numbers",
        "walk",
    ],
)
def keep_at_rates(
    table,
    members,
    rates,
    part_best,
    part_token,
    ends,
    end_numbers,
    walk,
    num_rates,
    table_stride,
    num_nodes,
    num_parts,
    SAMPLED: tl.constexpr,
    PARTS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chain under rule ``synthetic``; the last token is the most likely one, or SAMPLED: drawn later (`.draws`)."""
    m = tl.program_id(0).to(tl.int64)
    r = tl.load(members + m).to(tl.int64)
    fields = table + r * table_stride
    out = walk + r * (2 * num_nodes + 2)
    kept = kept_at_rates(fields, rates, num_rates)
    j = tl.arange(0, BLOCK)
    tl.store(out, kept.to(tl.int32))
    tl.store(out + 1 + j, j, mask=j < kept)
    token = tl.load(fields + 6 + j, mask=j < kept, other=0)
    tl.store(out + 1 + num_nodes + j, token.to(tl.int32), mask=j < kept)
    if SAMPLED:
        base = tl.load(fields + 4)
        deep = base + kept
        tl.store(ends + m * 3, tl.load(fields) + kept)
        tl.store(ends + m * 3 + 1, base * 0)
        tl.store(ends + m * 3 + 2, base * 0 - 1)
        drawn = uniform(tl.load(fields + 2), tl.load(fields + 3), 3, deep, deep - base - 1, base)
        tl.store(end_numbers + m * 2, drawn)
        tl.store(end_numbers + m * 2 + 1, drawn * 0.0 + 1.0)
    else:
        want = best_of_parts(part_best, part_token, r * (num_nodes + 1) + kept, num_parts, PARTS_PAD)
        tl.store(out + 1 + num_nodes + kept, want)
