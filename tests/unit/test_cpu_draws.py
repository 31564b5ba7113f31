"""Chains drawn in one native call, against the draws of plain torch with the same keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.native import native_or_skip

from draftwise.kernels.cpu.ops import NativeOps
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.sampling.draw import draft_tokens
from draftwise.sampling.logits import LogitsRow
from draftwise.sampling.params import SamplingParams
from draftwise.sampling.state import SamplingState
from draftwise.types import ChainDraws, ChainKey

REQUESTS, STEPS, VOCAB = 5, 3, 331
SHAPES = [{"temperature": 0.8}, {"temperature": 1.3, "top_p": 0.7}, {"top_k": 5}, {"min_p": 0.2}]


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    return NativeOps(native_or_skip(), ThreadPool(native_or_skip(), 2), torch.float32)


def states(given: dict[str, Any]) -> list[SamplingState]:
    return [
        SamplingState(
            SamplingParams(**given),
            seed=1000 + i,
            sample_index=i % 2,
            token_ids_np=np.arange(4 + i, dtype=np.int32),
            num_prompt=3,
            vocab_size=VOCAB,
        )
        for i in range(REQUESTS)
    ]


def draws_of(made: list[SamplingState], stream: Any) -> ChainDraws:
    keys = []
    for i, state in enumerate(made):
        seed, top_p, scale, log_min_p, top_k, sample_index = state.draw_fields
        keys.append(ChainKey(seed, sample_index, 4 + i, 0, scale, log_min_p, top_k, top_p))
    return ChainDraws(stream, tuple(keys))


@pytest.mark.parametrize("given", SHAPES, ids=str)
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_tokens_and_distributions_are_those_of_torch(
    ops: NativeOps, given: dict[str, Any], rule: str
) -> None:
    logits = torch.randn(STEPS, REQUESTS, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    made = states(given)
    tokens, q = ops.draw_chains(logits, draws_of(made, "draft" if rule == "rejection" else "shared"))
    for step in range(STEPS):
        wanted, wanted_q = draft_tokens(
            logits[step].clone(),
            [LogitsRow(state, (), np.arange(4 + i, dtype=np.int32)) for i, state in enumerate(made)],
            rules=[rule] * REQUESTS,
            positions=[4 + i + step for i in range(REQUESTS)],
            nodes=[step] * REQUESTS,
            bases=[4 + i for i in range(REQUESTS)],
        )
        assert tokens[:, step].tolist() == wanted
        if rule == "rejection":
            assert q is not None and wanted_q is not None
            torch.testing.assert_close(q[:, step], wanted_q, rtol=1e-5, atol=1e-7)
        else:
            assert q is None
    assert len(set(tokens.flatten().tolist())) > 3, "the draws differ"


@pytest.mark.parametrize("stream", ["draft", "shared"])
def test_a_request_draws_alone_what_it_draws_among_others(ops: NativeOps, stream: str) -> None:
    """Many requests are drawn by several threads."""
    many = 96
    logits = torch.randn(2, many, 1024, generator=torch.Generator().manual_seed(2))
    keys = tuple(ChainKey(i, 0, 7, 0, 1.25) for i in range(many))
    tokens, q = ops.draw_chains(logits, ChainDraws(stream, keys))  # type: ignore[arg-type]
    for i in (0, 41, many - 1):
        draws = ChainDraws(stream, keys[i : i + 1])  # type: ignore[arg-type]
        alone, own = ops.draw_chains(logits[:, i : i + 1].contiguous(), draws)
        assert alone[0].tolist() == tokens[i].tolist()
        assert (q is None) == (own is None)
        if q is not None and own is not None:
            assert torch.equal(own[0], q[i])


def test_ids_of_a_draft_vocabulary(ops: NativeOps) -> None:
    """Noise goes with the target's ids: the same draws as over the target's vocabulary with nothing else in it."""
    ids = torch.arange(0, 3 * VOCAB, 3)
    logits = torch.randn(STEPS, REQUESTS, VOCAB, generator=torch.Generator().manual_seed(3))
    draws = draws_of(states({"temperature": 0.9}), "shared")
    tokens, _ = ops.draw_chains(logits, draws, ids)
    wide = torch.full((STEPS, REQUESTS, 3 * VOCAB), -torch.inf)
    wide[:, :, ids] = logits
    assert tokens.tolist() == ops.draw_chains(wide, draws)[0].tolist()


def test_what_does_not_fit_is_refused(ops: NativeOps) -> None:
    draws = draws_of(states({}), "draft")
    for logits in (torch.zeros(STEPS, REQUESTS + 1, VOCAB), torch.zeros(STEPS, REQUESTS, VOCAB).double()):
        with pytest.raises(ValueError):
            ops.draw_chains(logits, draws)
