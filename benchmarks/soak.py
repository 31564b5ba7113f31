"""Soak a server: random requests, of which many are cancelled, malformed, or never read, and then look for damage.

Starts ``draftwise serve`` on a free port, learns the reference (greedy answers without speculation), sends the load,
and checks that every complete greedy answer is the reference, that nothing is left running or held at the end, and
that the server's memory stayed flat after a warm-up.

    python benchmarks/soak.py                    # 2,000 requests on the embedded model
    python benchmarks/soak.py --requests 100 --model path/to/model
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from draftwise.bench.http_client import HttpError, Target, get_text, request

PROMPTS = [
    "def main(",
    "import os\nimport sys\n\n\ndef walk(path):\n    for name in os.listdir(path):\n",
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def put(self, item):\n",
    "for i in range(10):\n    for i in range(10):\n        for i in range(10):\n",
    "x = 1\n" * 12,
    'if __name__ == "__main__":\n',
    "# a comment\n",
    "\n\n\ntry:\n    import json\nexcept ImportError:\n",
]
MALFORMED: list[Any] = [
    {}, {"prompt": 1}, {"prompt": "x", "temperature": -1}, {"prompt": "x", "max_tokens": -1},
    {"prompt": "x", "unknown": 1}, {"prompt": "x" * 100_000}, {"prompt": "x", "speculation": {"method": "?"}},
    {"prompt": [10**9]}, {"prompt": "x", "n": 10**9}, [], "x",
]  # fmt: skip


class Soak:
    """The load on one server. ``problems`` says what went wrong."""

    def __init__(self, target: Target, pid: int | None, args: argparse.Namespace) -> None:
        self.target = target
        self.pid = pid
        self.args = args
        self.rng = random.Random(args.seed)
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.reference: dict[str, list[int]] = {}
        self.methods = ["none"]
        self.memory: list[tuple[int, int]] = []  # (requests done, resident KiB)
        self.done = 0

    async def run(self) -> None:
        self.methods = json.loads(await get_text(self.target, "/version"))["methods"]
        for prompt in PROMPTS:
            body = self._body(prompt, self.args.max_tokens) | {
                "temperature": 0,
                "speculation": {"method": "none"},
            }
            self.reference[prompt] = (await self._ids(body))[0]
        limit = asyncio.Semaphore(self.args.concurrency)
        kinds = [self._draw_kind() for _ in range(self.args.requests)]

        async def one(kind: str) -> None:
            async with limit:
                try:
                    await asyncio.wait_for(getattr(self, kind)(), 120)
                except TimeoutError:
                    self.problems.append(f"stuck: {kind}")
                except HttpError as error:
                    self.problems.append(f"{kind}: {error}")
                self.counts[kind] += 1
                self.done += 1
                if self.done % max(1, self.args.requests // 20) == 0:
                    self._note_memory()

        await asyncio.gather(*(one(kind) for kind in kinds))
        await self._settle()
        self._note_memory()
        self._check_memory()

    def _draw_kind(self) -> str:
        x = self.rng.random()
        return "cancelled" if x < 0.30 else "malformed" if x < 0.35 else "unread" if x < 0.38 else "answered"

    # ------------------------------------------------------------------------------------------- requests

    def _body(self, prompt: str, tokens: int) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "return_token_ids": True}

    def _random_body(self) -> dict[str, Any]:
        rng = self.rng
        body = self._body(rng.choice(PROMPTS), rng.randint(1, self.args.max_tokens))
        method = rng.choice(self.methods)
        body["speculation"] = {"method": method}
        if method != "none" and rng.random() < 0.7:
            body["speculation"]["num_speculative_tokens"] = rng.randint(1, 8)
        if rng.random() < 0.6:
            body["temperature"] = 0
        else:
            body |= {"temperature": rng.choice([0.5, 1.0]), "n": rng.choice([1, 1, 2])}
            if rng.random() < 0.5:
                body["seed"] = rng.randint(0, 3)
        if rng.random() < 0.2:
            body["logprobs"] = 2
        if rng.random() < 0.2:
            body["return_trace"] = True
        body["stream"] = rng.random() < 0.6
        return body

    async def _ids(self, body: dict[str, Any]) -> list[list[int]]:
        """Token ids of every choice. Raises HttpError for an error answer."""
        out: dict[int, list[int]] = {}
        async with request(self.target, "POST", "/v1/completions", body) as answer:
            if answer.status != 200:
                raise HttpError(answer.status, (await answer.body()).decode()[:200])
            if body.get("stream"):
                async for data in answer.events():
                    event = {"choices": []} if data == b"[DONE]" else json.loads(data)
                    if "error" in event:
                        raise HttpError(200, str(event["error"]))
                    for choice in event["choices"]:
                        out.setdefault(choice["index"], []).extend(choice["token_ids"])
            else:
                for choice in json.loads(await answer.body())["choices"]:
                    out[choice["index"]] = choice["token_ids"]
        return [out[i] for i in sorted(out)]

    async def answered(self) -> None:
        body = self._random_body()
        choices = await self._ids(body)
        if any(len(ids) != body["max_tokens"] for ids in choices):
            self.problems.append(f"{[len(ids) for ids in choices]} tokens instead of {body['max_tokens']}")
        if body["temperature"] == 0 and choices[0] != self.reference[body["prompt"]][: body["max_tokens"]]:
            self.problems.append(f"wrong greedy answer with {body['speculation']}")

    async def cancelled(self) -> None:
        """The client leaves: at once, or after a few events."""
        body = self._random_body() | {"max_tokens": self.args.max_tokens}
        async with request_or_none(self.target, body, self.rng.random() * 0.02) as answer:
            if answer is not None and body["stream"]:
                left = self.rng.randint(0, 5)
                async for _ in answer.events():
                    left -= 1
                    if left < 0:
                        break

    async def malformed(self) -> None:
        async with request(self.target, "POST", "/v1/completions", self.rng.choice(MALFORMED)) as answer:
            await answer.body()
            if answer.status not in (400, 413):
                self.problems.append(f"a malformed body was answered with {answer.status}")

    async def unread(self) -> None:
        """A client that asks for much and reads nothing for a while."""
        body = self._random_body() | {"stream": True, "return_trace": True, "logprobs": 5, "n": 1}
        body["max_tokens"] = self.args.max_tokens
        data = json.dumps(body).encode()
        _, writer = await asyncio.open_connection(self.target.host, self.target.port, limit=1024)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
        head += "Content-Type: application/json\r\n\r\n"
        writer.write(head.encode() + data)
        await asyncio.sleep(self.rng.random() * 3)
        writer.transport.abort()

    # --------------------------------------------------------------------------------------------- checks

    async def _settle(self) -> None:
        """Everything must end and give back what it held."""
        for _ in range(100):
            load = json.loads(await get_text(self.target, "/load"))
            if not any(load.values()):
                return
            await asyncio.sleep(0.1)
        self.problems.append(f"left behind: {load}")

    def _note_memory(self) -> None:
        if self.pid is not None:
            text = Path(f"/proc/{self.pid}/status").read_text()
            resident = next(line for line in text.splitlines() if line.startswith("VmRSS"))
            self.memory.append((self.done, int(resident.split()[1])))

    def _check_memory(self) -> None:
        after = [kib for done, kib in self.memory if done >= self.args.requests * self.args.warm_up]
        if len(after) > 1 and after[-1] > after[0] * (1 + self.args.memory_limit):
            self.problems.append(f"memory grew from {after[0]} to {after[-1]} KiB after the warm-up")

    def report(self) -> dict[str, Any]:
        return {
            "requests": dict(self.counts),
            "memory_kib": self.memory,
            "problems": dict(Counter(self.problems)),
        }


class request_or_none:
    """`request`, given up if there is no answer after so many seconds (then None)."""

    def __init__(self, target: Target, body: Any, seconds: float) -> None:
        self._context = request(target, "POST", "/v1/completions", body)
        self._seconds = seconds
        self._entered = False

    async def __aenter__(self) -> Any:
        try:
            answer = await asyncio.wait_for(self._context.__aenter__(), self._seconds)
        except TimeoutError:
            return None
        self._entered = True
        return answer

    async def __aexit__(self, *error: Any) -> None:
        if self._entered:
            await self._context.__aexit__(*error)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="model to serve (the embedded one)")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--warm-up", type=float, default=0.4, help="share of the requests before memory must be flat"
    )
    parser.add_argument("--memory-limit", type=float, default=0.02, help="share by which it may still grow")
    args, options = parser.parse_known_args(argv)
    command = [sys.executable, "-m", "draftwise", "serve", "--port", "0", "--send-timeout", "2", *options]
    if args.model:
        command += ["--model", args.model]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()  # "Draftwise serves NAME at URL", or nothing if it failed
        if not line:
            return 1
        soak = Soak(Target.parse(line.split()[-1]), server.pid, args)
        asyncio.run(soak.run())
    finally:
        server.terminate()
        code = server.wait(60)
    if code != 0:
        soak.problems.append(f"the server ended with {code}")
    print(json.dumps(soak.report()))
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
