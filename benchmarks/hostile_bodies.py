"""Requests that no honest client sends: each kind of them at the size that hurt, and any number drawn from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"


@dataclass(frozen=True)
class Hostile:
    """A request as it goes over the wire. ``http``: whether it is one at all, and an answer must come."""

    name: str
    data: bytes
    http: bool = True


def head(path: str, *headers: str, method: str = "POST") -> bytes:
    lines = (f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers)
    return "\r\n".join((*lines, "Connection: close", "", "")).encode()


def post(name: str, path: str, body: Any) -> Hostile:
    """``body``: bytes as they are, anything else as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Hostile(name, head(path, f"Content-Length: {len(data)}") + data)


def completion(name: str, **fields: Any) -> Hostile:
    return post(name, COMPLETIONS, {"prompt": "def main(", "max_tokens": 4, **fields})


def schema(inner: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": inner}}


def nested_schema(depth: int) -> Any:
    found: Any = {"type": "string"}
    for _ in range(depth):
        found = {"type": "object", "properties": {"a": found}, "required": ["a"]}
    return found


def tools(count: int) -> list[Any]:
    properties = {f"p{i}": {"type": "string", "enum": ["a", "b"]} for i in range(4)}
    function = {"description": "x" * 20, "parameters": {"type": "object", "properties": properties}}
    return [{"type": "function", "function": {"name": f"f{i}", **function}} for i in range(count)]


def words(count: int) -> list[str]:
    return [f"word{i}" for i in range(count)]


USER = [{"role": "user", "content": "hello"}]


def known() -> list[Hostile]:
    """One request of each kind that has hurt a server, and of its neighbours on this side of the limits."""
    fields = b"".join(b',"f%d":1' % i for i in range(100_000))
    many = head("/health", method="GET").replace(b"Connection: close\r\n", b"") * 10_000
    return [
        completion("stop string of 1 MB", stop="ab" * 500_000),
        completion("stop strings of 10 kB, n = 32", stop=["ab" * 5_000], n=32, ignore_eos=True),
        completion("choice of 100,000", structured_outputs={"choice": words(100_000)}),
        completion("choice of 3,000", structured_outputs={"choice": words(3_000)}),
        completion("bad words, 100,000", bad_words=words(100_000)),
        completion("bad words, 1,000", bad_words=words(1_000)),
        completion("enum of 300,000", response_format=schema({"enum": words(300_000)})),
        completion("enum of 10,000", response_format=schema({"enum": words(10_000)})),
        completion("prompt of 7 MB", prompt="def main(): pass\n" * 410_000),
        completion("prompt of 65 kB", prompt="def main(): pass\n" * 3_800),
        Hostile("headers of 50 MB", head(COMPLETIONS, *(f"X-{i}: {'y' * 5000}" for i in range(10_000)))),
        post("100,000 unknown fields", COMPLETIONS, b'{"prompt": "x"' + fields + b"}"),
        post("nested 4,000,000 deep", COMPLETIONS, b'{"prompt": ' + b"[" * 4_000_000),
        post("4,000,000 numbers", COMPLETIONS, {"prompt": [1] * 4_000_000 and list(range(10)) * 150_000}),
        post("250,000 numbers", COMPLETIONS, {"prompt": list(range(10)) * 25_000}),
        post("1,000,000 prompts", COMPLETIONS, {"prompt": ["a"] * 1_000_000}),
        post("number of 100 kB", COMPLETIONS, b'{"prompt": "x", "seed": ' + b"1" * 100_000 + b"}"),
        completion("regular expression", structured_outputs={"regex": "((a{1,100}){1,100}){1,100}"}),
        completion("schema that is itself", response_format=schema({"$ref": "#"})),
        completion("nested schema", response_format=schema(nested_schema(40))),
        post("900 tools, one forced", CHAT, {"messages": USER, "tools": tools(900), "tool_choice": "required"}),
        post("10,000 messages", CHAT, {"messages": USER * 10_000, "max_tokens": 4}),
        post("10,000 messages of one user", MESSAGES, {"messages": USER * 10_000, "max_tokens": 4}),
        post("a message of 20,000 blocks", MESSAGES, {"max_tokens": 4, "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}] * 20_000}]}),
        post("system of 7 MB", COUNT, {"messages": USER, "system": "def main(): pass\n" * 410_000}),
        completion("64 long marks", structured_outputs={"regex": "a", "after": ["e" * 64] * 8, "opened_by": "e"}),
        post("prompt in 20,000 parts", CHAT, {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 10_000}]}),
        Hostile("10,000 requests in one line", many),
        post("text to 60,000 tokens", "/tokenize", {"prompt": "+-" * 30_000}),
        post("260,000 tokens to text", "/detokenize", {"tokens": [100] * 260_000}),
    ]  # fmt: skip


# --------------------------------------------------------------------------------------------------- at random

_NUMBERS: list[Any] = [
    0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**30, 10**300, 0.5, 1e308, 1e-300, -0.0, 5e-324, True, "1", None, [], {},
]  # fmt: skip
_PLAIN = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "best_of", "echo", "priority",
    "timeout", "truncate_prompt_tokens", "stream", "ignore_eos", "request_id", "suffix", "user", "model",
)  # fmt: skip
_FORM = {"type": "json_schema", "schema": {"type": "object"}}
_TEXT = [
    "a",
    "\x00",
    "\U0001f600",
    "é",
    "{{ 7*7 }}",
    "{% for i in range(10**9) %}",
    "<|endoftext|>",
    "\r\n",
    "\\",
]


