"""A planner starts and drains the replicas of a server, by its load."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from draftwise.config import resolve_engine_config
from draftwise.fleet.engine import FleetEngine
from draftwise.fleet.scaling import Scaler
from draftwise.fleet.watching import RequestWatch
from draftwise.plan.capacity import FixedCapacity
from draftwise.plan.live import PlannerService
from draftwise.plan.planner import Planner, PlannerConfig
from tests.fakes.running_server import RunningServer
from tests.fakes.tiny_chat import make_tiny_chat


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_replicas_come_and_go_with_the_load(tmp_path: Path) -> None:
    config = resolve_engine_config(
        model=make_tiny_chat(tmp_path / "chat"),
        device="cpu",
        dtype="float32",
        num_kv_blocks=256,
        num_threads=1,
    )
    fleet = FleetEngine(config, most=3)
    watch = RequestWatch()
    # 11 tokens/s a replica, 20 requests of 10 tokens in 10 s: 20 tokens/s are 2 replicas.
    planner = Planner(
        PlannerConfig(interval=10.0, budget=3, dynamo=True), FixedCapacity(1e6, output_tokens=11.0)
    )
    service = PlannerService(
        planner,
        lambda now: watch.take(now, fleet.stats(), len(fleet.replicas), fleet.warming(10.0)),
        carry_out=lambda decided: scaler.carry_out(decided),
        state=tmp_path / "state.json",
    )
    scaler = Scaler(fleet, service.failed)
    fleet.watch(watch)
    try:
        with RunningServer(fleet, planner=service, planner_mode="scale", planner_budget=3) as server:
            assert fleet.loop is not None and fleet.replicas == (0,)
            body = {"prompt": "hello", "max_tokens": 10, "ignore_eos": True}
            for _ in range(20):
                assert server.request("POST", "/v1/completions", body)[0] == 200
            decision = service.tick()
            assert decision is not None and decision.replicas == {"engines": 2}
            wait_until(lambda: len(fleet.replicas) == 2)
            seen = json.loads(server.request("GET", "/planner")[2])
            assert (
                seen["mode"] == "scale" and seen["seen"]["requests"] == 20.0 and seen["seen"]["osl"] == 10.0
            )
            status, _, data = server.request("POST", "/scale_elastic_ep", {"new_data_parallel_size": 1})
            assert status == 409 and json.loads(data)["error"]["code"] == "scaled_by_planner"
            for _ in range(3):
                service.tick()
            wait_until(lambda: len(fleet.state()) == 1)  # it drained, and its process has ended
            metrics = server.request("GET", "/metrics")[2].decode()
            assert 'draftwise:planner_replicas{model_name="tiny",pool="engines"} 1.0' in metrics
            assert 'draftwise:planner_failures_total{model_name="tiny"} 0.0' in metrics
            assert json.loads((tmp_path / "state.json").read_text())["last"]["replicas"] == {"engines": 1}
            assert server.request("POST", "/v1/completions", body)[0] == 200
    finally:
        service.close()
        fleet.close()
