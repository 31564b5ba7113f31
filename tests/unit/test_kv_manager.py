"""Reserve, commit, trim, release; and a model of all of it under random use."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from draftwise.kv.manager import KVManager

TOKENS = np.arange(100, 200, dtype=np.int32)


def test_open_without_a_hit_holds_nothing() -> None:
    kv = KVManager(4, 4)
    assert kv.open(1, TOKENS[:6]) == (0, ())
    assert kv.num_used == 0 and kv.block_ids(1) == () and kv.is_open(1)
    kv.release(1)
    assert not kv.is_open(1)


def test_reserve_is_all_or_nothing() -> None:
    kv = KVManager(3, 4)
    kv.open(1, TOKENS[:6])
    assert kv.reserve(1, 13) is None
    assert (kv.num_free, kv.block_ids(1), kv.num_reserved(1)) == (3, (), 0)
    added = kv.reserve(1, 12)
    assert added is not None and len(added) == 3 and kv.block_ids(1) == added
    kv.open(2, TOKENS[:1])
    assert kv.reserve(2, 1) is None
    kv.check_integrity()


@pytest.mark.parametrize("keep", range(10))
def test_surplus_says_what_trim_gives_back(keep: int) -> None:
    """Three blocks of four slots, of which five are committed and ``keep`` more are to stay."""
    kv = KVManager(4, 4)
    kv.open(1, TOKENS[:1])
    kv.reserve(1, 12)
    kv.commit(1, 5, TOKENS)
    surplus = kv.surplus(1, keep)
    assert surplus == (1 if keep <= 3 else 0)
    assert kv.trim(1, keep) == 3 - surplus
    assert kv.surplus(1, keep) == 0


def test_integrity_covers_the_prefix_cache() -> None:
    kv = KVManager(4, 4)
    kv.open(1, TOKENS[:5])
    kv.reserve(1, 5)
    kv.commit(1, 5, TOKENS[:5])
    kv.release(1)
    kv.check_integrity()
    kv._cache.clear()  # of a block that the pool keeps for it
    with pytest.raises(AssertionError):
        kv.check_integrity()


def test_the_room_is_the_larger_of_two_reservations() -> None:
    """A draft length that varies: a shorter one asks for nothing and takes nothing away."""
    kv = KVManager(4, 4)
    kv.open(1, TOKENS[:1])
    assert len(kv.reserve(1, 9) or ()) == 3
    assert kv.reserve(1, 2) == ()
    assert kv.num_reserved(1) == 9
    kv.commit(1, 7, TOKENS)
    assert kv.num_reserved(1) == 2
    assert kv.reserve(1, 5) == ()
    kv.commit(1, 5, TOKENS)
    assert kv.num_committed(1) == 12


def test_commit_beyond_what_is_reserved_or_known_changes_nothing() -> None:
    kv = KVManager(4, 4)
    kv.open(1, TOKENS[:4])
    kv.reserve(1, 6)
    for n, known, message in ((7, 100, "6 tokens reserved"), (-1, 100, "reserved"), (5, 4, "4 known")):
        with pytest.raises(ValueError, match=message):
            kv.commit(1, n, TOKENS[:known])
        assert (kv.num_committed(1), kv.num_reserved(1), kv.stats().cached_blocks) == (0, 6, 0)
    kv.check_integrity()


def test_trim_returns_what_committed_tokens_do_not_touch() -> None:
    kv = KVManager(8, 4)
    kv.open(1, TOKENS[:5])
    kv.reserve(1, 14)
    kv.commit(1, 5, TOKENS)
    assert kv.trim(1) == 2
    assert kv.num_free == 6 and kv.num_reserved(1) == 3 and len(kv.block_ids(1)) == 2
    assert kv.trim(1) == 2
    kv.commit(1, 3, TOKENS)
    with pytest.raises(ValueError, match="0 tokens reserved"):
        kv.commit(1, 1, TOKENS)
    kv.check_integrity()


def test_trim_before_anything_is_committed() -> None:
    kv = KVManager(8, 4)
    kv.open(1, TOKENS[:5])
    kv.reserve(1, 5)
    assert kv.trim(1) == 0 and kv.num_used == 0 and kv.num_reserved(1) == 0


def test_rejected_tokens_are_never_hashed() -> None:
    kv = KVManager(8, 4)
    kv.open(1, TOKENS[:4])
    kv.reserve(1, 8)
    kv.commit(1, 5, TOKENS)  # the block of tokens 4..7 is reserved entirely, committed by one
    kv.release(1)
    assert kv.match_prefix(TOKENS) == 4


def test_a_block_is_hashed_with_what_was_committed_not_with_what_was_known_at_first() -> None:
    kv = KVManager(8, 4)
    drafted = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9], dtype=np.int32)
    final = np.array([1, 2, 3, 4, 5, 99, 7, 8, 9], dtype=np.int32)
    kv.open(1, drafted[:3])
    kv.reserve(1, 6)
    kv.commit(1, 5, drafted[:5])
    kv.reserve(1, 4)
    kv.commit(1, 4, final)
    assert kv.match_prefix(drafted) == 4
    assert kv.match_prefix(final) == 8


def test_the_chain_of_hashes_goes_on_over_commits_of_any_length() -> None:
    kv = KVManager(20, 4)
    for rid, lengths in enumerate([(11, 1, 9, 4), (4, 4, 4, 13), (25,)]):
        tokens = TOKENS + 1000 * rid
        kv.open(rid, tokens[:1])
        for n in lengths:
            kv.reserve(rid, n)
            kv.commit(rid, n, tokens)
        assert kv.match_prefix(tokens[:26]) == 24
        kv.release(rid)
    kv.check_integrity()


def test_live_blocks_are_shared_and_counted() -> None:
    kv = KVManager(6, 4)
    kv.open(1, TOKENS[:9])
    kv.reserve(1, 9)
    kv.commit(1, 9, TOKENS)
    computed, blocks = kv.open(2, TOKENS[:9])
    assert computed == 8 and blocks == kv.block_ids(1)[:2]
    assert kv.reserve(2, 1) is not None
    assert kv.num_used == 4
    kv.release(1)
    assert kv.num_used == 3
    kv.check_integrity()
    kv.release(2)
    assert kv.num_used == 0


def test_no_cache_reads_nothing_and_still_registers() -> None:
    kv = KVManager(8, 4)
    for rid in (1, 2):
        assert kv.open(rid, TOKENS[:9], use_cache=False) == (0, ())
        kv.reserve(rid, 9)
        kv.commit(rid, 9, TOKENS)
        kv.check_integrity()
    assert kv.stats().cached_blocks == 2, "the second computation of a block is private"
    kv.release(2)
    assert kv.open(3, TOKENS[:9])[1] == kv.block_ids(1)[:2]
    assert kv.stats().prefix_queries == 0, "not admitted yet"
    kv.reserve(3, 1)
    assert (kv.stats().prefix_queries, kv.stats().prefix_hits) == (9, 8)


def test_caching_switched_off() -> None:
    kv = KVManager(4, 4, enable_prefix_caching=False)
    kv.open(1, TOKENS[:9])
    kv.reserve(1, 9)
    kv.commit(1, 9, TOKENS)
    kv.check_integrity()
    kv.release(1)
    assert kv.match_prefix(TOKENS) == 0 and kv.open(2, TOKENS[:9]) == (0, ())
    assert kv.stats().cached_blocks == 0 and kv.stats().prefix_queries == 0


def test_eviction_takes_the_tail_of_the_oldest_first() -> None:
    kv = KVManager(6, 4)
    other = TOKENS + 1000
    for rid, tokens in ((1, TOKENS), (2, other)):
        kv.open(rid, tokens[:13])
        kv.reserve(rid, 12)
        kv.commit(rid, 12, tokens)
        kv.release(rid)
    kv.open(3, TOKENS[50:])
    kv.reserve(3, 8)
    assert (kv.match_prefix(TOKENS[:13]), kv.match_prefix(other[:13])) == (4, 12)
    kv.check_integrity()


def test_a_hit_protects_from_eviction() -> None:
    kv = KVManager(3, 4)
    for rid, tokens in ((1, TOKENS), (2, TOKENS[50:])):
        kv.open(rid, tokens[:5])
        kv.reserve(rid, 4)
        kv.commit(rid, 4, tokens)
        kv.release(rid)
    kv.open(3, TOKENS[:5])  # the older one is used again
    kv.release(3)
    kv.open(4, TOKENS[20:])
    kv.reserve(4, 8)
    assert (kv.match_prefix(TOKENS[:5]), kv.match_prefix(TOKENS[50:55])) == (4, 0)


def test_an_admission_that_is_tried_again_counts_once() -> None:
    kv = KVManager(2, 4)
    kv.open(1, TOKENS[:1])
    kv.reserve(1, 8)
    for _ in range(3):
        kv.open(2, TOKENS[:6])
        assert kv.reserve(2, 6) is None
        kv.release(2)
    kv.release(1)
    kv.open(2, TOKENS[:6])
    assert kv.reserve(2, 6) is not None
    assert kv.stats().prefix_queries == 1 + 6


def test_reset_waits_for_requests() -> None:
    kv = KVManager(4, 4)
    kv.open(1, TOKENS[:5])
    kv.reserve(1, 5)
    kv.commit(1, 5, TOKENS)
    assert not kv.reset_prefix_cache() and kv.match_prefix(TOKENS[:5]) == 4
    kv.release(1)
    assert kv.reset_prefix_cache() and kv.match_prefix(TOKENS[:5]) == 0
    assert kv.num_free == 4
    kv.check_integrity()


def test_misuse_is_an_error() -> None:
    kv = KVManager(4, 4)
    kv.open(1, TOKENS[:1])
    with pytest.raises(ValueError, match="open already"):
        kv.open(1, TOKENS[:1])
    with pytest.raises(ValueError, match="no tokens"):
        kv.open(2, TOKENS[:0])
    with pytest.raises(KeyError):
        kv.reserve(2, 1)
    with pytest.raises(KeyError):
        kv.release(2)
    with pytest.raises(ValueError, match="block_size"):
        KVManager(4, 0)


def test_integrity_names_a_table_that_does_not_add_up() -> None:
    kv = KVManager(4, 4)
    kv.open(1, TOKENS[:5])
    kv.reserve(1, 5)
    kv._tables[1].reserved = 9
    with pytest.raises(AssertionError, match="request 1: 0 committed \\+ 9 reserved in 8 slots"):
        kv.check_integrity()
    kv._tables[1].reserved = 1
    kv._tables[1].committed = 4
    with pytest.raises(AssertionError, match="0 blocks hashed, 1 are full"):
        kv.check_integrity()
    kv._tables[1].committed = 0
    kv._cache.register(b"x" * 16, kv.block_ids(1)[0])
    with pytest.raises(AssertionError, match="hashed but not full"):
        kv.check_integrity()


# ------------------------------------------------------------------------------------- random operations

BLOCKS, SIZE = 12, 4


@dataclass
class ModelRequest:
    tokens: list[int]  # known: prompt, then whatever was generated
    salt: str | None
    committed: int = 0
    reserved: int = 0
    blocks: list[int] = field(default_factory=list)


class KVMachine(RuleBasedStateMachine):
    """Random requests against a model that knows, for every slot, which tokens up to there it holds.

    A physical slot holds K/V that depends on all tokens up to its position: the model stores that whole
    prefix per slot, writes it where the manager says, and checks at every hit and commit that the slots of
    a request hold exactly its own prefixes.
    """

    @initialize()
    def start(self) -> None:
        self.kv = KVManager(BLOCKS, SIZE)
        self.slots: dict[int, tuple[str | None, tuple[int, ...]]] = {}
        self.live: dict[int, ModelRequest] = {}
        self.preempted: list[ModelRequest] = []
        self.next_rid = 0

    def begin(self, request: ModelRequest, use_cache: bool) -> None:
        rid, self.next_rid = self.next_rid, self.next_rid + 1
        tokens = np.array(request.tokens, dtype=np.int32)
        expected = self.kv.match_prefix(tokens, salt=request.salt) if use_cache else 0
        computed, blocks = self.kv.open(rid, tokens, salt=request.salt, use_cache=use_cache)
        assert computed == expected == len(blocks) * SIZE < len(tokens)
        request.committed, request.reserved, request.blocks = computed, 0, list(blocks)
        self.live[rid] = request
        self.check_slots(request)

    def check_slots(self, request: ModelRequest) -> None:
        for position in range(request.committed):
            slot = request.blocks[position // SIZE] * SIZE + position % SIZE
            assert self.slots[slot] == (request.salt, tuple(request.tokens[: position + 1]))

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        salt=st.sampled_from([None, "a"]),
        use_cache=st.booleans(),
    )
    def arrive(self, prompt: list[int], salt: str | None, use_cache: bool) -> None:
        self.begin(ModelRequest(list(prompt), salt), use_cache)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), extra=st.integers(0, 9))
    def reserve(self, data: st.DataObject, extra: int) -> None:
        rid = data.draw(st.sampled_from(sorted(self.live)))
        request = self.live[rid]
        n = data.draw(st.integers(1, max(1, len(request.tokens) - request.committed))) + extra
        free, want = self.kv.num_free, -(-(request.committed + n) // SIZE)
        added = self.kv.reserve(rid, n)
        if added is None:
            assert want - len(request.blocks) > free
            assert self.kv.num_free == free
            return
        assert len(added) == max(0, want - len(request.blocks))
        for block in added:
            assert not any(block in other.blocks for other in self.live.values())
            for offset in range(SIZE):
                self.slots.pop(block * SIZE + offset, None)
        request.blocks += added
        request.reserved = max(request.reserved, n)
        self.write(request)

    def write(self, request: ModelRequest) -> None:
        """The forward pass: known tokens get their K/V, slots behind them the K/V of drafts nobody accepted."""
        for position in range(request.committed, request.committed + request.reserved):
            slot = request.blocks[position // SIZE] * SIZE + position % SIZE
            known = tuple(request.tokens[: position + 1])
            self.slots[slot] = (request.salt, known if len(known) == position + 1 else (*known, -1))

    @precondition(lambda self: any(r.reserved for r in self.live.values()))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(rid for rid, r in self.live.items() if r.reserved)))
        request = self.live[rid]
        n = data.draw(st.integers(0, request.reserved))
        while len(request.tokens) < request.committed + n:  # accepted drafts
            request.tokens.append(data.draw(st.integers(0, 1)))
        self.write(request)
        self.kv.commit(rid, n, np.array(request.tokens, dtype=np.int32))
        request.committed += n
        request.reserved -= n
        if request.committed == len(request.tokens):  # the bonus token
            request.tokens.append(data.draw(st.integers(0, 1)))
        self.check_slots(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def commit_too_much(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.live)))
        with pytest.raises(ValueError):
            self.kv.commit(rid, self.live[rid].reserved + 1, np.zeros(1000, dtype=np.int32))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.live)))
        request = self.live[rid]
        kept = self.kv.trim(rid)
        assert kept == -(-request.committed // SIZE)
        del request.blocks[kept:]
        request.reserved = min(request.reserved, kept * SIZE - request.committed)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), preempt=st.booleans())
    def leave(self, data: st.DataObject, preempt: bool) -> None:
        rid = data.draw(st.sampled_from(sorted(self.live)))
        request = self.live.pop(rid)
        self.kv.release(rid)
        if preempt:
            self.preempted.append(request)

    @precondition(lambda self: self.preempted)
    @rule(use_cache=st.booleans())
    def resume(self, use_cache: bool) -> None:
        self.begin(self.preempted.pop(), use_cache)

    @precondition(lambda self: not self.live)
    @rule()
    def reset(self) -> None:
        assert self.kv.reset_prefix_cache()
        assert self.kv.stats().cached_blocks == 0

    @invariant()
    def integrity(self) -> None:
        self.kv.check_integrity()
        for rid, request in self.live.items():
            assert self.kv.num_committed(rid) == request.committed
            assert self.kv.num_reserved(rid) == request.reserved
            assert self.kv.block_ids(rid) == tuple(request.blocks)
        held = {block for request in self.live.values() for block in request.blocks}
        stats = self.kv.stats()
        assert stats.used_blocks == self.kv.num_used == len(held)
        assert stats.free_blocks == self.kv.num_free == BLOCKS - len(held)
        assert self.kv.num_used == len(held)

    def teardown(self) -> None:
        for rid in list(getattr(self, "live", {})):
            self.kv.release(rid)
        if hasattr(self, "kv"):
            self.kv.check_integrity()
            assert self.kv.num_free == BLOCKS


KVMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestKVMachine = KVMachine.TestCase
_MANY = {"settings": settings(max_examples=120, stateful_step_count=40)}
TestManyKVMachines = pytest.mark.slow(type("TestManyKVMachines", (KVMachine.TestCase,), _MANY))


LONG = np.arange(2000, dtype=np.int32)


def grown(kv: KVManager, rid: int, count: int, step: int = 37) -> None:
    """Commit tokens of LONG up to ``count``, some at a time, with drafts that are not kept."""
    while (done := kv.num_committed(rid)) < count:
        n = min(step, count - done)
        assert kv.reserve(rid, n + 5) is not None
        kv.commit(rid, n, LONG)
        kv.trim(rid)
        kv.check_integrity()


def test_blocks_behind_a_window_are_given_back() -> None:
    kv = KVManager(200, 16, window=100)
    kv.open(1, LONG)
    grown(kv, 1, 354)
    assert kv.num_behind(1) == 0  # the next row reads tokens 255 to 354
    grown(kv, 1, 355)
    assert (kv.num_behind(1), kv.num_used) == (16, -(-355 // 16) - 16)
    assert len(kv.block_ids(1)) == -(-355 // 16)  # places stay
    grown(kv, 1, 1500)
    assert kv.num_behind(1) == (1500 + 1 - 100) // 256 * 16
    assert kv.num_used <= (100 + 256) // 16 + 2
    kv.release(1)
    assert kv.num_used == 0
    kv.check_integrity()


def test_without_a_window_nothing_is_given_back() -> None:
    kv = KVManager(200, 16)
    kv.open(1, LONG)
    grown(kv, 1, 1500)
    assert (kv.num_behind(1), kv.num_used) == (0, -(-1500 // 16))


def test_what_was_given_back_is_found_until_somebody_needs_it() -> None:
    kv = KVManager(100, 16, window=100)
    kv.open(1, LONG)
    grown(kv, 1, 900)
    behind = kv.num_behind(1)
    assert behind == 48
    cached, blocks = kv.open(2, LONG[:800])
    assert cached == 784 and blocks[:behind] == kv.block_ids(1)[:behind]
    kv.check_integrity()
    kv.release(2)
    kv.open(3, LONG[1000:])  # another text, for which blocks are evicted
    grown_other = kv.reserve(3, 16 * kv.num_free)
    assert grown_other is not None and set(kv.block_ids(1)[:behind]) <= set(grown_other)
    assert kv.match_prefix(LONG[:800]) == 0
    grown(kv, 1, 901) if kv.num_free else None
    kv.release(1)
    kv.check_integrity()
    kv.release(3)
    kv.check_integrity()


def test_a_request_that_begins_again_reads_its_prefix_and_goes_on() -> None:
    kv = KVManager(100, 16, window=64)
    kv.open(1, LONG)
    grown(kv, 1, 700)
    kv.release(1)  # preempted
    cached, _ = kv.open(1, LONG[:700])
    assert cached == 688 and kv.num_behind(1) == 0
    grown(kv, 1, 705)
    assert kv.num_behind(1) == (705 + 1 - 64) // 256 * 16
    kv.check_integrity()


@pytest.mark.parametrize("caching", [True, False])
def test_windows_and_many_requests(caching: bool) -> None:
    """Requests that together need many times the cache; what each can read is its own alone."""
    kv = KVManager(64, 16, caching, window=200)
    rng = np.random.default_rng(3)
    owners: dict[int, tuple[int, int]] = {}  # of each block: request and place, as last written
    texts = {rid: rng.integers(0, 9, 3000).astype(np.int32) for rid in range(2)}
    for rid, text in texts.items():
        kv.open(rid, text)
    for _ in range(150):
        for rid, text in texts.items():
            n = int(rng.integers(1, 20))
            assert kv.reserve(rid, n) is not None
            first = kv.num_committed(rid)
            for place in range(first // 16, (first + n - 1) // 16 + 1):
                owners[kv.block_ids(rid)[place]] = rid, place
            low = max(0, first + 1 - 200) // 256 * 256
            for place in range(low // 16, (first + n - 1) // 16 + 1):  # what attention reads now
                assert owners[kv.block_ids(rid)[place]] == (rid, place)
            kv.commit(rid, n, text)
            kv.check_integrity()
    assert min(kv.num_behind(rid) for rid in texts) > 64
