"""Rule ``synthetic``: drafts stay at given rates. Launched by `kernels.triton.verify`."""

import triton.language as tl

from draftwise.kernels.triton.device.compiled import kernel
from draftwise.kernels.triton.device.noise import uniform
from draftwise.kernels.triton.device.verify import best_of_parts


@kernel()
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
):
    """One request under rule ``synthetic``: first children stay while u is below the rate of their depth. The last one
    is the most likely token, or SAMPLED: drawn later (`.draws`)."""
    m = tl.program_id(0).to(tl.int64)
    r = tl.load(members + m).to(tl.int64)
    fields = table + r * table_stride
    out = walk + r * (2 * num_nodes + 2)
    seed = tl.load(fields + 2)
    sample = tl.load(fields + 3)
    base = tl.load(fields + 4)
    u = uniform(seed, sample, 2, base - 1, base * 0 - 1, base)
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
        tl.store(ends + m * 3, tl.load(fields) + node + 1)
        tl.store(ends + m * 3 + 1, base * 0)
        tl.store(ends + m * 3 + 2, base * 0 - 1)
        drawn = uniform(seed, sample, 3, base + kept, node, base)
        tl.store(end_numbers + m * 2, drawn)
        tl.store(end_numbers + m * 2 + 1, drawn * 0.0 + 1.0)
    else:
        want = best_of_parts(part_best, part_token, r * (num_nodes + 1) + node + 1, num_parts, PARTS_PAD)
        tl.store(out + 1 + num_nodes + kept, want)