def drawn(seed: int, count: int) -> Iterator[Hostile]:
    """``count`` requests; the same for the same seed."""
    rng = random.Random(seed)
    makers: list[Callable[[random.Random], Hostile]] = [
        _numbers, _lists, _structured, _broken, _wire, _chat, _nested, _long, _numbers, _structured, _messages,
    ]  # fmt: skip
    for _ in range(count):
        yield rng.choice(makers)(rng)


def _size(rng: random.Random, most: int) -> int:
    """Mostly small, sometimes ``most``."""
    return int(most ** (rng.random() ** 0.5))


def _numbers(rng: random.Random) -> Hostile:
    fields = {name: rng.choice(_NUMBERS) for name in rng.sample(_PLAIN, rng.randint(1, 3))}
    return completion("numbers", **{"prompt": rng.choice(_TEXT), **fields})


def _lists(rng: random.Random) -> Hostile:
    name = rng.choice(["stop", "stop_token_ids", "bad_words", "allowed_token_ids", "prompt", "logit_bias"])
    count = _size(rng, 300_000)
    kinds: dict[str, Callable[[int], Any]] = {
        "ints": lambda i: i,
        "texts": lambda i: f"w{i}",
        "long": lambda i: "x" * (i % 300),
        "mixed": lambda i: [i, "a", None, [i]][i % 4],
    }
    kind = kinds[rng.choice(list(kinds))]
    if name == "logit_bias":
        return completion(
            "logit_bias", logit_bias={str(i): rng.choice([1, -100, 1e9]) for i in range(count // 10)}
        )
    return completion(name, **{name: [kind(i) for i in range(count)], "n": rng.choice([1, 1, 32])})


def _structured(rng: random.Random) -> Hostile:
    count = _size(rng, 30_000)
    inner = rng.choice([
        {"enum": words(count)},
        {"type": "object", "properties": {w: {"type": "integer"} for w in words(count // 10)}},
        {"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}},
        {"$ref": "http://example.com/x"}, {"type": "string", "pattern": "(a+)+$" * (count // 1000 + 1)},
        {"type": "array", "minItems": count, "items": {"type": "null"}}, {"type": "string", "minLength": 10**9},
        {"allOf": [{"type": "string"}, {"type": "integer"}]}, {"type": 5}, {"not": {}}, True, False,
        {"type": "number", "multipleOf": 1e-300}, {"type": "integer", "minimum": 10**300}, nested_schema(count // 300),
        {"type": "object", "patternProperties": {"(": {}}}, {"const": "x" * count}, {"anyOf": [{}] * count},
    ])  # fmt: skip
    wanted = rng.choice([
        {"response_format": schema(inner)}, {"structured_outputs": {"json": inner}}, {"guided_json": inner},
        {"structured_outputs": {"choice": words(count)}}, {"structured_outputs": {"choice": ["x" * count]}},
        {"structured_outputs": {"regex": rng.choice(["(" * 50, "a{1000}" * 9, "(a|b)*" * 200, "[^", "\\p{L}+", ""])}},
        {"structured_outputs": {"grammar": rng.choice(["start: start", "start: a\na: b", "x" * count, "start: /(/"])}},
        {"structured_outputs": {"json_object": True, "regex": "a"}}, {"structured_outputs": {"x": 1}},
    ])  # fmt: skip
    return completion("structured", **wanted)


def _chat(rng: random.Random) -> Hostile:
    count = _size(rng, 20_000)
    message = {"role": rng.choice(["user", "system", "tool", "", "\x00"]), "content": rng.choice(_TEXT)}
    body: dict[str, Any] = {"messages": [message] * rng.choice([1, 2, count]), "max_tokens": 2}
    body |= rng.choice([
        {}, {"tools": tools(count // 10)}, {"tools": tools(count // 20 + 1), "tool_choice": "required"},
        {"tool_choice": "required"}, {"chat_template": "{{ 1/0 }}"}, {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": {w: w for w in words(count)}}, {"top_logprobs": 10**9, "logprobs": True},
        {"documents": [{"text": "x" * count}]}, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    ])  # fmt: skip
    path = rng.choice([CHAT, CHAT, RESPONSES, "/tokenize"])
    if path == RESPONSES:
        body = {"input": [{"type": rng.choice(["message", "function_call", "x"]), **message}] * count}
    if path == "/tokenize":
        body = {"messages": body["messages"]}
    return post("chat", path, body)


def _messages(rng: random.Random) -> Hostile:
    """Of Anthropic's interface: blocks, tools and choices that are none, or nearly."""
    texts = [
        {"type": "text", "text": rng.choice(_TEXT)},
        {"type": "text"},
        {"type": "image"},
        {},
        None,
        5,
        "x",
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "t", "content": rng.choice(["a", [], [texts[0]], None, 7])},
        {"type": "tool_use", "id": "t", "name": "f", "input": rng.choice([{}, [], None, {"a": 1}])},
        {"type": "thinking", "thinking": rng.choice(["a", None, 3])},
    ]
    blocks: list[Any] = [rng.choice([*texts, *results]) for _ in range(_size(rng, 30))]
    roles = ["user", "assistant", "system", "tool", 3]
    messages = [
        {"role": rng.choice(roles[: rng.choice([2, 5])]), "content": rng.choice([blocks, "a", "", None, {}])}
        for _ in range(rng.randint(0, 4))
    ]
    body: dict[str, Any] = {"messages": messages, "max_tokens": rng.choice([1, 4, 4, 0, -1, None])}
    tool = {
        "name": rng.choice(["f", "", 5]),
        "input_schema": rng.choice([{"type": "object"}, [], None, True]),
    }
    more: dict[str, list[Any]] = {
        "system": ["a", [texts[0]], [None], 5],
        "tools": [[tool], [{}], [{"type": "web_search"}], {}],
        "tool_choice": [{"type": "any"}, {"type": "tool", "name": "f"}, {"type": "tool"}, {}, "any"],
        "thinking": [{"type": "enabled", "budget_tokens": 5}, {"type": "off"}, {}, 3],
        "output_config": [{"format": _FORM}, {"format": 3}, {"effort": 3}],
        "stop_sequences": [["a"], [""], "a", [3]],
        "stream": [True, "yes"],
    }
    for name in rng.sample(sorted(more), rng.randint(0, 3)):
        body[name] = rng.choice(more[name])
    path = rng.choice([MESSAGES, MESSAGES, COUNT])
    if path == COUNT:
        body.pop("max_tokens")
    return post("messages", path, body)


def _nested(rng: random.Random) -> Hostile:
    depth = _size(rng, 500_000)
    opened, closed = rng.choice([(b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":[', b"]}]")])
    end = closed * depth if rng.random() < 0.5 else b""
    name = rng.choice([b"prompt", b"speculation", b"messages", b"response_format", b"x"])
    path = rng.choice([COMPLETIONS, CHAT, RESPONSES, "/tokenize", "/detokenize"])
    return post("nested", path, b'{"' + name + b'":' + opened * depth + b"1" + end + b"}")


def _long(rng: random.Random) -> Hostile:
    size = _size(rng, 9_000_000)
    piece = rng.choice(
        ["x", " ", "\n", "def f(x):\n", "é", "\U0001f600", "\x00", "{[,:", '"', "<|endoftext|>"]
    )
    text = (piece * (size // len(piece) + 1))[:size]
    path, body = rng.choice([
        (COMPLETIONS, {"prompt": text}), (COMPLETIONS, {"prompt": [text] * 3}), (RESPONSES, {"input": text}),
        (CHAT, {"messages": [{"role": "user", "content": text}]}), ("/tokenize", {"prompt": text}),
        (COMPLETIONS, {"prompt": "x", "stop": text}), (COMPLETIONS, {"prompt": "x", text[:100_000]: 1}),
        (COMPLETIONS, {"prompt": "x", "model": text}), (COMPLETIONS, {"prompt": "x", "request_id": text}),
    ])  # fmt: skip
    return post("long", path, {"max_tokens": 2, **body} if path != "/tokenize" else body)


def _broken(rng: random.Random) -> Hostile:
    good = b'{"prompt": "def main(", "max_tokens": 2, "stop": ["\\u00e9"], "seed": 5}'
    data = bytearray(good)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        if rng.random() < 0.5:
            data[at] = rng.randrange(256)
        else:
            data[at:at] = rng.choice(
                [b"NaN", b"Infinity", b"\\ud800", b"\x00", b"1e999", b'"', b"{", b"\xff", b","]
            )
    if rng.random() < 0.2:
        return post("broken", COMPLETIONS, good[: rng.randrange(len(good))])
    return post("broken", COMPLETIONS, bytes(data))


def _wire(rng: random.Random) -> Hostile:
    body = b'{"prompt": "x", "max_tokens": 1}'
    chunked = b"".join(b"%x\r\n%c\r\n" % (1, byte) for byte in body)
    count = _size(rng, 5_000)
    length = f"Content-Length: {len(body)}"
    data, answered = rng.choice([
        (head(COMPLETIONS, *(f"X-{i}: y" for i in range(count)), length) + body, True),
        (head(COMPLETIONS, f"X: {'y' * count * 100}", length) + body, True),
        (head(COMPLETIONS + "?" + "x" * count, length) + body, True),
        (head(COMPLETIONS, "Transfer-Encoding: chunked") + chunked + b"0\r\n\r\n", True),
        (head(COMPLETIONS, "Transfer-Encoding: chunked") + chunked + b"zz\r\n", True),
        (head(COMPLETIONS, "Content-Length: -5") + body, True),
        (head(COMPLETIONS, "Content-Length: 3") + body, True),
        (head(COMPLETIONS, "Content-Length: 99999999999") + body, True),
        (head(COMPLETIONS, length, "Content-Length: 3") + body, True),
        (head(COMPLETIONS, length, "Upgrade: websocket") + body, True),
        (head(COMPLETIONS, length, "Origin: http://evil.example") + body, True),
        (head("/" + "a/" * count, method="GET"), True),
        (head("/%00%ff%2e%2e", method="GET"), True),
        (head(rng.choice(["/v1/embeddings", "/static/../x", "*", "//"]), method=rng.choice(["PUT", "OPTIONS"])), True),
        (head(COMPLETIONS, length).replace(b"application/json", b"text/plain") + body, True),
        (bytes(rng.randrange(256) for _ in range(count)), False),
        (b"\x16\x03\x01" + bytes(count), False),
        (b"GET " + b"x" * count * 50, False),
        (head(COMPLETIONS, length) + body[:5], False),
    ])  # fmt: skip
    return Hostile("wire", data, answered)
