"""An executor without a model, which remembers what every cache slot holds and checks every plan against it.

The "model" says that the token after a prefix is a hash of it, so that a request's whole output is known in advance
whatever was drafted, preempted or shared. A slot holds what its K/V would depend on, the adapter and the hash of the
prefix: a wrong block table, a stale cached block, one of another adapter or a missed compaction shows.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from draftwise.models.lora.low_rank import LowRank
from draftwise.runner.executor import Executor
from draftwise.types import RowResult, StepPlan, StepResult

VOCAB = 5


def prefix_hash(tokens: list[int]) -> int:
    value = 17
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return value


def next_token(tokens: list[int]) -> int:
    return prefix_hash(tokens) % VOCAB


def expected_output(prompt: list[int], n: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass
class _Row:
    tokens: list[int]
    num_computed: int
    blocks: list[int]
    max_total: int
    adapter: int = 0
    drafts: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)


class FakeExecutor(Executor):
    def __init__(
        self, num_blocks: int, block_size: int, seed: int, max_rows: int, ahead: bool = False
    ) -> None:
        self.ahead = ahead  # plans may be made before the step before them was taken in
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_rows = max_rows
        self.random = random.Random(seed)
        self.rows: dict[int, _Row] = {}
        self.slots: dict[int, tuple[int, int]] = {}
        self.adapters: set[int] = set()
        self.most_adapters = 0  # that were held at once

    @staticmethod
    def held(row: _Row, tokens: list[int]) -> tuple[int, int]:
        """What the slot of the last of these tokens holds."""
        return row.adapter, prefix_hash(tokens)

    def slot(self, row: _Row, key: int) -> int:
        return row.blocks[key // self.block_size] * self.block_size + key % self.block_size

    def load_adapter(self, slot: int, adapter: Mapping[str, LowRank]) -> None:
        assert slot not in self.adapters
        self.adapters.add(slot)
        self.most_adapters = max(self.most_adapters, len(self.adapters))

    def drop_adapter(self, slot: int) -> None:
        self.adapters.remove(slot)

    def execute(self, plan: StepPlan) -> StepResult:
        for rid, kept in plan.trimmed:
            del self.rows[rid].blocks[kept:]
        for rid in plan.removed:
            self.rows.pop(rid, None)
        for new in plan.new:
            tokens = new.token_ids_np.tolist()
            assert new.num_computed == len(new.block_ids) * self.block_size < len(tokens)
            self.rows[new.rid] = _Row(
                tokens, new.num_computed, list(new.block_ids), new.max_total, new.adapter
            )
        for planned in plan.rows:
            self.rows[planned.rid].blocks.extend(planned.new_block_ids)
        assert sum(p.num_new + p.num_draft for p in plan.rows) <= self.max_rows
        self._check_blocks()
        rows = plan.rows
        if self.ahead:
            rows = tuple(
                p._replace(num_draft=min(p.num_draft, len(self.rows[p.rid].drafts)))
                for p in rows
                if len(self.rows[p.rid].tokens) < self.rows[p.rid].max_total
            )
        return StepResult(
            plan.step, tuple(self._run(p.rid, p.num_new, p.num_draft, p.draft_budget) for p in rows)
        )

    def _check_blocks(self) -> None:
        """A block that two rows hold must be entirely committed, with equal contents, in both."""
        owners: dict[int, tuple[int, int]] = {}
        for rid, row in self.rows.items():
            for i, block in enumerate(row.blocks):
                assert 0 <= block < self.num_blocks
                if block in owners:
                    other, j = owners[block]
                    full = (i + 1) * self.block_size
                    assert i == j and full <= row.num_computed and full <= self.rows[other].num_computed
                    assert row.tokens[:full] == self.rows[other].tokens[:full]
                    assert row.adapter == self.rows[other].adapter
                owners[block] = (rid, i)

    def _run(self, rid: int, num_new: int, num_draft: int, budget: int) -> RowResult:
        row = self.rows[rid]
        assert row.adapter in self.adapters | {0}, f"request {rid}: adapter {row.adapter} is not held"
        base = row.num_computed + num_new
        assert num_new >= 1 and base <= len(row.tokens)
        assert len(row.blocks) * self.block_size >= base + num_draft
        for key in range(row.num_computed):
            assert self.slots.get(self.slot(row, key)) == self.held(row, row.tokens[: key + 1]), (
                f"request {rid}: slot of token {key} does not hold its K/V"
            )
        for key in range(row.num_computed, base):
            self.slots[self.slot(row, key)] = self.held(row, row.tokens[: key + 1])
        if base < len(row.tokens):
            assert num_draft == 0
            row.num_computed = base
            row.drafts = []
            return RowResult(rid)
        return self._verify(rid, row, base, num_draft, budget)

    def _verify(self, rid: int, row: _Row, base: int, num_draft: int, budget: int) -> RowResult:
        assert num_draft <= len(row.drafts)
        drafts, parents = row.drafts[:num_draft], row.parents[:num_draft]
        paths: list[list[int]] = []
        for i, parent in enumerate(parents):
            path = (paths[parent] if parent >= 0 else []) + [drafts[i]]
            paths.append(path)
            self.slots[self.slot(row, base + i)] = self.held(row, row.tokens + path)
        accepted: list[int] = []
        tokens: list[int] = []
        at = -1
        while True:
            wanted = next_token(row.tokens + tokens)
            tokens.append(wanted)
            child = next((i for i, p in enumerate(parents) if p == at and drafts[i] == wanted), None)
            if child is None:
                break
            accepted.append(child)
            at = child
        contents = [self.slots[self.slot(row, base + node)] for node in accepted]
        for k, content in enumerate(contents):  # compaction
            self.slots[self.slot(row, base + k)] = content
        row.tokens += tokens
        row.num_computed = base + len(accepted)
        self._draft(row, budget)
        return RowResult(
            rid,
            token_ids=tuple(tokens),
            num_drafted=num_draft,
            num_accepted=len(accepted),
            accepted_nodes=tuple(accepted),
            draft_tokens=tuple(drafts),
            draft_parents=tuple(parents),
            method="fake" if num_draft else "none",
            num_proposed=len(row.drafts),
        )

    def _draft(self, row: _Row, budget: int) -> None:
        """A random tree of at most ``budget`` nodes, right with probability 0.7 at each node."""
        row.drafts, row.parents = [], []
        prefixes: list[list[int]] = []
        for _ in range(self.random.randint(0, budget)):
            n = len(row.drafts)
            parent = self.random.randint(-1, n - 1) if self.random.random() < 0.5 else n - 1
            above = prefixes[parent] if parent >= 0 else []
            token = (
                next_token(row.tokens + above) if self.random.random() < 0.7 else self.random.randrange(VOCAB)
            )
            if (parent, token) in zip(row.parents, row.drafts, strict=True):
                continue  # siblings differ
            row.parents.append(parent)
            row.drafts.append(token)
            prefixes.append([*above, token])

    def close(self) -> None:
        self.rows.clear()


class _Late(Future[StepResult]):
    def __init__(self, executor: LateExecutor) -> None:
        super().__init__()
        self._executor = executor

    def result(self, timeout: float | None = None) -> StepResult:
        while not self.done():
            self._executor.run_one()
        return super().result()


class LateExecutor(Executor):
    """A device that runs a step when somebody waits for it, as late as can be; steps in their order."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.queue: deque[tuple[StepPlan, _Late]] = deque()
        self.most = 0  # steps that have been on their way at once

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        future = _Late(self)
        self.queue.append((plan, future))
        self.most = max(self.most, len(self.queue))
        return future

    def run_one(self) -> None:
        plan, future = self.queue.popleft()
        future.set_result(self.inner.execute(plan))

    def execute(self, plan: StepPlan) -> StepResult:
        return self.submit(plan).result()

    def check_adapter(self, adapter: Mapping[str, LowRank]) -> None:
        self._between_steps(lambda: self.inner.check_adapter(adapter))

    def load_adapter(self, slot: int, adapter: Mapping[str, LowRank]) -> None:
        self._between_steps(lambda: self.inner.load_adapter(slot, adapter))

    def drop_adapter(self, slot: int) -> None:
        self._between_steps(lambda: self.inner.drop_adapter(slot))

    def forget(self) -> None:
        self._between_steps(self.inner.forget)

    def _between_steps(self, work: Callable[[], None]) -> None:
        while self.queue:
            self.run_one()
        work()

    def close(self) -> None:
        self.inner.close()
