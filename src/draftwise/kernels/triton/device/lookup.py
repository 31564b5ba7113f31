"""Look-ups of steps of seats. Launched by `graphs.seats.kernels`; columns of ``state``, ``told`` and ``answer`` are
numbered in `graphs.seats.memory`, and `graphs.seats.lookup` is the reference."""

import triton
import triton.language as tl

from draftwise.kernels.triton.device.compiled import kernel


@triton.jit
def alike(places, base, stop, line, known, longest, TILE: tl.constexpr):
    """Places from ``base`` on, and how many tokens up to each of them are those at the end of the text ``line``."""
    place = base + tl.arange(0, TILE).to(tl.int64)
    agree = place < stop
    length = place * 0
    i = longest * 0
    left = longest
    while i < left:
        agree = agree & (place >= i)
        last = tl.load(line + known - 1 - i)
        agree = agree & (tl.load(places + place - i, mask=agree, other=-2) == last)
        length += tl.where(agree, 1, 0)
        i += 1
        left = tl.where(tl.max(agree.to(tl.int32), 0) > 0, longest, i)  # most tiles end after a token or two
    return place, length


@triton.jit
def longest_match(places, stop, line, known, longest, shortest, TILE: tl.constexpr):
    """The length of the longest match before ``stop`` in the upper half of a word, its last place in the lower; -1."""
    best = known * 0 - 1
    for base in range(0, stop, TILE):
        place, length = alike(places, base, stop, line, known, longest, TILE)
        best = tl.maximum(best, tl.max(tl.where(length >= shortest, (length << 32) + place, -1), 0))
    return best


@triton.jit
def followers(places, stop, filled, line, known, longest, match, drafts, wanted, j, TILE: tl.constexpr):
    """At how many places there is a match of this length; and draft by draft, at how many of them all up to it
    followed."""
    whole = known * 0
    counts = j.to(tl.int64) * 0
    for base in range(0, stop, TILE):
        place, length = alike(places, base, stop, line, known, longest, TILE)
        alive = length == match
        whole += tl.sum(alive.to(tl.int64), 0)
        for i in range(wanted):
            at = place + 1 + i
            alive = alive & (at < filled)
            alive = alive & (tl.load(places + at, mask=alive, other=-2).to(tl.int64) == tl.load(drafts + i))
            counts += tl.where(j == i, tl.sum(alive.to(tl.int64), 0), 0)
    return whole, counts


