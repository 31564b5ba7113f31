"""The hybrid proposer alone: who drafts, how branches are joined, whose books are kept."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from draftwise import ConfigError
from draftwise.config import SpeculativeConfig
from draftwise.config.trees import DynamicTree
from draftwise.propose.base import DraftRow, Proposer
from draftwise.propose.hybrid import HybridProposer, join
from draftwise.propose.lookup.ngram import NgramProposer
from draftwise.propose.lookup.suffix import SuffixProposer
from draftwise.sampling.params import SamplingParams
from draftwise.sampling.state import SamplingState
from draftwise.types import EMPTY_PROPOSAL, Proposal, Speculation, chain

MODEL = {"method": "draft_model", "model": "some/model"}


class Sevens(Proposer):
    """Drafts 7 7 7 ... and remembers whom it was asked for."""

    name: ClassVar[str] = "sevens"
    has_storage: ClassVar[bool] = True

    def __init__(self) -> None:
        self.asked: list[DraftRow] = []

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        self.asked = list(rows)
        return [chain([7] * row.budget, self.name) for row in rows]

    def filled_after(self, row: DraftRow) -> int:
        return row.num_tokens

    def drafts_stored(self, row: DraftRow) -> int:
        return row.budget - 1


def row(tokens: list[int], rid: int = 0, budget: int = 6, dynamic: bool = False) -> DraftRow:
    ids = np.array(tokens, np.int32)
    return DraftRow(
        rid=rid,
        token_ids_np=ids,
        num_prompt=len(tokens),
        budget=budget,
        max_depth=20,
        speculation=Speculation("hybrid", budget, dynamic=DynamicTree() if dynamic else None),
        sampling=SamplingState(
            SamplingParams(temperature=0),
            seed=0,
            sample_index=0,
            token_ids_np=ids,
            num_prompt=len(tokens),
            vocab_size=100,
            device=torch.device("cpu"),
        ),
        block_table_np=np.arange(8, dtype=np.int32),
        filled=3,
    )


@pytest.mark.parametrize("look_up", ["ngram", "suffix"])
def test_a_long_match_beats_the_model(look_up: str) -> None:
    found = NgramProposer(5, 2) if look_up == "ngram" else SuffixProposer()
    model = Sevens()
    proposer = HybridProposer(found, model, min_match=4, model_tokens=3)
    long, short = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 9, 2, 3]
    rows = [row(long, 0), row(short, 1), row([1, 2, 3], 2)]
    got = proposer.propose(rows)
    assert got[0].tokens[:2] == (5, 6) and got[0].method == look_up
    assert [p.tokens for p in got[1:]] == [(7, 7, 7)] * 2
    assert [r.rid for r in model.asked] == [1, 2] and model.asked[0].budget == 3
    # Who was not asked keeps what it had; who was has what the model says.
    assert [proposer.filled_after(r) for r in rows] == [3, 9, 3]
    assert [proposer.drafts_stored(r) for r in rows] == [0, 2, 2]
    # The next step asks for nobody: nothing of the last one is left.
    proposer.propose(rows[:1])
    assert [proposer.filled_after(r) for r in rows] == [3, 3, 3]


OWN = {"propose", "filled_after", "drafts_stored", "stored_after", "leaving", "remove", "forget", "seated"}
"""What a hybrid says itself, in part by asking its model."""


def test_every_hook_reaches_the_model() -> None:
    """Whichever hooks the contract has: a hybrid that forgets one reserves no memory for its model's captured
    passes, say."""
    hooks = {name for name, member in vars(Proposer).items() if callable(member) and not name.startswith("_")}
    assert {"memory_static", "observe", "committed", "settle", "transfer", "trimmed"} <= hooks - OWN
    calls: list[tuple[str, tuple[int, ...]]] = []

    def recording(name: str) -> Callable[..., object]:
        return lambda self, *args: calls.append((name, args)) or name

    model = type("Model", (Proposer,), {"name": "model", **{hook: recording(hook) for hook in hooks}})()
    hybrid = HybridProposer(NgramProposer(5, 2), model)
    for hook in hooks - OWN:
        count = len(inspect.signature(getattr(Proposer, hook)).parameters) - 1
        assert getattr(hybrid, hook)(*range(count)) == hook, hook
        assert calls.pop() == (hook, tuple(range(count))), hook
    hybrid.leaving(3, np.zeros(0, np.int32))
    hybrid.remove(3)
    hybrid.forget()
    assert [name for name, _ in calls] == ["leaving", "remove", "forget"]
    hybrid.forward_time = 2.0
    assert model.forward_time == hybrid.forward_time == 2.0


def test_every_attribute_is_the_models() -> None:
    own = {"name", "evident", "drafts_dynamic_trees", "most_drafts"}
    for answer in (False, True):
        values = {name: answer for name in Proposer.__annotations__ if name not in (*own, "forward_time")}
        assert {"has_storage", "observes", "drafts_trees", "prompt_only", "capture_layers"} <= values.keys()
        model = type("Model", (Sevens,), values)()
        hybrid = HybridProposer(NgramProposer(5, 2), model)
        assert {name: getattr(hybrid, name) for name in values} == values
        assert (hybrid.name, hybrid.evident, hybrid.drafts_dynamic_trees) == ("hybrid", False, True)
        assert hybrid.most_drafts is None


def test_the_model_is_told_though_the_look_up_fails() -> None:
    model = Sevens()
    left: list[int] = []
    model.remove = left.append  # type: ignore[method-assign]
    look_up = NgramProposer(5, 2)

    def lost(rid: int) -> None:
        raise RuntimeError("lost")

    look_up.remove = lost  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="lost"):
        HybridProposer(look_up, model).remove(3)
    assert left == [3]


def test_a_dynamic_tree_has_both() -> None:
    model = Sevens()
    proposer = HybridProposer(NgramProposer(5, 2), model, model_tokens=3)
    rows = [row([1, 2, 3, 4, 5, 6, 9, 2, 3], 1, dynamic=True)]
    (got,) = proposer.propose(rows)
    assert got == Proposal((7, 7, 7, 4, 5, 6), (-1, 0, 1, -1, 3, 4), "hybrid")
    assert model.asked[0].speculation.dynamic is None and model.asked[0].budget == 3
    # A tree's nodes do not stand where its path will be.
    assert proposer.filled_after(rows[0]) == 9 and proposer.drafts_stored(rows[0]) == 0


def test_branches_are_joined() -> None:
    model = Proposal((5, 7, 9), (-1, 0, 0), "model")
    assert join(model, chain([5, 9, 2], "ngram"), 4) == Proposal((5, 7, 9, 2), (-1, 0, 0, 2), "hybrid")
    assert join(model, chain([5, 9, 2], "ngram"), 3) is model
    assert join(model, chain([5, 9], "ngram"), 9) is model
    assert join(EMPTY_PROPOSAL, chain([5, 9], "ngram"), 1) == chain([5], "ngram")
    assert join(model, EMPTY_PROPOSAL, 5) is model
    sampled = chain([5], "model", torch.full((1, 10), 0.1))
    assert join(sampled, chain([6], "ngram"), 5) is sampled


def test_configuration() -> None:
    config = SpeculativeConfig.from_dict(
        {"method": "hybrid", "hybrid_drafter": MODEL | {"num_speculative_tokens": 3}}
    )
    assert config.num_speculative_tokens == 16 and config.hybrid_drafter is not None
    assert config.hybrid_drafter.num_speculative_tokens == 3
    short = SpeculativeConfig.from_dict({"method": "hybrid", "model": "some/model"})
    assert short.hybrid_drafter is not None and short.hybrid_drafter.method == "draft_model"
    assert short.model is None
    for wrong, message in (
        ({}, "hybrid_drafter: method 'hybrid' needs a model"),
        ({"hybrid_drafter": {"method": "ngram"}}, "hybrid_drafter: method 'ngram' is not a model"),
        ({"hybrid_drafter": {"method": "zzz"}}, "hybrid_drafter: .*unknown method 'zzz'"),
        ({"hybrid_drafter": MODEL, "model": "x"}, "model: contradicts hybrid_drafter"),
        ({"hybrid_drafter": MODEL | {"rejection_sample_method": "block"}}, "give it beside hybrid_drafter"),
        (
            {"hybrid_drafter": MODEL, "prompt_lookup_max": 3},
            "prompt_lookup_max: only with hybrid_lookup 'ngram'",
        ),
        (
            {"hybrid_drafter": MODEL, "hybrid_lookup": "ngram", "suffix_decoding_max_tree_depth": 8},
            "suffix_decoding_max_tree_depth: only with hybrid_lookup 'suffix'",
        ),
        ({"hybrid_drafter": MODEL, "hybrid_lookup": "eagle"}, "hybrid_lookup"),
        (
            {"hybrid_drafter": MODEL, "hybrid_lookup": "ngram", "prompt_lookup_max": 3},
            "hybrid_min_match: 4 is over prompt_lookup_max = 3",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            SpeculativeConfig.from_dict({"method": "hybrid", **wrong})
    with pytest.raises(ConfigError, match="hybrid_min_match: only for method 'hybrid'"):
        SpeculativeConfig.from_dict({"method": "suffix", "hybrid_min_match": 3})


def test_a_row_with_another_budget_is_the_same_otherwise() -> None:
    """Whatever fields rows have one day."""
    given = DraftRow(1, np.arange(3), 2, 9, 7, Speculation("hybrid", 9), None, np.arange(2), 1, None, (5,))  # type: ignore[arg-type]
    assert given.with_budget(4) == replace(given, budget=4)
