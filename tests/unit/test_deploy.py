"""The server on Ray Serve, without Ray: fronts over applications of this process, what is noted, what is deployed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from draftwise.cli.main import main
from draftwise.config.resolve import resolve_engine_config
from draftwise.deploy import following
from draftwise.deploy.cache_log import CacheLog
from draftwise.deploy.front import Front, Planned, ReplicaGone
from draftwise.deploy.messages import Message, answered
from draftwise.deploy.noted import Noted
from draftwise.deploy.plan import Plan
from draftwise.errors import ConfigError
from draftwise.kv.events import BlocksRemoved, BlocksStored, CacheCleared
from draftwise.kv.prefix_cache import block_digests, root_digest
from draftwise.server.config import ServerConfig
from draftwise.types import IntArray

ENGINE = resolve_engine_config(model="M", device="cpu", skip_tokenizer_init=True)


class Words:
    """A tokenizer: a word is as many as it has letters."""

    chat_template = "there is one"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [len(word) for word in text.split()]

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return " ".join(message["content"] for message in messages)


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Says what it was asked, in two pieces."""
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": scope["path"].encode() + b" ", "more_body": True})
    await send({"type": "http.response.body", "body": body})


class Asked:
    """Replicas: an application that answers, unless it is told to be lost at a message."""

    def __init__(self, app: Any = echo, *lost_at: int) -> None:
        self.app = app
        self.lost_at = list(lost_at)
        self.prompts: list[list[int] | None] = []

    def names(self) -> list[str]:
        return ["a", "b"]

    async def ask(
        self, scope: dict[str, Any], body: bytes, ids_np: IntArray | None = None, only: str | None = None
    ) -> AsyncIterator[Message]:
        self.prompts.append(None if ids_np is None else ids_np.tolist())
        lost_at = self.lost_at.pop(0) if self.lost_at else None
        count = 0
        async for message in answered(self.app, scope, body):
            if count == lost_at:
                raise ReplicaGone("it died")
            count += 1
            yield message


class Answer:
    """What came back."""

    def __init__(self, messages: list[Message]) -> None:
        self.status_code: int = messages[0]["status"]
        self.text = b"".join(m["body"] for m in messages[1:]).decode()
        assert [bool(m.get("more_body")) for m in messages[1:]][-1] is False

    def json(self) -> Any:
        return json.loads(self.text)


