"""The planner beside something that runs: what it sees, what it says, where it remembers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.test_metrics import Engine, families, stats

from draftwise.errors import ConfigError
from draftwise.metrics import Metrics
from draftwise.plan.capacity import FixedCapacity
from draftwise.plan.live import LoadWatch, PlannerService, watch_one, words
from draftwise.plan.planner import Planner, PlannerConfig
from draftwise.plan.ticks import ENGINES, Decision, Observation
from draftwise.sampling.params import SamplingParams
from draftwise.sched.request import Request, RequestUpdate
from draftwise.types import Speculation


def ended(rid: int, at: float, *, prompt: int = 100, output: int = 11) -> Request:
    """Arrived at ``at``, first token 0.5 s later, then 10 ms per token, 2 of 3 drafts accepted."""
    made = Request(
        rid,
        np.zeros(prompt, np.int32),
        SamplingParams(),
        Speculation(),
        max_total=prompt + output,
        seed=0,
        arrival_time=at,
    )
    made.num_tokens += output
    made.first_token_time, made.finished_time = at + 0.5, at + 0.5 + 0.01 * (output - 1)
    made.counts.add("eagle3", 3, 2, 3)
    return made


def planner(**config: Any) -> Planner:
    settings = PlannerConfig(interval=10.0, budget=4, startup=0.0, **config)
    return Planner(settings, FixedCapacity(prompt_tokens=10_000, output_tokens=100))


def test_what_steps_did_becomes_an_observation() -> None:
    now = stats(num_waiting=3, num_used_blocks=4)
    watch = LoadWatch(lambda: now)
    request = ended(1, 5.0, output=1)
    watch.observe([RequestUpdate(request, 1, False)])
    done = ended(1, 5.0)
    watch.observe([RequestUpdate(done, 10, True)])
    seen = watch.take(20.0, {ENGINES: 1})
    assert (seen.requests, seen.queue, seen.isl, seen.osl) == (4.0, 3.0, 100.0, 11.0)  # 1 began, 3 wait
    assert seen.ttft == pytest.approx(0.5) and seen.itl == pytest.approx(0.01)
    assert seen.accepted_length == 3.0 and seen.kv_usage == 0.4
    empty = watch.take(30.0, {ENGINES: 1})
    assert (empty.requests, empty.isl, empty.osl, empty.accepted_length) == (0.0, None, None, None)
    now = stats(num_waiting=1)
    watch.observe([RequestUpdate(ended(2, 8.0, output=1), 1, False)])
    assert watch.take(40.0, {}).requests == 0.0  # who waited before has begun: nobody came


def test_it_decides_says_why_and_counts() -> None:
    loads = iter([0.0, 30.0, 30.0, 30.0])
    service = PlannerService(
        planner(),
        lambda now: Observation(now, requests=next(loads), isl=100.0, osl=100.0, ready={ENGINES: 1}),
    )
    assert service.as_dict()["words"] == "nothing was decided yet" and service.mode == "advise"
    for _ in range(3):
        service.tick()
    told = service.as_dict()
    # 3 requests/s of 100 tokens out at 100 tokens/s: 3 engines, and a little for the prompts.
    assert told["decision"]["replicas"] == {ENGINES: 4} and told["words"] == "4 engines, plain decoding"
    assert told["changes"] == 1 and told["ticks"] == 3
    json.dumps(told, allow_nan=False)
    metrics = Metrics(Engine(stats()), "m")
    metrics.add(service)
    found = families(metrics)
    (wanted,) = found["draftwise:planner_replicas"].samples
    assert wanted.labels == {"model_name": "m", "pool": ENGINES} and wanted.value == 4
    reasons = {s.labels["reason"]: s.value for s in found["draftwise:planner_reasons"].samples}
    assert reasons["load"] == 3
    assert found["draftwise:planner_decisions"].samples[0].value == 3
    assert found["draftwise:planner_request_rate"].samples[0].value == pytest.approx(3.0, rel=0.1)
    assert found["draftwise:planner_request_rate_seen"].samples[0].value == 3.0


def test_it_goes_on_after_a_restart_and_refuses_what_is_no_state(tmp_path: Path) -> None:
    file = tmp_path / "state.json"

    def observe(now: float) -> Observation:
        return Observation(now, requests=30.0, isl=100.0, osl=100.0, ready={ENGINES: 1})

    first = PlannerService(planner(), observe, state=file)
    first.tick()
    again = PlannerService(planner(), observe, state=file)
    assert again.planner.state() == first.planner.state()
    file.write_text("[]")
    with pytest.raises(ConfigError, match="not the state of a planner"):
        PlannerService(planner(), observe, state=file)
    file.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        PlannerService(planner(), observe, state=file)


def test_one_who_cannot_look_or_carry_out_goes_on() -> None:
    done: list[Decision] = []
    broken = [True, False, False]

    def observe(now: float) -> Observation:
        if broken.pop(0):
            raise OSError("no answer")
        return Observation(now, requests=10.0, isl=100.0, osl=100.0, ready={ENGINES: 1})

    def carry_out(decision: Decision) -> None:
        done.append(decision)
        if len(done) == 1:
            raise OSError("no machine")

    service = PlannerService(planner(), observe, carry_out=carry_out)
    assert service.mode == "scale"
    assert service.tick() is None and service.tick() is None
    assert service.tick() is not None and len(done) == 2
    assert service.as_dict()["failures"] == 2


def test_it_ticks_by_itself_until_it_is_closed() -> None:
    import threading

    ticked = threading.Event()

    def observe(now: float) -> Observation:
        ticked.set()
        return Observation(now)

    made = Planner(PlannerConfig(interval=0.01), FixedCapacity(1.0, 1.0))
    service = PlannerService(made, observe)
    service.start()
    assert ticked.wait(30)
    service.close()
    service.close()
    assert words(Decision(0.0, {ENGINES: 1}, "eagle3", 4)) == "1 engine, eagle3 K=4"


def test_one_engine_is_watched() -> None:
    watch = LoadWatch(lambda: stats(num_waiting=0))
    service = watch_one(planner(), watch)
    watch.observe([RequestUpdate(ended(1, 0.0), 11, True)])
    decision = service.tick()
    assert decision is not None and decision.replicas == {ENGINES: 1}


def test_a_server_tells_what_its_planner_wants(tmp_path: Path) -> None:
    from tests.fakes.running_server import RunningServer
    from tests.fakes.scripted_engine import ScriptedEngine
    from tests.fakes.tiny_chat import make_tiny_chat

    engine = ScriptedEngine(make_tiny_chat(tmp_path / "chat"), None, ["a"])
    service = PlannerService(planner(), lambda now: Observation(now, 10.0, 100.0, 100.0, ready={ENGINES: 1}))
    service.tick()
    with RunningServer(engine, planner=service) as server:
        status, _, body = server.request("GET", "/planner")
        assert status == 200 and json.loads(body)["decision"]["replicas"] == {ENGINES: 2}
        metrics = server.request("GET", "/metrics")[2]
        assert b'draftwise:planner_replicas{model_name="tiny",pool="engines"} 2.0' in metrics
    with RunningServer(engine) as server:
        status, _, body = server.request("GET", "/planner")
        assert status == 404 and b"no planner" in body


def test_what_serve_is_told_of_planners_is_checked(tmp_path: Path) -> None:
    from draftwise.cli.main import main

    profile = tmp_path / "p.json"
    profile.write_text("{}")
    assert main(["serve", "--planner", str(profile), "--planner-mode", "scale"]) == 2
    assert main(["serve", "--planner-state", "x"]) == 2
    assert main(["serve", "--planner-interval", "0"]) == 2
    assert main(["serve", "--planner-budget", "0"]) == 2


def test_drafts_are_for_the_load_of_a_replica() -> None:
    """A full engine gains nothing by drafts; one with few requests does."""
    from draftwise.plan.acceptance import AcceptanceModel
    from draftwise.plan.capacity import ModelCapacity
    from draftwise.plan.operating import Sla
    from draftwise.plan.times import Polynomial

    class Rows(Polynomial):
        """10 ms, and 1 ms per row beyond the first 8."""

        def target_time(self, requests: int, rows: int, context: int, sampled: bool = False) -> float:
            return 0.010 + 0.001 * max(rows - 8, 0)

    times = Rows(1_000_000, draft_ms=0.1)
    capacity = ModelCapacity(times, AcceptanceModel.constant((0.7,)), Sla(), most_requests=64)
    assert capacity.setting(100, 100, 0.5) == ("model", 7)
    _, drafts = capacity.setting(100, 100, 40.0)
    assert drafts < 7 and capacity.setting(100, 100, 1e6)[1] <= drafts
    alone = Planner(PlannerConfig(interval=10.0), capacity)
    decision = alone.on_tick(Observation(10.0, requests=5.0, isl=100.0, osl=100.0, ready={ENGINES: 1}))
    assert (decision.method, decision.drafts) == ("model", 7)
    assert any("is the quickest at 0.5" in reason for reason in decision.reasons)
