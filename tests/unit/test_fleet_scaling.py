"""A planner that scales a fleet: what it is told, and how what it wants is carried out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import ClassVar

import pytest
from tests.unit.test_metrics import stats

from draftwise.config import resolve_engine_config
from draftwise.engine.outputs import RequestMetrics, SpeculationMetrics
from draftwise.errors import ConfigError, EngineDeadError
from draftwise.fleet.scaling import Scaler
from draftwise.fleet.watching import RequestWatch
from draftwise.plan.capacity import FixedCapacity
from draftwise.plan.live import write_state
from draftwise.plan.planner import Planner, PlannerConfig
from draftwise.plan.ticks import ENGINES, Decision, Observation
from draftwise.profile.beside import fleet_size
from draftwise.server.config import ServerConfig


class Fleet:
    """Replicas that are started at once, but for those that it is told to wait for, or to fail at."""

    def __init__(self) -> None:
        self.replicas: tuple[int, ...] = (0,)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.asked: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.broken = False

    async def scale(self, count: int) -> None:
        self.asked.append(count)
        await self.gate.wait()
        if self.broken:
            raise EngineDeadError("no memory")
        self.replicas = tuple(range(count))


def decision(count: int) -> Decision:
    return Decision(0.0, {ENGINES: count})


def test_the_last_word_is_carried_out() -> None:
    fleet = Fleet()
    failures: list[int] = []
    scaler = Scaler(fleet, lambda: failures.append(1))
    with pytest.raises(EngineDeadError):
        scaler.carry_out(decision(2))

    async def settled() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    async def main() -> None:
        fleet.loop = asyncio.get_running_loop()
        fleet.gate.clear()
        for count in (2, 3, 4, 1, 5):  # while the first is under way
            scaler.carry_out(decision(count))
            await settled()
        assert fleet.asked == [2]
        fleet.gate.set()
        await settled()
        assert fleet.asked == [2, 5] and len(fleet.replicas) == 5
        fleet.replicas = fleet.replicas[:3]  # two were lost
        scaler.carry_out(decision(5))
        await settled()
        assert len(fleet.replicas) == 5
        fleet.broken = True
        scaler.carry_out(decision(6))
        await settled()
        assert failures == [1] and len(fleet.replicas) == 5
        fleet.broken = False
        scaler.carry_out(decision(6))
        await settled()
        assert failures == [1] and len(fleet.replicas) == 6

    asyncio.run(main())


def test_what_requests_did_becomes_an_observation() -> None:
    watch = RequestWatch()
    for _ in range(3):
        watch.arrived(100, 2)
    speculation = SpeculationMetrics(num_drafts=4, num_draft_tokens=12, num_accepted_tokens=6)
    watch.ended(40, 2, RequestMetrics(0.0, ttft=0.5, itl=0.01, speculation=speculation))
    watch.ended(4, 2, None)
    watch.ended(1, 1, RequestMetrics(0.0, ttft=1.5))
    seen = watch.take(9.0, stats(num_waiting=3, num_used_blocks=4), 2, 1)
    assert (seen.time, seen.requests, seen.isl, seen.osl) == (9.0, 6.0, 100.0, 9.0)
    assert (seen.ttft, seen.itl, seen.accepted_length, seen.draft_length) == (1.0, 0.01, 2.5, 3.0)
    assert (seen.queue, seen.kv_usage, seen.ready, seen.warming) == (3.0, 0.4, {ENGINES: 2}, 1)
    empty = watch.take(19.0, stats(), 2, 0)
    assert (empty.requests, empty.isl, empty.osl, empty.ttft, empty.accepted_length) == (0.0,) + (None,) * 4


def test_a_fleet_begins_with_what_was_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart; never under the floor, never over the ceiling."""

    class Setting:
        devices = 2

    class AnyProfile:
        settings: ClassVar[dict[str, Setting]] = {}

        def setting(self, weights: str | None) -> Setting:
            return Setting()

    capacity = FixedCapacity(prompt_tokens=10_000, output_tokens=100)
    made = Planner(PlannerConfig(interval=10.0, budget=64), capacity)
    monkeypatch.setattr("draftwise.profile.beside.profile_of", lambda config: AnyProfile())
    monkeypatch.setattr(
        "draftwise.profile.beside.planner_of",
        lambda config, engine: Planner(PlannerConfig(interval=10.0, budget=64), capacity),
    )
    state = tmp_path / "state.json"
    engine = resolve_engine_config(device="cpu", data_parallel_size=2)

    def size(budget: int, least: int = 1) -> tuple[int, int]:
        config = ServerConfig(
            planner="p.json", planner_mode="scale", planner_budget=budget, planner_least=least,
            planner_state=str(state),
        )  # fmt: skip
        return fleet_size(config, engine, engine.data_parallel_size)

    assert size(9) == (2, 4) and size(9, least=3) == (3, 4)
    with pytest.raises(ConfigError, match="planner_budget: 3 devices are 1 replicas of 2"):
        size(3)
    for _ in range(2):
        made.on_tick(Observation(10.0, requests=30.0, isl=100.0, osl=100.0, ready={ENGINES: 1}))
    assert made.wanted == 4
    write_state(state, made)
    assert size(64) == (4, 32) and size(6) == (3, 3) and size(64, least=7) == (7, 32)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"planner": "p", "planner_mode": "scale"}, "planner_mode: scale needs planner_budget"),
        ({"planner_mode": "scale"}, "planner_mode: scale needs planner"),
        ({"planner": "p", "planner_mode": "act"}, "planner_mode: expected advise or scale"),
        ({"planner": "p", "planner_least": 0}, "planner_least"),
        ({"planner_budget": 3}, "planner_budget: needs planner"),
        ({"planner": "p", "planner_interval": float("inf")}, "planner_interval"),
    ],
)
def test_what_contradicts_itself_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerConfig(**options)  # type: ignore[arg-type]
