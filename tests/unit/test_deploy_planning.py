"""A planner on Ray Serve, and the class for `ray.serve.llm`, with fakes of Ray's side."""

from __future__ import annotations

import asyncio
import json
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict
from tests.e2e.test_ray_planner import write_profile
from tests.fakes.tiny_chat import make_tiny_chat
from tests.unit.test_deploy import METRICS, Asked, Told, ask

from draftwise.deploy.front import ReplicaGone
from draftwise.deploy.plan import Plan
from draftwise.deploy.planning import Planning, RayEngines, Watched
from draftwise.deploy.protocol import DraftwiseServer
from draftwise.errors import ConfigError, EngineDeadError
from draftwise.plan.live import Work
from draftwise.server.config import ServerConfig


class Replicas:
    """What engines did; ``wanted``: the numbers that were asked for."""

    def __init__(self, **works: Work) -> None:
        self.now: dict[str, Work] = works
        self.wanted: list[int] = []

    def works(self) -> Mapping[str, Work]:
        return dict(self.now)

    def scale(self, count: int) -> None:
        self.wanted.append(count)


def test_work_of_all_replicas_is_one_observation() -> None:
    busy = Work(arrived=3, started=3, isl=30, ended=2, osl=20, waiting=1, used_blocks=6, num_blocks=10)
    idle = Work(num_blocks=10)
    engines = Replicas(a=busy, b=idle)
    watched = Watched(engines, 60.0)
    seen = watched.observe(100.0)
    assert (seen.requests, seen.isl, seen.osl, seen.queue, seen.kv_usage) == (3.0, 10.0, 10.0, 1.0, 0.3)
    assert seen.ready == {"engines": 2} and seen.warming == 0 and seen.itl is None, "they were there before"
    engines.now["c"] = idle
    assert watched.observe(110.0).warming == 1
    assert watched.observe(171.0).warming == 0
    engines.now.clear()
    with pytest.raises(EngineDeadError):
        watched.observe(180.0)


def plan_of(folder: Path, **more: Any) -> Plan:
    write_profile(folder / "profile.json")
    server = {
        "planner": str(folder / "profile.json"), "planner_mode": "scale", "planner_budget": 3, "planner_interval": 5.0,
        "planner_state": str(folder / "state.json"), **more,
    }  # fmt: skip
    return Plan.of({"engine": {"device": "cpu", "dtype": "float32", "num_threads": 1}, "server": server})


def test_decisions_are_carried_out_told_and_remembered(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    assert plan.is_scaled and plan.first_replicas() == 1
    assert plan.written()["applications"][0]["external_scaler_enabled"] is True
    load = Work(arrived=20000, started=20000, isl=2_000_000, ended=20000, osl=2_000_000, num_blocks=400)
    engines = Replicas(a=load)
    planning = Planning(plan, engines)
    planning.service.tick()
    engines.now = dict.fromkeys("abc", load)
    planning.service.tick()
    assert engines.wanted[-1] == 3, "the budget"
    about = json.loads(planning.about())
    assert (
        about["mode"] == "scale"
        and about["decision"]["replicas"] == {"engines": 3}
        and about["failures"] == 0
    )
    assert b'draftwise:planner_replicas{model_name="draftwise-demo",pool="engines"} 3.0' in planning.metrics()
    assert plan.first_replicas() == 3, "it begins there after a restart"
    planning.close()
    with pytest.raises(ConfigError, match="planner_budget: 1 devices are 1 replicas"):
        plan_of(tmp_path, planner_budget=1, planner_least=2).first_replicas()
    assert not plan_of(tmp_path, planner_mode="advise").is_scaled


class Answer:
    def __init__(self, value: Any) -> None:
        self.value = value

    def result(self, timeout_s: float) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class Method:
    def __init__(self, handle: Handle, name: str) -> None:
        self.handle, self.name = handle, name

    def remote(self, only: str | None = None) -> Answer:
        self.handle.called.append((self.name, only))
        self.handle.names = ("x", "y")
        return Answer(ReplicaGone("it died") if only == "y" else Work(arrived=1))


class Handle:
    def __init__(self) -> None:
        self.called: list[tuple[str, str | None]] = []
        self.names: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)


def test_each_replica_is_asked_and_a_lost_one_left_out() -> None:
    handle, counts = Handle(), list[int]()
    engines = RayEngines(handle, lambda: handle.names, counts.append)
    assert engines.works() == {"x": Work(arrived=1)}
    assert handle.called == [("ping", None), ("work", "x"), ("work", "y")]
    for count in (2, 2, 3):
        engines.scale(count)
    assert counts == [2, 3], "Ray keeps to a number"


