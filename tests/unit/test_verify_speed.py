"""Host time of verification. The best of many runs, against limits several times what is measured."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from draftwise.sampling.params import SamplingParams
from draftwise.sampling.state import SamplingState
from draftwise.types import chain
from draftwise.verify.base import VerifyRequest
from draftwise.verify.batch import verify_batch

VOCAB, K = 4096, 4
IDS = np.arange(10, dtype=np.int32)


def best_of(n: int, call: Callable[[], object]) -> float:
    times = []
    for _ in range(n):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.parametrize(("batch", "limit"), [(1, 400e-6), (64, 3e-3)])
def test_greedy_step(batch: int, limit: float) -> None:
    logits = torch.randn(batch * (K + 1), VOCAB, generator=torch.Generator().manual_seed(0))
    best = logits.argmax(-1).tolist()
    requests = []
    for r in range(batch):
        state = SamplingState(
            SamplingParams(temperature=0),
            seed=r,
            sample_index=0,
            token_ids_np=IDS,
            num_prompt=10,
            vocab_size=VOCAB,
        )
        first = r * (K + 1)
        requests.append(VerifyRequest(state, chain(best[first : first + K], "t"), first, "greedy", IDS))
    assert best_of(50, lambda: verify_batch(logits, requests)) < limit
