"""What verification costs the host, counted: operations of torch, and calls of Python functions and of what they call
in C. Counts do not depend on the machine; times are what `benchmarks/host_time.py` is for."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draftwise.sampling.params import SamplingParams
from draftwise.sampling.state import SamplingState
from draftwise.types import chain
from draftwise.verify.base import VerifyRequest
from draftwise.verify.batch import verify_batch

VOCAB, K = 512, 4
IDS = np.arange(10, dtype=np.int32)


class Operations(TorchDispatchMode):
    """Counts what torch computes inside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def greedy_step(batch: int) -> tuple[torch.Tensor, list[VerifyRequest]]:
    """Requests whose drafts are all accepted."""
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
    return logits, requests


def operations(batch: int) -> int:
    logits, requests = greedy_step(batch)
    with Operations() as found:
        verify_batch(logits, requests)
    return found.count


def calls(batch: int) -> int:
    logits, requests = greedy_step(batch)
    verify_batch(logits, requests)  # imports, and what is made once
    count = 0

    def tick(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(tick)
    try:
        verify_batch(logits, requests)
    finally:
        sys.setprofile(None)
    return count


def test_a_greedy_step_is_as_many_operations_for_any_batch() -> None:
    assert operations(1) == operations(64) <= 8


def test_calls_of_a_greedy_step() -> None:
    """Per request, and of a step with one: what it was when the limits were set, and a tenth."""
    one, many = calls(1), calls(64)
    assert (many - one) / 63 <= 18.7, f"{(many - one) / 63:.1f} calls per request"
    assert one <= 44, f"{one} calls of a step with one request"
