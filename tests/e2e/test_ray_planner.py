"""A planner owns the number of replicas on Ray Serve: it begins where it was, drains what is idle, and says why."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftwise.plan.capacity import FixedCapacity
from draftwise.plan.live import write_state
from draftwise.plan.planner import Planner, PlannerConfig
from draftwise.plan.profile import Profile
from draftwise.plan.samples import PromptSample, Setting, StepSample
from draftwise.plan.ticks import ENGINES, Observation
from draftwise.profile.run import machine
from tests.e2e.test_ray_serve import ENGINE, Served, command, free_port, wait_until_served
from tests.fakes.ray_cluster import ray_cluster

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with ray_cluster() as module:
        yield module


def write_profile(path: Path) -> None:
    setting = Setting("auto", 6400, 16, 1000.0)
    setting.prompts += [PromptSample("none", n, (0.002 + n * 1e-5,)) for n in (32, 256)]
    setting.steps += [StepSample("none", 0, n, 128, n, 128 * n, 0.001 + 5e-5 * n, 0.0, 9) for n in (1, 16)]
    Profile(machine("cpu", 1), "embedded", {"auto": setting}).save(path)


def test_it_goes_on_where_it_was_and_drains_what_is_idle(ray: Any, tmp_path: Path) -> None:
    from ray import serve

    write_profile(tmp_path / "profile.json")
    before = Planner(
        PlannerConfig(interval=3.0, budget=2, dynamo=True), FixedCapacity(1e6, output_tokens=11.0)
    )
    before.on_tick(Observation(3.0, requests=6.0, isl=10.0, osl=10.0, ready={ENGINES: 1}))
    assert before.wanted == 2
    write_state(tmp_path / "state.json", before)
    port, log = free_port(), tmp_path / "serve.log"
    flags = [
        "--planner", str(tmp_path / "profile.json"), "--planner-mode", "scale", "--planner-budget", "2",
        "--planner-interval", "3", "--planner-state", str(tmp_path / "state.json"), "--log-level", "info",
    ]  # fmt: skip
    arguments = [sys.executable, "-m", "draftwise", "serve", "--ray", "--port", str(port), *ENGINE, *flags]
    with command(ray, arguments, log, code=130) as process:
        running = Served(ray, serve, port)
        wait_until_served(process, running, log)
        engines = serve.status().applications["draftwise"].deployments["Engine"]
        assert sum(engines.replica_states.values()) == 2, "as many as before the restart"
        deadline = time.monotonic() + 120
        while engines.replica_states != {"RUNNING": 1}:
            assert time.monotonic() < deadline, (engines.replica_states, log.read_text()[-3000:])
            assert running.ask("/v1/completions", {"prompt": [5, 6], "max_tokens": 2})[0] == 200
            time.sleep(0.5)
            engines = serve.status().applications["draftwise"].deployments["Engine"]
        code, text = running.ask("/planner")
        seen = json.loads(text)
        assert code == 200 and seen["mode"] == "scale" and seen["decision"]["replicas"] == {"engines": 1}
        assert seen["decision"]["reasons"] and seen["failures"] == 0
        metrics = running.ask("/metrics")[1]
        assert 'draftwise:planner_replicas{model_name="draftwise-demo",pool="engines"} 1.0' in metrics
        assert running.ask("/scale_elastic_ep", {"new_data_parallel_size": 2})[0] == 409
        assert json.loads((tmp_path / "state.json").read_text())["last"]["replicas"] == {"engines": 1}
