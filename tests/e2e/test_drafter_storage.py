"""What a drafter may rely on in its storage: nothing behind `DraftRow.filled` but what it wrote there for committed
tokens. After a tree was verified the target's storage is compacted and drafters' are not; no drafter can tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftwise import LLM, SamplingParams
from draftwise.kv.storage import KVStorage
from draftwise.propose.hybrid import HybridProposer
from draftwise.propose.models.early_exit import EarlyExitProposer
from draftwise.runner.drafting import Drafting
from draftwise.runner.placing import Wanted
from draftwise.runner.rows import Row
from tests.fakes.every_method import CASES, SHAPES, VOCAB, case_id, make_families, make_target

TREES = [case for case in CASES if case[2] != "chain" and case[1] not in ("suffix", "synthetic")]
"""Look-ups have no storage."""
BLOCK = 4
Drafts = list[list[tuple[tuple[int, ...], tuple[int, ...]]]]


class Engines:
    def __init__(self, root: Path) -> None:
        self._target = make_target(root)
        self._families = make_families(root)
        self._made: dict[str, LLM] = {}
        rng = np.random.default_rng(5)
        self.prompts = [
            {"prompt_token_ids": rng.integers(0, VOCAB, int(rng.integers(3, 30))).tolist()} for _ in range(6)
        ]

    def get(self, family: str) -> LLM:
        if family not in self._made:
            self._made[family] = LLM(
                self._target,
                dtype="float32",
                device="cpu",
                skip_tokenizer_init=True,
                block_size=BLOCK,
                num_kv_blocks=128,
                enable_prefix_caching=False,  # a head that finds a gap keeps rows behind it of its own accord
                speculation_control="static",
                keep_trace=True,
                speculative_config=self._families[family],
            )
        return self._made[family]

    def close(self) -> None:
        for llm in self._made.values():
            llm.close()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("storage"))
    yield made
    made.close()


def storages(drafting: Drafting, method: str) -> list[KVStorage]:
    """K/V that belongs to a method's drafter alone."""
    proposer: Any = drafting._proposers[method]
    if isinstance(proposer, HybridProposer):
        proposer = proposer.inner
    passes = getattr(proposer, "_passes", None)
    found = passes.kv if passes is not None else getattr(proposer, "_storage", None)
    return [] if found is None or isinstance(proposer, EarlyExitProposer) else [found]


def written(drafting: Drafting, row: Row) -> int:
    """Leading tokens that the request's drafter has stored: of several layers that take turns, any of them."""
    method = row.speculation.method
    states = getattr(drafting._proposers[method], "_states", {})
    tracks = states[row.rid].tracks if row.rid in states else ()
    return max([row.fill[method].tokens, *(track.next for track in tracks)])


def slots(row: Row, keys: Sequence[int]) -> torch.Tensor:
    table = row.blocks_np
    return torch.tensor([int(table[key // BLOCK]) * BLOCK + key % BLOCK for key in keys], dtype=torch.int64)


class Moving:
    """Compacts drafters' storages, too, as the target's is."""

    def __init__(self, executor: Any) -> None:
        self.moves = 0
        drafting, compaction = executor._drafting, executor._compaction
        move = compaction.move

        def wrapped(row: Row, path: Sequence[int], base: int) -> None:
            move(row, path, base)
            moving = [(node, k) for k, node in enumerate(path) if node != k]
            for storage in storages(drafting, row.speculation.method) if moving else ():
                storage.move(
                    slots(row, [base + node for node, _ in moving]), slots(row, [base + k for _, k in moving])
                )
                self.moves += len(moving)

        compaction.move = wrapped


class Scrambling:
    """Writes noise behind what each drafter says it has, and over its scratch blocks, before it drafts."""

    before = 0

    def __init__(self, executor: Any) -> None:
        self.moves = 0
        drafting = executor._drafting
        propose = drafting.propose
        noise = torch.Generator().manual_seed(3)

        def wrapped(wanted: Wanted) -> None:
            for row in wanted.rows:
                for storage in storages(drafting, row.speculation.method):
                    filled = max(written(drafting, row) - self.before, 0)
                    behind = slots(row, range(filled, len(row.blocks_np) * BLOCK))
                    for pool in storage.pools:
                        scratch = torch.arange(128 * BLOCK, pool.shape[1])
                        where = torch.cat([behind, scratch])
                        shape = (pool.shape[0], len(where), *pool.shape[2:])
                        pool[:, where] = torch.randn(shape, generator=noise).to(pool.dtype)
                        self.moves += len(behind)
            propose(wanted)

        drafting.propose = wrapped


def drafts_of(
    engines: Engines, case: tuple[str, str, str], change: Callable[[Any], Any] | None = None
) -> tuple[Drafts, int, int]:
    """Drafts of every step, how many accepted nodes stood apart from their place, and how much was changed."""
    family, method, shape = case
    llm = engines.get(family)
    executor: Any = llm._engine.core.executor  # type: ignore[union-attr]
    llm.reset_drafters()
    params = [
        SamplingParams(
            temperature=(0.0, 0.9, 0.9)[i % 3],
            max_tokens=24,
            ignore_eos=True,
            seed=i,
            speculation={"method": method, "rule": ("greedy", "coupled", "rejection")[i % 3], **SHAPES[shape]}
            if i % 3
            else {"method": method, **SHAPES[shape]},
        )
        for i in range(len(engines.prompts))
    ]
    changed = change(executor) if change is not None else None
    ordinary = executor._ordinary
    if isinstance(changed, Moving):
        executor._ordinary = None  # there `Compaction.move` is not told of each path
    try:
        outputs = llm.generate(engines.prompts, params)
    finally:
        executor._ordinary = ordinary
        executor._compaction.__dict__.pop("move", None)
        executor._drafting.__dict__.pop("propose", None)
    traces = [o.outputs[0].trace or () for o in outputs]
    apart = sum(node != k for t in traces for step in t for k, node in enumerate(step.accepted_nodes))
    drafts = [[(step.draft_tokens, step.draft_parents) for step in trace] for trace in traces]
    return drafts, apart, changed.moves if changed is not None else 0


@pytest.mark.parametrize("case", TREES, ids=case_id)
def test_drafts_do_not_depend_on_what_lies_behind_what_is_filled(
    engines: Engines, case: tuple[str, str, str]
) -> None:
    wanted, apart, _ = drafts_of(engines, case)
    assert apart > 0, "paths that the target's storage is compacted for"
    has_kv = case[1] not in ("medusa", "early_exit")  # nothing is stored, or in the target's storage
    moved, _, moves = drafts_of(engines, case, Moving)
    assert moved == wanted and moves == (apart if has_kv else 0)
    scrambled, _, writes = drafts_of(engines, case, Scrambling)
    assert scrambled == wanted and (writes > 0) == has_kv


class ScramblingMore(Scrambling):
    """One token of what is filled, too."""

    before = 1


def test_a_drafter_that_reads_what_was_scrambled_is_seen(engines: Engines) -> None:
    case = ("methods", "draft_model", "static")
    assert drafts_of(engines, case, ScramblingMore)[0] != drafts_of(engines, case)[0]