def ask(
    asked: Asked | Told,
    path: str,
    body: Any = None,
    *,
    planner: Planned | None = None,
    config: ServerConfig | None = None,
) -> Answer:
    async def run() -> Answer:
        front = Front(asked, Words(), ENGINE, config or ServerConfig(), planner)
        data = b"" if body is None else json.dumps(body).encode()
        halves = [data[: len(data) // 2], data[len(data) // 2 :]]
        found: list[Message] = []

        async def receive() -> Message:
            if halves:
                return {"type": "http.request", "body": halves.pop(0), "more_body": bool(halves)}
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None:
            found.append(message)

        method = "GET" if body is None else "POST"
        try:
            await front({"type": "http", "method": method, "path": path, "headers": []}, receive, send)
        finally:
            front.close()
        return Answer(found)

    return asyncio.run(run())


def test_a_request_goes_on_whole_with_its_prompt() -> None:
    asked = Asked()
    for body, ids in (
        ({"prompt": "a bcd ef"}, [1, 3, 2]),
        ({"prompt": [7, 8, 9]}, [7, 8, 9]),
        ({"prompt": ["xy z", "no"]}, [2, 1]),
        ({"prompt": {"no": "prompt"}}, None),
        ({"prompt": "word " * 2000}, [4] * 2000),  # in a thread
        ([1], None),
        ({"prompt": [1 << 40]}, None),
    ):
        answer = ask(asked, "/v1/completions", body)
        assert answer.status_code == 200
        path, _, said = answer.text.partition(" ")
        assert path == "/v1/completions" and json.loads(said) == body
        assert asked.prompts[-1] == ids
    ask(asked, "/v1/chat/completions", {"messages": [{"role": "user", "content": "ab c"}]})
    assert asked.prompts[-1] == [2, 1]
    ask(asked, "/v1/chat/completions", {"messages": 5})
    ask(asked, "/v1/models")
    assert asked.prompts[-2:] == [None, None]


def test_what_one_replica_would_answer_for_itself_is_refused_by_name() -> None:
    asked = Asked()
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/scale_elastic_ep"):
        answer = ask(asked, path)
        assert answer.status_code == 501 and path in answer.json()["error"]["message"]
    assert not asked.prompts


def test_a_request_of_which_nothing_was_said_begins_again_elsewhere() -> None:
    asked = Asked(echo, 0, 0)
    assert ask(asked, "/v1/completions", {"prompt": "a"}).status_code == 200
    assert asked.prompts == [[1]] * 3
    lost = ask(Asked(echo, 0, 0, 0), "/v1/completions", {"prompt": "a"})
    assert lost.status_code == 503 and "no replica answers: it died" in lost.json()["error"]["message"]


async def streaming(scope: Any, receive: Any, send: Any) -> None:
    kind = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": kind})
    for i in range(3):
        await send({"type": "http.response.body", "body": b"data: %d\n\n" % i, "more_body": i < 2})


def test_a_stream_that_had_begun_ends_with_an_error_and_is_not_repeated() -> None:
    asked = Asked(streaming, 2)
    answer = ask(asked, "/v1/completions", {"prompt": "a"})
    first, error, end = answer.text.split("\n\n")
    assert first == "data: 0" and end == ""
    assert "ask again: it died" in json.loads(error.removeprefix("data: "))["error"]["message"]
    assert len(asked.prompts) == 1
    with pytest.raises(ReplicaGone):  # the server cuts the connection
        ask(Asked(echo, 2), "/v1/completions", {"prompt": "a"})


def test_a_client_that_leaves_is_seen_by_the_replica() -> None:
    seen: list[str] = []
    begun = asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        begun.set()
        try:
            while True:
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
        finally:
            seen.append("gone")

    async def run() -> None:
        front = Front(Asked(endless), Words(), ENGINE, ServerConfig())
        parts: list[Message] = [{"type": "http.request", "body": b"{}"}, {"type": "http.disconnect"}]

        async def receive() -> Message:
            if len(parts) == 1:
                await begun.wait()
            return parts.pop(0)

        async def send(message: Message) -> None:
            await asyncio.sleep(0)

        await front(
            {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}, receive, send
        )
        front.close()

    asyncio.run(run())
    assert seen == ["gone"]


class Told:
    """Replicas that answer what all are asked, each in its own words; None: it is gone."""

    def __init__(self, answers: dict[str, tuple[int, bytes] | None], *, known: bool = True) -> None:
        self.answers = answers
        self.known = known
        self.asked: list[str | None] = []

    def names(self) -> list[str]:
        return list(self.answers) if self.known else []

    async def ask(
        self, scope: dict[str, Any], body: bytes, ids_np: IntArray | None = None, only: str | None = None
    ) -> AsyncIterator[Message]:
        self.asked.append(only)
        self.known = True
        answer = (200, b"") if only is None else self.answers[only]
        if answer is None:
            raise ReplicaGone("it died")
        status, text = answer
        kind = [(b"content-type", b"text/plain")]
        yield {"type": "http.response.start", "status": status, "headers": kind}
        yield {"type": "http.response.body", "body": text[:7], "more_body": True}
        yield {"type": "http.response.body", "body": text[7:]}


METRICS = b"""# HELP draftwise:steps_total Steps, all of them.
# TYPE draftwise:steps_total counter
draftwise:steps_total{model_name="m{}"} 3.0
# HELP up Whether.
# TYPE up gauge
up 1.0
"""


def test_numbers_of_all_replicas_say_whose_they_are() -> None:
    told = Told({"x": (200, METRICS), "y": (200, METRICS.replace(b"3.0", b"4.0")), "z": None}, known=False)
    answer = ask(told, "/metrics")
    assert answer.status_code == 200 and told.asked == [None, "x", "y", "z"]
    assert answer.text.splitlines() == [
        "# HELP draftwise:steps_total Steps, all of them.",
        "# TYPE draftwise:steps_total counter",
        'draftwise:steps_total{replica="x",model_name="m{}"} 3.0',
        'draftwise:steps_total{replica="y",model_name="m{}"} 4.0',
        "# HELP up Whether.",
        "# TYPE up gauge",
        'up{replica="x"} 1.0',
        'up{replica="y"} 1.0',
    ]


def test_all_are_asked_and_answer_as_one() -> None:
    loads = [
        {"server_load": n, "num_requests_running": n, "num_requests_waiting": 2 * n, "kv_cache_usage": n / 4}
        for n in (1, 2)
    ]
    told = Told({name: (200, json.dumps(one).encode()) for name, one in zip("xy", loads, strict=True)})
    assert ask(told, "/load").json() == {
        "server_load": 3, "num_requests_running": 3, "num_requests_waiting": 6, "kv_cache_usage": 0.375,
    }  # fmt: skip
    done, busy = (200, b'{"success": true}'), (200, b'{"success": false}')
    assert ask(Told({"x": done, "y": done}), "/reset_prefix_cache", {}).json() == {"success": True}
    assert ask(Told({"x": done, "y": busy}), "/reset_prefix_cache", {}).json() == {"success": False}
    refused = ask(Told({"x": done, "y": (401, b"who are you?")}), "/reset_prefix_cache", {})
    assert (refused.status_code, refused.text) == (401, "who are you?")
    assert ask(Told({"x": None}), "/load").status_code == 503


def test_prompts_go_where_blocks_are_until_they_are_gone() -> None:
    noted = Noted(4)
    noted.update(["a", "b"])
    prompt_np = np.arange(40, dtype=np.int32)
    digests = block_digests(root_digest(None), prompt_np, 4, 0, 10)

    def go(request: str) -> str:
        best = noted.order(request, prompt_np, ["a", "b"])[0]
        noted.sent(request, best)
        noted.ended(request)
        return best

    first = go("nobody knows")
    assert [go(f"follows {i}") for i in range(3)] == [first] * 3, "although no news came yet"
    noted.update([])
    noted.update(["a", "b"])
    noted.changed("b", [("+", digests)])
    assert [go(f"{i}") for i in range(4)] == ["b"] * 4
    noted.changed("b", [("-", digests)])
    assert go("still") == "b"
    noted.changed("b", [])
    noted.changed("b", [])
    noted.changed("a", [("+", digests)])
    assert [go(f"later {i}") for i in range(4)] == ["a"] * 4
    for _ in range(2):
        noted.changed("a", [("0", ())])
    assert go("then") == "b", "who was not asked for longest"
    assert noted.num_requests("a") == noted.num_requests("b") == 0
    noted.update(["b", "c"])
    assert set(noted.names) == {"b", "c"}
    noted.changed("a", [("+", digests)])  # late news of one that is gone
    noted.ended("of which nobody knows")


def test_a_log_tells_what_changed_and_the_whole_to_who_is_behind() -> None:
    def stored(*names: bytes) -> BlocksStored:
        return BlocksStored(names, None, np.zeros(4 * len(names), np.int32))

    async def main() -> None:
        log = CacheLog()
        log.observe([stored(b"1", b"2"), BlocksRemoved((b"1",))])
        number, changes = await log.since(None, 0.0)
        assert number == 2 and changes == [("0", ()), ("+", (b"2",))]
        assert await log.since(1, 0.0) == (2, [("-", (b"1",))])
        assert await log.since(2, 0.0) == (2, [])
        waiting = asyncio.ensure_future(log.since(2, 30.0))
        await asyncio.sleep(0)
        await asyncio.to_thread(log.observe, [stored(b"3"), stored(b"4")])
        assert await waiting == (4, [("+", (b"3",)), ("+", (b"4",))])
        log.observe([CacheCleared()])
        log.observe([stored(bytes([i % 256, i // 256])) for i in range(5000)])
        number, changes = await log.since(4, 0.0)
        assert number == 5005 and changes[0] == ("0", ()) and len(changes[1][1]) == 5000
        assert len((await log.since(5000, 0.0))[1]) == 5

    asyncio.run(main())


def test_followers_hear_of_several_replicas_and_outlive_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "_PAUSE", 0.0)
    asked: list[tuple[str, int | None]] = []
    prompt_np = np.arange(8, dtype=np.int32)
    digests = block_digests(root_digest(None), prompt_np, 4, 0, 2)

    async def changes(name: str, number: int | None) -> tuple[int, Any]:
        asked.append((name, number))
        if len(asked) < 3:
            raise ReplicaGone("not yet")
        if number == 7:
            await asyncio.sleep(30)
        return 7, [("+", digests)] if name == "b" else []

    async def main() -> None:
        noted = Noted(4)
        noted.update(["a"])
        followers = following.Followers(noted, changes)
        followers.look()
        await asyncio.sleep(0.01)
        assert not asked, "one has no rivals"
        noted.update(["a", "b"])
        followers.look()
        followers.look()
        while asked.count(("a", 7)) + asked.count(("b", 7)) < 2:
            await asyncio.sleep(0.001)
        assert noted.order("r", prompt_np, ["a", "b"]) == ["b", "a"]
        assert len(followers._tasks) == 2
        for task in followers._tasks.values():
            task.cancel()
        await asyncio.sleep(0.01)
        assert not followers._tasks

    asyncio.run(main())


def test_a_plan_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    code = main([
        "serve", "some/model", "--write-deployment", str(path), "--num-replicas", "3", "--api-key", "secret",
        "--tensor-parallel-size", "2", "--distributed-executor-backend", "ray", "--num-threads", "4", "--device", "cpu",
        "--max-concurrent", "64", "--host", "0.0.0.0", "--speculative-config", '{"method": "ngram"}',
    ])  # fmt: skip
    assert code == 0
    text = path.read_text()
    assert "secret" not in text
    written = yaml.safe_load(text)
    assert written["http_options"] == {"host": "0.0.0.0", "port": 8000}
    (application,) = written["applications"]
    assert application["import_path"] == "draftwise.cluster.serve:app"
    plan = Plan.of(application["args"])
    assert plan.num_replicas == 3 and plan.server_config.max_concurrent == 64
    assert plan.engine_config.model == "some/model" and plan.engine_config.default_method == "ngram"
    assert plan.reserves() == {
        "ray_actor_options": {"num_cpus": 1},
        "placement_group_bundles": [{"CPU": 1}, {"CPU": 4}, {"CPU": 4}],
        "placement_group_strategy": "PACK",
    }
    alone = Plan.of({"engine": {"model": "M", "device": "cpu", "num_threads": 3}})
    assert alone.reserves() == {"ray_actor_options": {"num_cpus": 3}}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"replicas": 2}, r"unknown name 'replicas'.*num_replicas"),
        ({"num_replicas": 0}, "num_replicas: expected an integer >= 1"),
        ({"num_fronts": True}, "num_fronts: expected"),
        ({"engine": 5}, "args: engine: expected names and values"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Plan.of(arguments)


def test_bad_names_within_are_named() -> None:
    with pytest.raises(ConfigError, match="server: unknown name 'max_concurent'"):
        _ = Plan.of({"server": {"max_concurent": 5}}).server_config
    with pytest.raises(ConfigError, match="block_sise"):
        _ = Plan.of({"engine": {"model": "M", "block_sise": 5}}).engine_config


def test_what_ray_serve_would_not_heed_is_refused() -> None:
    with pytest.raises(ConfigError, match="ssl_keyfile"):
        _ = Plan.of({"server": {"ssl_ca_certs": __file__}}).server_config


def test_adapters_are_written_and_read() -> None:
    given = {"server": {"lora_modules": [{"name": "sql", "path": "p"}, {"name": "go", "path": "q"}]}}
    plan = Plan.of(given | {"engine": {"model": "M", "device": "cpu", "enable_lora": True}})
    assert [(m.lora_name, m.lora_int_id) for m in plan.server_config.lora_modules] == [("sql", 1), ("go", 2)]
    (application,) = plan.written()["applications"]
    assert application["args"]["server"] == given["server"]
    with pytest.raises(ConfigError, match="lora_modules: expected a name and a path"):
        _ = Plan.of({"server": {"lora_modules": ["sql=p"]}}).server_config


def test_keys_come_from_the_environment_of_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRAFTWISE_API_KEY", raising=False)
    assert Plan.of({}).server_config.api_keys == ()
    monkeypatch.setenv("DRAFTWISE_API_KEY", "secret")
    assert Plan.of({}).server_config.api_keys == ("secret",)
    assert Plan.of({"server": {"api_keys": ["mine"]}}).server_config.api_keys == ("mine",)


def test_flags_that_need_ray_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--num-replicas", "2"]) == 2
    assert "--num-replicas: needs --ray" in capsys.readouterr().err
    assert main(["serve", "--write-deployment", "-", "--num-replicas", "0"]) == 2
    assert "num_replicas" in capsys.readouterr().err