@kernel()
def look_up(
    state,
    told,
    now,
    walk,
    answer,
    told_stride,
    drafts,
    text,
    past,
    paths,
    text_stride,
    num_past,
    steps,
    number,
    longest,
    shortest,
    slope,
    height,
    least,
    PAST: tl.constexpr,
    CUT: tl.constexpr,
    JOINS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One seat with look-up ``number``: its text with what was committed, and what followed the last time that a text
    ended like this. PAST: others' outputs are looked at, too; CUT: drafts must have followed often enough. JOINS: what
    is found goes to ``paths`` [S, K + 1], behind its length, and not over the drafts."""
    s = tl.program_id(0).to(tl.int64)
    own = state + s * (18 + drafts)
    said = told + s * told_stride
    line = text + s * text_stride
    out = walk + s * (2 * drafts + 2)
    mine = (tl.load(said + 4) == number) & (tl.load(now + 2 * s) != 0)
    known = tl.load(own)
    accepted = tl.load(out).to(tl.int64)
    j = tl.arange(0, BLOCK)
    real = j < tl.where(mine, accepted + 1, 0)
    committed = tl.load(out + 1 + drafts + j, mask=real, other=0)
    tl.store(line + known - 1 - accepted + j, committed, mask=real)
    tl.debug_barrier()  # the text is read by every thread
    stop = tl.where(mine, known - 1, 0)
    longest = tl.minimum(known, longest)
    best = longest_match(line, stop, line, known, longest, shortest, TILE)
    others = known * 0  # places of others that are looked at
    if PAST:
        others += tl.where(mine, num_past, 0)
        found = longest_match(past, others, line, known, longest, shortest, TILE)
        others = tl.where((found >> 32) > (best >> 32), others, 0)
        best = tl.where(others > 0, found, best)
    start = (best & 0xFFFFFFFF) + 1
    match = best >> 32
    allowed = tl.floor(match.to(tl.float32) * slope + height).to(tl.int64)
    wanted = tl.minimum(tl.minimum(tl.load(said + 2), tl.load(said) - known - 1), tl.minimum(steps, allowed))
    wanted = tl.where(best >= 0, tl.maximum(wanted, 0), 0)
    period = tl.maximum(known - start, 1)
    token = tl.load(line + start + j % period, mask=j < tl.where(others > 0, 0, wanted), other=0).to(tl.int64)
    if PAST:
        theirs = j < tl.where(others > 0, wanted, 0)
        copied = tl.load(past + start + j, mask=theirs & (start + j < num_past), other=-1).to(tl.int64)
        token = tl.where(theirs, copied, token)
        # an output ends there
        wanted = tl.minimum(wanted, tl.min(tl.where(theirs & (token < 0), j, BLOCK), 0))
    to = own + 18
    if JOINS:
        to = paths + s * (drafts + 1) + 1
    drafted = tl.load(to + j, mask=j < wanted, other=0)
    tl.store(to + j, token, mask=j < wanted)
    if CUT:
        written = wanted
        tl.debug_barrier()  # every thread reads them
        whole, counts = followers(
            line, tl.where(others > 0, 0, stop), known, line, known, longest, match, to, wanted, j, TILE
        )
        if PAST:
            more, follow = followers(past, others, num_past, line, known, longest, match, to, wanted, j, TILE)
            whole += more
            counts += follow
        enough = tl.maximum(whole.to(tl.float32) * least, 1.0)
        wanted = tl.minimum(wanted, tl.min(tl.where(counts.to(tl.float32) >= enough, BLOCK, j), 0))
        tl.debug_barrier()  # every thread has read them
        tl.store(to + j, drafted, mask=(j >= wanted) & (j < written))
    if JOINS:
        tl.store(to - 1, wanted)
        return
    told_back = answer + s * (7 + 4 * drafts)
    tl.store(told_back + 7 + drafts + j, token, mask=j < wanted)
    # what a drafter has drafted does not count, nor what it has stored of that
    if tl.where(wanted > 0, 1, 0) == 1:
        tl.store(own + 2, wanted)
        tl.store(own + 4, wanted * 0)
        tl.store(own + 16, wanted * 0)
        tl.store(told_back, wanted * 0 + 2)
        tl.store(told_back + 4, wanted)


@kernel()
def join_found(state, told, now, walk, answer, told_stride, drafts, own_forms, paths, BLOCK: tl.constexpr):
    """One seat: what `look_up` has found becomes a branch of the tree that waits; see `graphs.seats.lookup`."""
    s = tl.program_id(0).to(tl.int64)
    own = state + s * (18 + drafts)
    path = paths + s * (drafts + 1)
    length = tl.load(path)
    if length == 0:
        return
    told_back = answer + s * (7 + 4 * drafts)
    form = own_forms + s * 5 * (drafts + 1) + 1  # of the drafts: depths, ancestors, parents
    total = tl.minimum(tl.load(told + s * told_stride + 2), drafts)
    kept = tl.minimum(tl.load(own + 2), total - tl.minimum(length, total // 2))
    j = tl.arange(0, BLOCK).to(tl.int64)
    old = j < kept
    token = tl.load(own + 18 + j, mask=old, other=-1)
    depth = tl.load(form + j, mask=old, other=0)
    mask = tl.load(form + drafts + 1 + j, mask=old, other=0)
    parent = tl.load(form + 2 * (drafts + 1) + j, mask=old, other=-2)
    size = kept
    node = kept * 0 - 1
    on = kept * 0 + 1
    for i in range(length):
        wanted = tl.load(path + 1 + i)
        hit = tl.min(tl.where((parent == node) & (token == wanted) & (j < size), j, BLOCK), 0)
        misses = tl.where(hit == BLOCK, 1, 0)
        adds = on * misses * tl.where(size < total, 1, 0)
        above = tl.sum(tl.where(j == node, depth, 0), 0)
        masks = tl.sum(tl.where(j == node, mask, 0), 0) | tl.where(node < 0, 1, 0)
        new = (j == size) & (adds > 0)
        token = tl.where(new, wanted, token)
        parent = tl.where(new, node, parent)
        depth = tl.where(new, above + 1, depth)
        mask = tl.where(new, masks | (tl.full((BLOCK,), 1, tl.int64) << (j + 1)), mask)
        on = on * tl.where(adds + 1 - misses > 0, 1, 0)
        node = tl.where(on > 0, tl.where(misses > 0, size, hit), node)
        size += adds
    real = j < size
    tl.store(own + 2, size)
    tl.store(own + 18 + j, token, mask=real)
    tl.store(form + j, depth, mask=real)
    tl.store(form + drafts + 1 + j, mask, mask=real)
    tl.store(form + 2 * (drafts + 1) + j, parent, mask=real)
    tl.store(told_back, tl.where(size > kept, 2, tl.load(told_back)))
    tl.store(told_back + 4, size)
    tl.store(told_back + 7 + drafts + j, token, mask=real)
    tl.store(told_back + 7 + 3 * drafts + j, parent, mask=real)
