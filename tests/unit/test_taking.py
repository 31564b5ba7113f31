"""Steps that are taken in natively, against the same steps taken in row by row."""

from __future__ import annotations

import random
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
from tests.fakes.fake_executor import FakeExecutor, LateExecutor
from tests.native import native_or_skip

from draftwise.adapt.controller import StaticController
from draftwise.engine.core import EngineCore
from draftwise.kv.manager import KVManager
from draftwise.sampling.params import SamplingParams
from draftwise.sched.request import Request
from draftwise.sched.scheduler import Scheduler, SchedulerConfig
from draftwise.sched.taking import Books
from draftwise.types import Speculation


def run(native: bool, seed: int, ahead: bool, window: int | None) -> list[Any]:
    """What is known of all requests and their blocks after each step of a random load."""
    rng = random.Random(seed)
    time = iter(range(10**9))
    kv = KVManager(60, 4, window=window)
    fake = FakeExecutor(60, 4, seed, 40, ahead=ahead)
    scheduler = Scheduler(SchedulerConfig(8, 40), kv, StaticController(), lambda: float(next(time)))
    if not native:
        scheduler._books = None
    core = EngineCore(
        scheduler, LateExecutor(fake) if ahead else fake, lambda: float(next(time)), ahead=ahead
    )
    requests: list[Request] = []
    seen: list[Any] = []
    while len(requests) < 30 or core.has_work:
        if len(requests) < 30 and rng.random() < 0.4:
            prompt = [rng.randrange(5) for _ in range(rng.randrange(1, 20))]
            tokens = rng.randrange(1, 40)
            k = rng.randrange(4)
            request = Request(
                len(requests),
                np.asarray(prompt, np.int32),
                SamplingParams(temperature=0, max_tokens=tokens, min_tokens=rng.randrange(2)),
                Speculation("fake" if k else "none", k),
                max_total=len(prompt) + tokens,
                seed=0,
                arrival_time=0.0,
                stop_token_ids=frozenset({3, 1 << 40}) if rng.random() < 0.3 else frozenset(),
                keep_trace=rng.random() < 0.2,
            )
            requests.append(request)
            core.add(request)
        if requests and rng.random() < 0.05:
            core.cancel(rng.choice(requests).rid)
        updates = core.step()
        core.check_integrity()
        seen.append([(u.request.rid, u.num_new, u.finished) for u in updates])
        seen.append([state_of(request) for request in requests])
        seen.append((kv.num_free, [kv.block_ids(r.rid) for r in requests if kv.is_open(r.rid)]))
    seen.append(core.speculation_counts())
    return seen


def state_of(request: Request) -> tuple[Any, ...]:
    return (
        request.known_np.tolist(),
        request.num_computed,
        request.num_proposed,
        request.finish_reason,
        request.first_token_time,
        request.last_token_time,
        astuple(request.counts),
        request.trace,
    )


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("seed", "window"), [(1, None), (2, 8), (3, None)])
def test_natively_as_row_by_row(
    seed: int, window: int | None, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    native_or_skip()
    taken: list[int] = []
    take_in = Books.take_in

    def counted(self: Books, *args: Any) -> Any:
        answers = take_in(self, *args)
        taken.extend(answer for answer in answers or () if answer >= 0)
        return answers

    monkeypatch.setattr(Books, "take_in", counted)
    expected = run(False, seed, ahead, window)
    assert not taken
    assert run(True, seed, ahead, window) == expected
    assert len(taken) > 50, "nothing was compared"
