"""Between the passes of a step of seats. Launched by `graphs.seats.kernels`; columns of ``state``, ``told`` and
``answer`` are numbered in `graphs.seats.memory`, a request's fields for verification in `.verify`. A row
of ``state`` has 18 + K words, with up to K drafts, and one of ``answer`` 7 + 4 K."""

import triton
import triton.language as tl

from draftwise.kernels.triton.device.compiled import kernel
from draftwise.kernels.triton.device.noise import row_key, uniform


@triton.jit
def slots_of(table, keys, real, num_pages, spare_slot, PAGE: tl.constexpr):
    """Where keys of one request stand; the spare slot of those that are not real."""
    page = tl.maximum(tl.minimum(keys // PAGE, num_pages - 1), 0)
    slot = tl.load(table + page, mask=real, other=0).to(tl.int64) * PAGE + keys % PAGE
    return tl.where(real, slot, spare_slot)


@kernel()
def begin_rows(
    state,
    told,
    now,
    table,
    tokens,
    positions,
    slots,
    context,
    is_tree,
    ancestors,
    forms,
    fields,
    sources,
    told_stride,
    num_pages,
    spare_slot,
    drafts,
    shared_forms,
    rows,
    FRESH: tl.constexpr,
    FRESH_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One seat: its new blocks, its rows of the target's pass, and what verification has to know."""
    s = tl.program_id(0).to(tl.int64)
    own = state + s * (18 + drafts)
    said = told + s * told_stride
    known = tl.load(own)
    live = known < tl.load(said)
    i = tl.arange(0, FRESH_PAD)
    new = i < tl.where(live, FRESH, 0)
    fresh = tl.load(said + 5 + i, mask=new, other=0)
    block = tl.load(said + 5 + FRESH + i, mask=new, other=0).to(tl.int32)
    tl.store(table + s * num_pages + fresh, block, mask=new)
    tl.debug_barrier()  # the table is read by every thread
    nodes = tl.where(live, tl.minimum(tl.minimum(tl.load(said + 1), tl.load(own + 2)), rows - 1), 0)
    tl.store(now + 2 * s, tl.where(live, 1, 0))
    tl.store(now + 2 * s + 1, nodes)
    j = tl.arange(0, BLOCK)
    inside = j < rows
    real = j < tl.where(live, nodes + 1, 0)
    # the root, then drafts
    token = tl.load(own + tl.where(j == 0, 1, 17 + j), mask=real, other=0)
    key = known - 1 + j
    at = s * rows + j
    number = tl.load(said + 3)
    own_form = tl.load(forms + (number * 5 + 3) * (drafts + 1)) == 2  # of a dynamic tree
    form = forms + tl.where(own_form, shared_forms + s, number) * (5 * (drafts + 1))
    depth = tl.load(form + j, mask=real, other=0)
    tl.store(tokens + at, token, mask=inside)
    tl.store(positions + at, tl.where(real, known - 1 + depth, 0), mask=inside)
    tl.store(ancestors + at, tl.load(form + drafts + 1 + j, mask=real, other=1), mask=inside)
    tree = tl.load(form + 3 * (drafts + 1))
    tl.store(is_tree + s, tree.to(tl.int32))
    slot = slots_of(table + s * num_pages, key, real, num_pages, spare_slot, PAGE)
    tl.store(slots + at, slot, mask=inside)
    tl.store(context + s, tl.where(live, known - 1, 0).to(tl.int32))
    out = fields + s * (6 + 3 * drafts)
    tl.store(out, s * rows)
    tl.store(out + 1, nodes)
    tl.store(out + 2, tl.load(own + 5))
    tl.store(out + 3, tl.load(own + 6))
    tl.store(out + 4, known)
    source = sources + 3 * tl.load(own + 16)
    base = tl.load(source)
    tl.store(out + 5, tl.where(base != 0, tree, 0))  # children of a tree are drawn without replacement
    drafted = j < drafts
    tl.store(out + 6 + j, tl.load(own + 18 + j, mask=drafted, other=0), mask=drafted)
    tl.store(out + 6 + drafts + j, tl.load(form + 2 * drafts + 3 + j, mask=drafted, other=0), mask=drafted)
    q_row = tl.load(form + 4 * (drafts + 1) + 1 + j, mask=drafted, other=0)
    q_at = tl.where(base != 0, base + s * tl.load(source + 1) + q_row * tl.load(source + 2), 0)
    tl.store(out + 6 + 2 * drafts + j, q_at, mask=drafted)


@kernel()
def advance_rows(
    state,
    told,
    now,
    walk,
    answer,
    told_stride,
    drafts,
    table,
    tokens,
    positions,
    slots,
    context,
    first_key,
    last,
    start,
    length,
    noise,
    depths,
    nodes,
    reach,
    ends,
    num_pages,
    draws,
    levels,
    number,
    max_len,
    spare_slot,
    spare_block,
    source,
    DRAFTER: tl.constexpr,
    TREE: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One seat: what was committed, if it drafts with loop ``number``, and its rows of the drafter's first pass, of
    drafts on up to ``levels`` levels, with ``draws`` numbers for its noise. DRAFTER: 0 none, 1 a model, 2 a head; TREE:
    0: drafts are a chain, and may stay stored, 1: a static tree, 2: a dynamic one, whose candidates ``length`` counts,
    3: a chain, of a pass over masks;
    KIND: 0 argmax, 1 draws from q, 2 shared noise."""
    s = tl.program_id(0).to(tl.int64)
    own = state + s * (18 + drafts)
    said = told + s * told_stride
    out = walk + s * (2 * drafts + 2)
    mine = tl.load(said + 3) == number
    live = (tl.load(now + 2 * s) != 0) & mine
    known = tl.load(own)
    old_root = tl.load(own + 1)
    fed = tl.load(own + 3)
    stored = tl.load(own + 4)
    limit = tl.load(said)
    accepted = tl.where(live, tl.load(out), 0).to(tl.int64)
    newest = tl.load(out + 1 + drafts + accepted).to(tl.int64)
    after = tl.where(live, known + accepted + 1, known)
    root = tl.where(live, tl.maximum(newest, 0), old_root)
    wanted = accepted * 0
    if DRAFTER != 0:
        deep = tl.minimum(tl.minimum(limit - after - 1, max_len - after + 1), levels)
        reached = tl.load(reach + tl.maximum(deep, 0))
        wanted = tl.minimum(tl.load(said + 2), reached)
        wanted = tl.where(live, tl.maximum(wanted, 0), 0)
    j = tl.arange(0, BLOCK)
    committed = tl.load(out + 1 + drafts + j, mask=j <= drafts, other=0).to(tl.int64)
    if DRAFTER != 0:
        drafting = wanted > 0
        if DRAFTER == 2:
            first = known
            count = tl.where(drafting, accepted + 1, accepted)
            token = tl.maximum(committed, 0)
            read = known - 1 + j
            final = (j < tl.where(live, accepted + 1, 0)) & ((read + 1) % PAGE == 0)
            page = tl.maximum(tl.minimum(read // PAGE, num_pages - 1), 0)
            block = tl.load(table + s * num_pages + page, mask=final, other=0).to(tl.int64)
            end = tl.where(final & (block < spare_block), block, spare_block)
            tl.store(ends + s * ROWS + j, end, mask=j < ROWS)
            fed = tl.where(live & (fed == known), tl.where(drafting, after, after - 1), fed)
        else:
            fed += tl.where(live, tl.minimum(accepted, stored), 0)
            first = tl.minimum(fed, after - 1)
            if ROWS == 1:  # of a drafter that has no storage
                first = after - 1
            count = tl.where(drafting, after - first, 0)
            behind = first - known + j
            token = tl.load(out + 1 + drafts + behind, mask=(behind >= 0) & (j < count), other=0).to(tl.int64)
            token = tl.where(behind < 0, old_root, token)
            token = tl.where(behind == accepted, root, token)
            fed = tl.where(drafting, after, fed)
        inside = j < ROWS
        masks = tl.maximum(wanted - 1, 0) if TREE == 3 else wanted * 0
        real = inside & (j < count + masks)
        key = first + j
        at = s * ROWS + j
        tl.store(tokens + at, tl.where(j < count, token, 0), mask=inside)
        tl.store(positions + at, tl.where(real, key - (DRAFTER - 1), 0), mask=inside)
        slot = slots_of(table + s * num_pages, key, real, num_pages, spare_slot, PAGE)
        tl.store(slots + at, slot, mask=inside)
        # rows that fill up must see some key: of nothing no distribution can be made
        unused = tl.load(own + 9)
        tl.store(first_key + s, unused.to(tl.int32))
        tl.store(context + s, tl.where(count > 0, first, unused).to(tl.int32))
        tl.store(last + s, s * ROWS + tl.maximum(count - 1, 0))
        tl.store(start + s, tl.where(drafting, after, unused))
        tl.store(length + s, tl.where(drafting, reached, 0) if TREE == 2 else wanted)
        if KIND != 0:
            draw = j < draws
            place = after + tl.load(depths + j, mask=draw, other=0)
            node = tl.load(nodes + j, mask=draw, other=0)
            seed = tl.load(own + 5)
            sample = tl.load(own + 6)
            if KIND == 1 and (TREE == 0 or TREE == 3):
                u = uniform(seed, sample, 1, place, node, after)
                numbers = u.to(tl.int64, bitcast=True)
            elif KIND == 1:
                numbers = row_key(seed, sample, 1, place, node, after)
            else:
                numbers = row_key(seed, sample, 0, place, node * 0 - 1, node * 0)
            tl.store(noise + s * draws + j, numbers, mask=draw)
    told_back = answer + s * (7 + 4 * drafts)
    if tl.where(mine, 1, 0) == 1:
        tl.store(told_back, tl.where(live, 1, 0))
        tl.store(told_back + 1, tl.load(now + 2 * s + 1))
        tl.store(told_back + 2, accepted)
        tl.store(told_back + 3, after)
        tl.store(told_back + 4, wanted)
        tl.store(told_back + 5, fed)
        tl.store(told_back + 6 + j, committed, mask=j <= drafts)
        node = tl.load(out + 1 + j, mask=j < drafts, other=0).to(tl.int64)
        tl.store(told_back + 7 + 2 * drafts + j, node, mask=j < drafts)
    tl.debug_barrier()  # every thread has read what is written over now
    if tl.where(live, 1, 0) == 1:
        tl.store(own, after)
        tl.store(own + 1, root)
        tl.store(own + 2, wanted)
        tl.store(own + 3, fed)
        tl.store(own + 4, tl.maximum(wanted - 1, 0) if TREE == 0 else wanted * 0)
        tl.store(own + 16, source)


@kernel()
def keep_drafts(
    state,
    told,
    now,
    walk,
    answer,
    told_stride,
    drafts,
    drafted,
    form,
    own_forms,
    steps,
    number,
    DYNAMIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One seat that drafts with loop ``number``: its new drafts are what waits, and what the host is told; DYNAMIC:
    their tree, too."""
    s = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    mine = (tl.load(told + s * told_stride + 3) == number) & (tl.load(now + 2 * s) != 0)
    own = j < tl.where(mine, steps, 0)
    token = tl.load(drafted + s * steps + j, mask=own, other=0)
    tl.store(state + s * (18 + drafts) + 18 + j, token, mask=own)
    told_back = answer + s * (7 + 4 * drafts) + 7 + drafts
    tl.store(told_back + j, token, mask=own)
    if DYNAMIC:
        rows = (j > 0) & (j < tl.where(mine, steps + 1, 0))
        for part in tl.static_range(3):
            word = tl.load(form + (s * 3 + part) * (steps + 1) + j, mask=rows, other=0)
            tl.store(own_forms + (s * 5 + part) * (drafts + 1) + j, word, mask=rows)
            if part == 2:
                tl.store(told_back + 2 * drafts + j - 1, word, mask=rows)
