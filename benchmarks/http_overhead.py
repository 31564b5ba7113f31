"""What HTTP adds to the engine: the same requests to `AsyncLLM` in a process and to ``draftwise serve``, alternating.

``python benchmarks/http_overhead.py`` prints one JSON object. Both processes are alive all the time and only one works
at a time. Plain greedy decoding of the embedded model, whose steps are shorter than those of any model one would
serve: the share that HTTP takes is at its largest. The client is not free either: it takes part in every difference,
and at many streams it runs beside the server on the same cores; it reads bytes and looks for the end, no more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import select
import selectors
import shlex
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
"""What the last event and the end of a chunked body look like."""
SHARED = 4
"""Requests before measuring: caches and recorded passes."""


def prompts(count: int, tokens: int) -> list[list[int]]:
    """Token ids that share no prefix, so that the prefix cache changes nothing. The same for both sides."""
    from draftwise.bench.workloads import code_prompts
    from draftwise.config.embedded import embedded_path
    from draftwise.models.tokenizer import load_tokenizer

    found = code_prompts(load_tokenizer(str(embedded_path("target"))), count, tokens, 0)
    return [list(ids) for ids in found]


# ------------------------------------------------------------------------------------------- the engine alone


def engine_alone(args: argparse.Namespace) -> None:
    """A process with an engine: a line with a list of prompts in, a line with times out."""
    from draftwise import AsyncLLM, SamplingParams

    llm = AsyncLLM()
    params = SamplingParams(
        max_tokens=args.tokens,
        temperature=0,
        ignore_eos=True,
        output_kind="delta",
        speculation={"method": args.method},
    )

    async def one(ids: list[int]) -> list[float]:
        start = time.perf_counter()
        first = 0.0
        async for _ in llm.generate({"prompt_token_ids": ids}, params):
            first = first or time.perf_counter() - start
        return [first, time.perf_counter() - start]

    async def all_of(many: list[list[int]]) -> dict[str, Any]:
        start = time.perf_counter()
        each = await asyncio.gather(*(one(ids) for ids in many))
        return {"each": each, "seconds": time.perf_counter() - start}

    async def main() -> None:
        loop = asyncio.get_running_loop()
        print("ready", flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(await all_of(json.loads(line))), flush=True)

    try:
        import uvloop

        uvloop.run(main())
    except ImportError:
        asyncio.run(main())
    llm.close()


class Alone:
    def __init__(self, args: argparse.Namespace) -> None:
        command = [
            sys.executable,
            __file__,
            "--engine",
            "--tokens",
            str(args.tokens),
            "--method",
            args.method,
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None and self._process.stdin is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        assert self._out.readline() == "ready\n"

    def run(self, many: list[list[int]]) -> dict[str, Any]:
        self._in.write(json.dumps(many) + "\n")
        self._in.flush()
        answer: dict[str, Any] = json.loads(self._out.readline())
        return answer

    def close(self) -> None:
        self._in.close()
        self._process.wait(30)


# -------------------------------------------------------------------------------------------------- over HTTP


class Served:
    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._connections: list[socket.socket] = []
        command = [sys.executable, "-m", "draftwise", "serve", "--port", "0", "--log-interval", "0"]
        command += shlex.split(args.serve_options)
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._port = int(self._process.stdout.readline().rpartition(":")[2])

    def _request(self, ids: list[int]) -> bytes:
        body = json.dumps(
            {
                "prompt": ids,
                "max_tokens": self._args.tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "speculation": {"method": self._args.method},
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def run(self, many: list[list[int]]) -> dict[str, Any]:
        """Connections are kept from run to run, as clients keep them, unless the server closed them meanwhile."""
        self._connections = [c for c in self._connections if not select.select([c], [], [], 0)[0]]
        while len(self._connections) < len(many):
            connection = socket.create_connection(("127.0.0.1", self._port))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections.append(connection)
        waiting = list(zip(self._connections, map(self._request, many), strict=False))
        selector = selectors.DefaultSelector()
        each = [[0.0, 0.0] for _ in many]
        ends = [b""] * len(many)
        begin, used = time.perf_counter(), time.process_time()
        starts = []
        for i, (connection, request) in enumerate(waiting):
            starts.append(time.perf_counter())
            connection.sendall(request)
            selector.register(connection, selectors.EVENT_READ, i)
        left = len(many)
        while left:
            for key, _ in selector.select():
                data = waiting[key.data][0].recv(1 << 16)
                now = time.perf_counter() - starts[key.data]
                times = each[key.data]
                seen = ends[key.data] + data
                if not times[0] and b"data: {" in seen:
                    times[0] = now
                if seen.endswith(END) or not data:
                    assert seen.endswith(END), "the stream ended early"
                    times[1] = now
                    selector.unregister(waiting[key.data][0])
                    left -= 1
                ends[key.data] = seen[-len(END) :]
        seconds = time.perf_counter() - begin
        return {"each": each, "seconds": seconds, "client": (time.process_time() - used) / seconds}

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._process.terminate()
        self._process.wait(30)


# --------------------------------------------------------------------------------------------------- compare


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Medians over rounds of what HTTP adds to each pair of runs; milliseconds."""
    many = prompts(max(args.rounds + SHARED, args.streams), args.prompt_tokens)
    alone, served = Alone(args), Served(args)
    try:
        for ids in many[-SHARED:]:
            alone.run([ids])
            served.run([ids])
        first, token, plain_first, plain_token = [], [], [], []
        for i in range(args.rounds):
            sides = (alone, served) if i % 2 else (served, alone)
            found = {side: side.run([many[i]])["each"][0] for side in sides}
            (a_first, a_end), (s_first, s_end) = found[alone], found[served]
            gaps = args.tokens - 1
            plain_first.append(a_first)
            plain_token.append((a_end - a_first) / gaps)
            first.append(s_first - a_first)
            token.append((s_end - s_first) / gaps - plain_token[-1])
        shares, speeds, client = [], [], []
        batch = many[: args.streams]
        alone.run(batch)
        served.run(batch)
        for i in range(args.batches):
            sides = (alone, served) if i % 2 else (served, alone)
            found = {side: side.run(batch) for side in sides}
            seconds = {side: found[side]["seconds"] for side in sides}
            client.append(found[served]["client"])
            shares.append(1 - seconds[alone] / seconds[served])
            speeds.append(args.streams * args.tokens / seconds[alone])
    finally:
        alone.close()
        served.close()

    def middle(values: list[float]) -> dict[str, float]:
        low, mid, high = statistics.quantiles(values, n=4)
        return {"median": mid, "quartile_low": low, "quartile_high": high}

    return {
        "settings": {k: v for k, v in vars(args).items() if k != "engine"},
        "engine_first_token_ms": middle([1e3 * v for v in plain_first]),
        "engine_token_ms": middle([1e3 * v for v in plain_token]),
        "added_first_token_ms": middle([1e3 * v for v in first]),
        "added_token_ms": middle([1e3 * v for v in token]),
        "engine_tokens_per_s": middle(speeds),
        "throughput_lost": middle(shares),
        "client_share_of_a_core": middle(client),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40, help="pairs of single requests (40)")
    parser.add_argument("--batches", type=int, default=7, help="pairs of batches (7)")
    parser.add_argument("--streams", type=int, default=64, help="requests of a batch (64)")
    parser.add_argument("--tokens", type=int, default=128, help="generated per request (128)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="(64)")
    parser.add_argument("--method", default="none", help="speculation method (none: plain decoding)")
    parser.add_argument("--serve-options", default="", help="more options of draftwise serve, in one string")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        engine_alone(args)
    else:
        print(json.dumps(compare(args), indent=2))


if __name__ == "__main__":
    main()