class Planner:
    """Answers a front; ``gone``: it is lost."""

    def __init__(self, *, gone: bool = False) -> None:
        self.gone = gone

    async def about(self) -> bytes:
        if self.gone:
            raise ReplicaGone("it died")
        return b'{"mode": "scale"}'

    async def metrics(self) -> bytes:
        await self.about()
        return b"planned 1.0\n"


def test_fronts_tell_what_the_planner_wants() -> None:
    scaling = ServerConfig(planner="p", planner_mode="scale", planner_budget=2)
    told = Told({"x": (200, METRICS)})
    assert ask(told, "/planner", planner=Planner()).json() == {"mode": "scale"}
    assert ask(told, "/planner", planner=Planner(gone=True)).status_code == 503
    assert ask(told, "/metrics", planner=Planner()).text.endswith("planned 1.0\n")
    assert ask(told, "/metrics", planner=Planner(gone=True)).status_code == 200
    assert ask(told, "/scale_elastic_ep", {}, config=scaling).status_code == 409
    asked = Asked()
    assert ask(asked, "/planner").status_code == 200 and len(asked.prompts) == 1, (
        "a replica says that there is none"
    )


# ------------------------------------------------------------------------------------------- ray.serve.llm


class Model(BaseModel):
    model_config = ConfigDict(extra="allow")


class Loading(BaseModel):
    model_id: str
    model_source: str | None = None


class Config(BaseModel):
    """`LLMConfig`, as far as it is read."""

    model_loading_config: Loading
    engine_kwargs: dict[str, Any] = {}
    deployment_config: dict[str, Any] = {}
    lora_config: Any = None


@pytest.fixture
def ray_llm(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = types.ModuleType("ray.serve.llm.openai_api_models")
    for name in ("ChatCompletionResponse", "CompletionResponse", "ErrorResponse"):
        setattr(module, name, type(name, (Model,), {}))
    monkeypatch.setitem(sys.modules, "ray.serve.llm", types.ModuleType("ray.serve.llm"))
    monkeypatch.setitem(sys.modules, "ray.serve.llm.openai_api_models", module)
    return module


def test_the_class_for_ray_llm_answers_in_its_types(ray_llm: Any, tmp_path: Path) -> None:
    config = Config(
        model_loading_config=Loading(model_id="tiny", model_source=make_tiny_chat(tmp_path / "chat")),
        engine_kwargs={"device": "cpu", "dtype": "float32", "num_kv_blocks": 64, "num_threads": 1},
    )
    assert DraftwiseServer.get_deployment_options(config) == {"ray_actor_options": {"num_cpus": 1}}
    given = config.model_copy(
        update={"deployment_config": {"num_replicas": 2, "ray_actor_options": {"num_cpus": 3}}}
    )
    assert DraftwiseServer.get_deployment_options(given) == {
        "num_replicas": 2, "ray_actor_options": {"num_cpus": 3}
    }  # fmt: skip

    made = DraftwiseServer(config)

    async def run() -> None:
        await made.start()
        await made.check_health()
        body = Model(model="tiny", prompt="hello", max_tokens=3, temperature=0, ignore_eos=True)
        (whole,) = [each async for each in await made.completions(body)]
        assert type(whole) is ray_llm.CompletionResponse and whole.usage["completion_tokens"] == 3
        stream = [each async for each in await made.completions(Model(**body.model_dump(), stream=True))]
        assert stream[-1] == "data: [DONE]\n\n" and all(each.endswith("\n\n") for each in stream)
        parts = [json.loads(each.removeprefix("data: "))["choices"][0]["text"] for each in stream[:-1]]
        assert "".join(parts) == whole.choices[0]["text"]
        chat = Model(model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=2)
        (answer,) = [each async for each in await made.chat(chat)]
        assert type(answer) is ray_llm.ChatCompletionResponse and answer.choices[0]["message"]
        (refused,) = [each async for each in await made.completions(Model(model="tiny", prompt="a", n=0))]
        assert type(refused) is ray_llm.ErrorResponse and refused.error["code"] == 400
        await made.reset_prefix_cache()
        assert not await made.is_sleeping() and await made.llm_config() is config
        with pytest.raises(ConfigError, match="embeddings: not supported"):
            made.embeddings(body)

    asyncio.run(run())
    with pytest.raises(ConfigError, match="lora_config"):
        DraftwiseServer.get_deployment_options(config.model_copy(update={"lora_config": {"a": 1}}))


def test_without_the_extra_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.serve.llm.openai_api_models", None)
    config = Config(model_loading_config=Loading(model_id="tiny"))

    with pytest.raises(ConfigError, match=r"pip install 'ray\[llm\]'"):
        DraftwiseServer(config)
